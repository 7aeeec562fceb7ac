"""`python -m tests.mutants --seed N [--count K] [--only PATH,...] [--changed] [--json]`: is what is tested noticed?

Draws small changes of the product from its syntax tree (a statement left out, a condition turned round, `and` for `or`,
`continue` for `break`, a comparison or a number off by one; syncs and renames first), puts each into a copy of the tree
and runs the tests that execute the line there. A change that no test notices is a survivor: write the test, or say in
`mutants_equivalent.json` why it changes nothing. Exit code 1 when fewer than 95 % of the others were noticed.

Which test executes which line is found once for a commit by running the suite under coverage (`--tests` names less of
it), and kept beside what `make prove` keeps; so is each verdict, and a run that was cut goes on where it was. What runs
in processes of its own is not seen by that: no test is known for such a line, and it is counted apart.
"""

from __future__ import annotations

import argparse
import ast
import copy
import heapq
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .prove import RESULTS, ROOT, commit
from .source_tree import PACKAGES

WHERE = (
    "engine", "payloads", "client/session.py", "client/session_keeper.py", "client/sync_session.py",
    "client/sequences.py",
)  # fmt: skip
"""What is drawn from, unless --only says otherwise."""
SYNCS = frozenset({"datasync", "sync_file", "sync_directory", "sync", "fsync", "fdatasync", "rename", "replace"})
TESTS_MOST = 100
"""Tests that judge a change: those that execute least beside it."""
TESTS_AT_ONCE = 25
PATIENCE_S = 240.0
"""A change that makes so many tests hang is noticed."""
WANTED = 0.95
VARIABLE = "LOGYARD_MUTANT_MAP"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
Lines = dict[str, dict[int, list[str]]]
"""By file and line: the tests that execute it."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of a file: bytes `start` up to `end` become `text`."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """The changed file."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """All changes of what functions of a file do."""
    begins = [0]
    for row in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(row))

    def change(node: ast.stmt | ast.expr, kind: str, text: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        return Mutant(path, node.lineno, kind, start, end, text)

    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in within(function):
                for kind, text in changes(node):
                    yield change(node, kind, text)


def within(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt | ast.expr]:
    """What a function's body holds; its annotations, asserts and the functions in it are others'."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assert | ast.JoinedStr):
            continue
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        waiting += [child for child in ast.iter_child_nodes(node) if child is not getattr(node, "annotation", None)]


