"""`python -m logyard.client._async.generate [--check]`: make `_sync` of the files beside this one.

Works on tokens: ``async`` and ``await`` go, names are exchanged by `NAMES`, all else stays, each line one further down,
so that a traceback in the one is found in the other. A test says when what is committed is stale (`tests/test_tidy`).
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent
TARGET = SOURCE.with_name("_sync")
NAMES = {
    "AbstractAsyncContextManager": "AbstractContextManager",
    "AsyncIterable": "Iterable",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "_async": "_sync",
    "asynccontextmanager": "contextmanager",
}
SORTED = "from collections.abc import "
HEAD = "# Made from client/_async/{name} by `python -m logyard.client._async.generate`: change that file.\n"
PACKAGE = '''"""The verbs of the blocking handles: made from `_async`, file by file. See there."""
'''


def blocking(text: str, name: str) -> str:
    """Return the blocking twin of a source."""
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type != tokenize.NAME:
            continue
        row, (start, end) = token.start[0] - 1, (token.start[1], token.end[1])
        line = lines[row]
        if token.string in ("async", "await"):
            lines[row] = line[:start] + line[end:].lstrip(" ")
        elif token.string in NAMES:
            lines[row] = line[:start] + NAMES[token.string] + line[end:]
    return HEAD.format(name=name) + "".join(map(_in_order, lines))


def _in_order(line: str) -> str:
    """Return a line of imports with each name once and in order: two may have become one."""
    if not line.startswith(SORTED):
        return line
    return SORTED + ", ".join(sorted(set(line.removeprefix(SORTED).strip().split(", ")))) + "\n"


def made() -> Iterator[tuple[Path, str]]:
    """Yield each file of `_sync` with what belongs in it."""
    yield TARGET / "__init__.py", PACKAGE
    for path in sorted(SOURCE.glob("*.py")):
        if path.name not in ("__init__.py", "generate.py"):
            yield TARGET / path.name, blocking(path.read_text("utf-8"), path.name)


def stale() -> list[str]:
    """Return the names of files in `_sync` that are not what their source makes, are missing or have no source."""
    wanted = dict(made())
    found = {path for path in TARGET.glob("*.py") if wanted.get(path) == path.read_text("utf-8")}
    return sorted(path.name for path in {*wanted, *TARGET.glob("*.py")} - found)


def main(arguments: list[str]) -> int:
    """Write what is stale, or with `--check` only name it; return the exit code."""
    names = stale()
    if "--check" in arguments:
        print("\n".join(f"client/_sync/{name} is stale" for name in names) or "nothing is stale")
        return bool(names)
    TARGET.mkdir(exist_ok=True)
    wanted = dict(made())
    for path in TARGET.glob("*.py"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    print(f"{len(names)} of {len(wanted)} files were stale")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
