"""docs/internals/tasks.md names whatever runs beside its caller, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .source_tree import ROOT, Source, product_sources

PAGE = ROOT / "docs" / "internals" / "tasks.md"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", re.M)
BY_ITSELF = frozenset({"Timer", "Popen", "open_process", "run_process", "ThreadPoolExecutor"})
LEFT_OUT = ("bench/", "service/demo/", "client/_sync/")


def begun(source: Source) -> Iterator[str]:
    """Yield the name of each task, thread and process that a file begins."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        nursery = owner.endswith(("nursery", "http")) or called != "start"
        if called in ("start_soon", "create_task", "start") and nursery and node.args:
            yield name_of(node.args[0])
        elif called == "Thread":
            yield from (name_of(one.value) for one in node.keywords if one.arg == "target")
        elif called in BY_ITSELF and (called != "Timer" or owner == "threading"):
            yield called


def name_of(target: ast.expr) -> str:
    """Return a callable's last name."""
    if isinstance(target, ast.Call):
        return name_of(target.func)
    return target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)


def test_what_runs_beside_its_caller_is_in_the_index() -> None:
    found = {
        (source.path, name)
        for source in product_sources()
        if not source.path.startswith(LEFT_OUT)
        for name in begun(source)
    }
    told = {
        (path, name.rpartition(".")[2])
        for path, names in ROW.findall(PAGE.read_text())
        for name in re.findall("`([^`]+)`", names)
    }
    assert len(told) > 50
    assert found - told == set(), "begun and not in docs/internals/tasks.md"
    assert told - found == set(), "in docs/internals/tasks.md, and nothing begins it"