def changes(node: ast.stmt | ast.expr) -> Iterator[tuple[str, str]]:
    """What a node may be changed into: kind and text."""
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            yield "sync left out" if name in SYNCS else "statement left out", "pass"
    elif isinstance(node, ast.AugAssign):
        yield "statement left out", "pass"
    elif isinstance(node, ast.Continue):
        yield "break for continue", "break"
    elif isinstance(node, ast.Break):
        yield "continue for break", "continue"
    elif isinstance(node, ast.BoolOp):
        other = copy.copy(node)
        other.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "and for or" if isinstance(node.op, ast.Or) else "or for and", f"({ast.unparse(other)})"
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        turned = copy.copy(node)
        turned.ops = [TURNED[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", f"({ast.unparse(turned)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition turned", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
        yield "constant", repr(not value) if isinstance(value, bool) else repr(value + 1)


def run_pytest(root: Path, tests: Sequence[str], *words: str, **environ: str) -> int:
    """Run tests of a tree, and nothing of any other one; 124: they did not end in time."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words, *tests]
    patience = None if VARIABLE in environ else PATIENCE_S
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return 124
    return done.returncode


def judge(root: Path, mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether tests notice a change, which is made in `root` and undone. `tests`: the likeliest first."""
    path = root / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        parts = (tests[at : at + TESTS_AT_ONCE] for at in range(0, len(tests), TESTS_AT_ONCE))
        return any(run_pytest(root, part) not in (0, 5) for part in parts)
    finally:
        path.write_bytes(source)


# Which test executes which line: a plugin of pytest, in a run of its own.


class Recorder:
    """Notes the lines that each test executes in this process."""

    def __init__(self, target: Path) -> None:
        from coverage import Coverage

        self.target = target
        self.coverage = Coverage(data_file=None, config_file=False, source=[str(ROOT / name) for name in PACKAGES])
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A context for each test."""
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Write them down."""
        self.coverage.stop()
        data = self.coverage.get_data()
        found: Lines = {}
        for file in data.measured_files():
            path = Path(file).resolve().relative_to(ROOT).as_posix()
            rows = found.setdefault(path, {})
            for line, contexts in data.contexts_by_lineno(file).items():
                rows.setdefault(line, []).extend(name for name in contexts if name)
        self.target.write_text(json.dumps(narrowest(found)))


def narrowest(lines: Lines) -> Lines:
    """Of the tests that execute a line those that execute least beside it, in that order."""
    sizes = Counter(name for rows in lines.values() for names in rows.values() for name in names)
    return {
        file: {line: heapq.nsmallest(TESTS_MOST, names, lambda one: (sizes[one], one)) for line, names in rows.items()}
        for file, rows in lines.items()
    }


def pytest_configure(config: pytest.Config) -> None:
    """This module as a plugin (`-p tests.mutants`)."""
    if VARIABLE in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ.pop(VARIABLE))))


def known_lines(tests: Sequence[str], at: str) -> Lines:
    """Which test executes which line; found once for a commit and these tests."""
    RESULTS.mkdir(exist_ok=True)
    name = "+".join(tests).replace("/", "-")
    path = RESULTS / f"mutants-lines-{name}.json"
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["key"] == at and at and not at.endswith("-dirty"):
            return {file: {int(line): names for line, names in rows.items()} for file, rows in kept["lines"].items()}
    target = path.with_suffix(".new")
    words = ("-p", "tests.mutants", "-m", "not long and not spark", "--maxfail", "1000000")
    run_pytest(ROOT, tests, *words, **{VARIABLE: str(target)})
    lines = json.loads(target.read_text())
    target.unlink()
    path.write_text(json.dumps({"key": at, "lines": lines}))
    return {file: {int(line): names for line, names in rows.items()} for file, rows in lines.items()}


class Verdicts:
    """What was noticed by tests, and what was not: kept for a commit, so that no change is judged twice there."""

    def __init__(self, path: Path, at: str) -> None:
        self._path = path
        self._at = at
        self._known: dict[str, bool] = {}
        if at and not at.endswith("-dirty") and path.exists():
            kept = json.loads(path.read_text())
            self._known = kept["verdicts"] if kept["at"] == at else {}

    def of(self, mutant: Mutant, judge: Callable[[], bool]) -> bool:
        """Return whether a change is noticed; `judge` says so of one that was not tried yet."""
        key = json.dumps(mutant)
        if key not in self._known:
            self._known[key] = judge()
            self._path.write_text(json.dumps({"at": self._at, "verdicts": self._known}))
        return self._known[key]


def changed_files() -> set[str]:
    """Files that differ from the last commit, or that it changed."""
    words = ["git", "-C", str(ROOT), "diff", "--name-only", "HEAD~1"]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


def drawn(paths: Sequence[str], lines: Lines, seed: int, count: int) -> tuple[list[Mutant], int]:
    """Changes to be tried, syncs and renames first, and how many were passed over because no test is known."""
    everything = [one for path in paths for one in mutants(path, (ROOT / path).read_bytes())]
    random.Random(seed).shuffle(everything)
    everything.sort(key=lambda one: one.kind != "sync left out")
    known = [one for one in everything if lines.get(one.path, {}).get(one.line)]
    syncs = sum(one.kind == "sync left out" for one in known)
    # A third of a sample at most is syncs: there are few of them, and all else is to be seen as well.
    first = min(syncs, count // 3)
    return known[:first] + known[syncs:][: count - first], len(everything) - len(known)


def copied(target: Path) -> None:
    """What git tracks, links as links."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def reasons() -> dict[tuple[str, str, str, str], str]:
    """Changes that were looked at and change nothing: by file, kind, the line before and the line."""
    rows = json.loads(EQUIVALENT.read_text())
    return {(row["path"], row["kind"], row["after"], row["line"]): row["reason"] for row in rows}


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="changes that are tried")
    parser.add_argument("--only", default=",".join(WHERE), help="files or folders, with commas")
    parser.add_argument("--changed", action="store_true", help="only files that the last commit or the tree changed")
    parser.add_argument("--tests", default="tests", help="the tests that may judge, with commas")
    parser.add_argument("--json", action="store_true", help="one object, the last line")
    options = parser.parse_args(arguments)
    chosen = [ROOT / name for name in options.only.split(",")]
    files = [file for one in chosen for file in ([one] if one.is_file() else sorted(one.rglob("*.py")))]
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    if options.changed:
        paths = sorted(changed_files() & set(paths))
    lines = known_lines(options.tests.split(","), commit())
    verdicts = Verdicts(RESULTS / "mutants-verdicts.json", commit())
    tried, unknown = drawn(paths, lines, options.seed, options.count)
    equivalent, survivors, known = reasons(), [], 0
    with tempfile.TemporaryDirectory(prefix="logyard-mutants-") as directory:
        root = Path(directory)
        copied(root)
        for one in tried:
            if verdicts.of(one, partial(judge, root, one, lines[one.path][one.line])):
                continue
            rows = (root / one.path).read_text("utf-8").splitlines()
            after, text = rows[one.line - 2].strip(), rows[one.line - 1].strip()
            if (one.path, one.kind, after, text) in equivalent:
                known += 1
                continue
            survivors.append({"path": one.path, "line": one.line, "kind": one.kind, "text": text, "into": one.text})
            print(f"{one.path}:{one.line}: {one.kind}: {text}", file=sys.stderr, flush=True)
    counted = len(tried) - known
    share = 1.0 if not counted else (counted - len(survivors)) / counted
    row: dict[str, Any] = {
        "ok": share >= WANTED, "seed": options.seed, "mutants": len(tried), "noticed": counted - len(survivors),
        "equivalent": known, "share": round(share, 3), "without_a_test": unknown, "survivors": survivors,
    }  # fmt: skip
    print(json.dumps(row) if options.json else f"{row['noticed']} of {counted} noticed, {known} change nothing")
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
