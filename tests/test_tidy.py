"""Style as a test: sizes, names, docstrings, and words and calls that have no place in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

from logyard.client._async.generate import blocking, stale

from .source_tree import ROOT, Source, product_sources, test_sources

pytestmark = pytest.mark.xdist_group("source")

FILE_LINES_MAX = 900
"""A hard look, no shape: a tight limit shredded concepts into files."""
FUNCTION_LINES_MAX = 80
VAGUE = frozenset({"manager", "helper", "helpers", "util", "utils", "common", "base"})
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(work|home|root|opt)/\w")
CONTAINERS = frozenset({"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"})


def long_files(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{source.path}: {lines} lines, at most {FILE_LINES_MAX}: does it hold one concept?"


def long_functions(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def missing_docstrings(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.path}: say what it is, which invariant it keeps and who calls it"


def vague_names(source: Source) -> Iterator[str]:
    if VAGUE & set(source.module.rpartition(".")[2].split("_")):
        yield f"{source.path}: a name that says nothing"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            words = {word.lower() for word in re.findall(r"[A-Z][a-z0-9]*", node.name)}
            if VAGUE & words:
                yield f"{source.path}:{node.lineno}: class {node.name}: a name that says nothing"


def unfinished_marks(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{source.path}:{number}: finish it, or write it in docs/status.md: {line.strip()}"


def sleeps(source: Source) -> Iterator[str]:
    """A blocking sleep stands in place of a condition; a timer of the event loop is trio's."""
    for node in source.nodes:
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) == ("time", "sleep")
        ):
            yield f"{source.path}:{node.lineno}: wait for a condition, not for time"
    for line, name in source.imports:
        if name == "time.sleep":
            yield f"{source.path}:{line}: wait for a condition, not for time"


def module_state(source: Source) -> Iterator[str]:
    """Empty containers at module level wait to be filled; `global` fills them. Constant tables are fine."""
    for node in source.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = (isinstance(value, ast.List | ast.Set) and not value.elts) or (
            isinstance(value, ast.Dict) and not value.keys
        )
        made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in CONTAINERS
        if empty or (made and isinstance(value, ast.Call) and not value.args):
            yield f"{source.path}:{node.lineno}: module-level state"
    for inner in source.nodes:
        if isinstance(inner, ast.Global):
            yield f"{source.path}:{inner.lineno}: global {', '.join(inner.names)}"


def missing_annotations_import(source: Source) -> Iterator[str]:
    code = [
        node for node in source.tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    if code and not any(name == "__future__.annotations" for _, name in source.imports):
        yield f"{source.path}: from __future__ import annotations"


def mocks(source: Source) -> Iterator[str]:
    for line, name in source.imports:
        if name.startswith(("unittest.mock", "mock.")) or name == "mock":
            yield f"{source.path}:{line}: use the real thing, or the in-memory twin that ships beside it"


Rule = Callable[[Source], Iterator[str]]
PRODUCT_RULES: tuple[Rule, ...] = (
    long_files, long_functions, missing_docstrings, vague_names, unfinished_marks, sleeps, module_state,
    missing_annotations_import,
)  # fmt: skip
TEST_RULES: tuple[Rule, ...] = (
    long_functions,
    vague_names,
    unfinished_marks,
    sleeps,
    mocks,
    missing_annotations_import,
)


@pytest.mark.parametrize("rule", PRODUCT_RULES, ids=lambda rule: rule.__name__)
def test_product_code(rule: Rule) -> None:
    offences = [offence for source in product_sources() for offence in rule(source)]
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_test_code(rule: Rule) -> None:
    offences = [offence for source in test_sources() for offence in rule(source)]
    assert not offences, "\n" + "\n".join(offences)


def test_the_blocking_handles_are_what_their_source_makes() -> None:
    assert stale() == [], "run python -m logyard.client._async.generate"


def test_a_blocking_twin_awaits_nothing_and_keeps_its_text() -> None:
    text = """from collections.abc import AsyncIterable, AsyncIterator, Iterable


async def each(source: AsyncIterable[int] | Iterable[int]) -> AsyncIterator[int]:
    \"\"\"Yield what an async source await.\"\"\"
    async with opened() as one:
        found = [x async for x in source if await one.wants(await x)]
    raise StopAsyncIteration
"""
    assert (
        blocking(text, "x.py").split("\n", 1)[1]
        == """from collections.abc import Iterable, Iterator


def each(source: Iterable[int] | Iterable[int]) -> Iterator[int]:
    \"\"\"Yield what an async source await.\"\"\"
    with opened() as one:
        found = [x for x in source if one.wants(x)]
    raise StopIteration
"""
    )


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def test_no_file_names_one_machine() -> None:
    offences = []
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        offences += [
            f"{name}:{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)
        ]
    assert not offences, "\n" + "\n".join(offences)


def test_nothing_that_is_built_is_tracked() -> None:
    built = re.compile(r"(^|/)(__pycache__|\.venv|build|dist|[^/]*\.egg-info)/|\.(pyc|so)$")
    assert [name for name in tracked_files() if built.search(name)] == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (long_files, "engine/x.py", "\n" * (FILE_LINES_MAX + 1)),
        (long_functions, "engine/x.py", "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
        (missing_docstrings, "engine/x.py", "x = 1"),
        (vague_names, "engine/wal_utils.py", ""),
        (vague_names, "engine/x.py", "class WalManager: pass"),
        (unfinished_marks, "engine/x.py", "# TO" + "DO: later"),
        (sleeps, "engine/x.py", "import time\ntime.sleep(1)"),
        (sleeps, "engine/x.py", "from time import sleep"),
        (module_state, "engine/x.py", "cache = {}"),
        (module_state, "engine/x.py", "cache: dict[int, int] = dict()"),
        (module_state, "engine/x.py", "def f():\n    global count"),
        (missing_annotations_import, "engine/x.py", "x = 1"),
        (mocks, "tests/x.py", "from unittest.mock import patch"),
    ],
)
def test_a_planted_offence_is_caught(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, path.removesuffix(".py").replace("/", "."), text)))


def test_what_is_fine_passes() -> None:
    head = '"""Doc."""\n\nfrom __future__ import annotations\n\nimport trio\n\n'
    text = head + "TABLE = {1: 2}\n\n\nasync def f():\n    await trio.sleep(1)\n"
    source = Source("engine/x.py", "logyard.engine.x", text)
    assert [offence for rule in PRODUCT_RULES for offence in rule(source)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see /" + "work/main/x", True),
        ("cd /" + "root/y", True),
        ("https://host/" + "opt/x", False),
        ("{home}/x", False),
    ],
)
def test_the_machine_path_pattern(line: str, found: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) is found


def test_the_tests_of_a_group_share_a_worker(request: pytest.FixtureRequest) -> None:
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@source"), "pytest-xdist does not see groups under this pytest"
