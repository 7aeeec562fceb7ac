"""What knots the product's files together gets less, never more: `tests.house` measures, house.json keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from . import house
from .source_tree import Source, product_sources

pytestmark = pytest.mark.xdist_group("source")


def test_nothing_grows() -> None:
    assert house.grown(house.measure(), json.loads(house.RECORDED.read_text())) == []


def test_a_circle_of_types_is_seen() -> None:
    one = Source("a.py", "logyard.a", "from t import TYPES\nif TYPES:\n    from logyard.b import B\n")
    two = Source("b.py", "logyard.b", "def late():\n    from .a import A\n")
    three = Source("c.py", "logyard.c", "from .a import A\n")
    assert house.cycles([one, two, three]) == [["a.py", "b.py"]]
    kept: dict[str, Any] = {"cycles": [], "whole": {}, "foreign": {}, "prose": {}}
    assert "import one another" in house.grown({**kept, "cycles": [["a.py", "b.py"]]}, kept)[0]


def test_whom_a_field_belongs_to() -> None:
    text = """
class A:
    def set(self, other, made):
        self.x = 1
        other.x = 2
        self.part.x = 3
        fresh = A()
        fresh.x = 4
        fresh.part.x += 5
"""
    assert house.foreign(Source("a.py", "logyard.a", text)) == [5, 6, 9]


def test_what_is_exempt_is_there() -> None:
    sources = {source.path: source for source in product_sources()}
    for path, target in house.EXEMPT:
        assert f"{target} = " in sources[path].text, "it is exempt no more"


def test_the_whole_as_an_argument() -> None:
    text = "def one(system: System, node: 'Node', rest: int) -> None:\n    '''The rest.'''\n"
    source = Source("a.py", "logyard.a", text)
    assert house.wholes(source) == 2
    kept = {"cycles": [], "whole": {"a.py": 1}, "foreign": {}, "prose": {}}
    assert house.grown({**kept, "whole": {"a.py": 2}}, kept) == ["whole: 2, recorded 1: a.py 2"]


@pytest.mark.parametrize(
    "word",
    ["The", "Whether", "Something", "Entries", "Returns", "Adds", "Reading", "Called", "Silently", "Truncation",
     "BLOCKING.", "uid", "`slice`", "(first,", "0:", "xxh3-128", "Logyard's"],
)  # fmt: skip
def test_what_is_no_verb(word: str) -> None:
    text = f'def one():\n    """{word} of it."""\n\n\n@property\ndef two():\n    """{word} of it."""\n'
    assert house.prose(Source("a.py", "logyard.a", text)) == [(1, word.rstrip(".,:;"))]


@pytest.mark.parametrize(
    "word", ["Return", "Compress", "Pass", "Bring", "Need", "Feed", "Proceed", "Apply", "Reply", "Re-issue", "Snapshot"]
)
def test_what_is_a_verb(word: str) -> None:
    assert house.prose(Source("a.py", "logyard.a", f'def one():\n    """{word} it."""\n')) == []
