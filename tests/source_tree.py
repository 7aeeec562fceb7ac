"""The product's source as the tests about it see it: files, module names, syntax trees, imports.

Used by test_architecture (who imports whom) and test_tidy (form). Reads files, imports nothing of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bench", "client", "engine", "machines", "payloads", "pipeline", "service")


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted name, `logyard.engine.disk`; `path` counts from the root of the repository."""

    path: str
    module: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of every import, lazy and typing-only ones too; `from a import b` gives a.b."""
        package = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level:
                    parts = package.split(".")
                    parts = parts[: len(parts) - node.level + 1]
                    origin = ".".join([*parts, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node.lineno, f"{origin}.{alias.name}"


def product_sources() -> list[Source]:
    """Every file of the packages at its real place, and the facade."""
    found = [Source(*_named(path)) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found += [Source(*_named(path)) for name in ("logyard", "pyspark_logyard") for path in (ROOT / name).glob("*.py")]
    assert len(found) > 10
    return found


def test_sources() -> list[Source]:
    """The tests themselves."""
    return [Source(*_named(path)) for path in sorted((ROOT / "tests").rglob("*.py"))]


test_sources.__test__ = False  # type: ignore[attr-defined]


def _named(path: Path) -> tuple[str, str, str]:
    relative = path.relative_to(ROOT)
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if parts[0] in PACKAGES:
        parts.insert(0, "logyard")
    return str(relative), ".".join(parts), path.read_text("utf-8")
