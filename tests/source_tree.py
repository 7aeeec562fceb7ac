"""The product's source as the tests about it see it: files, module names, syntax trees, imports.

Used by test_architecture (who imports whom) and test_tidy (form), which share one parse of each file. Reads files,
imports nothing of them.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bench", "client", "engine", "machines", "payloads", "pipeline", "protocol", "service")


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted name, `logyard.engine.entry`; `path` counts from the root of the repository."""

    path: str
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, parents before children."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import, lazy and typing-only ones too; `from a import b` gives a.b."""
        found: list[tuple[int, str]] = []
        package = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level:
                    parts = package.split(".")
                    parts = parts[: len(parts) - node.level + 1]
                    origin = ".".join([*parts, *([node.module] if node.module else [])])
                found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        return found


@cache
def product_sources() -> tuple[Source, ...]:
    """Every file of the packages at its real place, and the facade."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    paths += [path for name in ("logyard", "pyspark_logyard") for path in (ROOT / name).glob("*.py")]
    assert len(paths) > 10
    return _parsed(paths)


@cache
def test_sources() -> tuple[Source, ...]:
    """The tests themselves."""
    return _parsed(sorted((ROOT / "tests").rglob("*.py")))


test_sources.__test__ = False  # type: ignore[attr-defined]


def _parsed(paths: Iterable[Path]) -> tuple[Source, ...]:
    """Files with their trees: millions of nodes that stay, which the collector need not look at again and again."""
    gc.disable()
    try:
        found = tuple(Source(*_named(path)) for path in paths)
        for one in found:
            assert one.nodes
        gc.freeze()
    finally:
        gc.enable()
    return found


def _named(path: Path) -> tuple[str, str, str]:
    relative = path.relative_to(ROOT)
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if parts[0] in PACKAGES:
        parts.insert(0, "logyard")
    return str(relative), ".".join(parts), path.read_text("utf-8")
