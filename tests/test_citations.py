"""What comments, docstrings and test names cite is found in the shipped docs: laws, invariants, faults, pages.

"section 4" is only said of a paper; a page of ours is named with its path. The rules are tried on planted offences too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .source_tree import ROOT, Source, product_sources, test_sources

pytestmark = pytest.mark.xdist_group("source")

CITED = (ROOT / "docs" / "internals" / "what-the-code-cites.md").read_text(encoding="utf-8")
LAWS = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Rules that are never broken")[2]
NUMBERED = re.compile(r"\b([Ll]aw|[Ii]nvariant|[Pp]itfall|[Ff]ault)s? ((?:[A-Z]?\d+(?:-| and | to |, )?)+)")
IN_A_NAME = re.compile(r"def test_pitfall_((?:\d+_)+)")
PAGE = re.compile(r"[\w./-]*\b[\w-]+\.md\b(?!\w)")
SECTION = re.compile(r"[Ss]ection \d")
OF_A_PAPER = re.compile(r"(paper|thesis|RFC|Ongaro)[^.]{0,40}$", re.IGNORECASE)


def known() -> dict[str, set[str]]:
    """Return the numbers that the docs explain, by kind."""
    invariants, _, rest = CITED.partition("## Pitfalls")
    pitfalls, _, faults = rest.partition("## Faults")

    def first(text: str) -> set[str]:
        return set(re.findall(r"^\| (\w+) \|", text, re.MULTILINE)) - {"number", "fault"}

    return {
        "law": set(re.findall(r"^(\d+)\. \*\*", LAWS, re.MULTILINE)), "invariant": first(invariants),
        "pitfall": first(pitfalls), "fault": first(faults),
    }  # fmt: skip


def numbers(said: str) -> Iterator[str]:
    """Yield what "16-19 and 26" names."""
    for low, high in re.findall(r"([A-Z]?\d+)(?:-(\d+))?", said):
        yield low
        if high and low.isdigit():
            yield from map(str, range(int(low) + 1, int(high) + 1))


def offences(source: Source, found: dict[str, set[str]]) -> Iterator[str]:
    """Yield what leads nowhere."""
    for number, line in enumerate(source.text.splitlines(), 1):
        where = f"{source.path}:{number}"
        for kind, said in NUMBERED.findall(line):
            for one in numbers(said):
                if one not in found[kind.lower()]:
                    yield f"{where}: {kind} {one} is in no page: see docs/internals/what-the-code-cites.md"
        for said in IN_A_NAME.findall(line):
            for one in said.strip("_").split("_"):
                if str(int(one)) not in found["pitfall"]:
                    yield f"{where}: pitfall {one} is not in docs/internals/what-the-code-cites.md"
        for match in SECTION.finditer(line):
            if not OF_A_PAPER.search(line[: match.start()]):
                yield f"{where}: name the page and its heading, not a section's number: {line.strip()}"
        # In code a page is named by its path; strings of code may hold any name.
        for page in PAGE.findall(line) if '"""' in line or "#" in line else ():
            if not any((ROOT / base / page).exists() for base in ("", "docs")):
                yield f"{where}: {page} does not ship"


def cited(source: Source) -> bool:
    return source.path not in ("tests/test_citations.py", "tests/test_docs.py", "tests/test_tidy.py")


def test_what_is_cited_ships() -> None:
    found = known()
    assert len(found["law"]) >= 13 and len(found["invariant"]) == 10 and len(found["pitfall"]) >= 54
    sources = filter(cited, (*product_sources(), *test_sources()))
    wrong = [one for source in sources for one in offences(source, found)]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    ["# law 99", "# invariants 3 and 77", "# (pitfalls 50-60)", "# see section 5", "# storage-rules.md says so",
     "# fault Z9", "def test_pitfall_98_of_ours() -> None:"],
)  # fmt: skip
def test_what_leads_nowhere_is_noticed(text: str) -> None:
    assert list(offences(Source("engine/a.py", "logyard.engine.a", text), known()))


def test_each_pitfall_names_its_tests() -> None:
    """The page says what the tests' names say."""
    tests = {
        (int(one), name.replace("_", " "), source.path)
        for source in test_sources()
        if cited(source)
        for said, name in re.findall(r"def test_pitfall_((?:\d+_)+)([a-z]\w*)", source.text)
        for one in said.strip("_").split("_")
    }
    missing = [
        row for row in sorted(tests)
        if not re.search(rf"^\| {row[0]} \|.*{re.escape(row[1])}.*{re.escape(row[2])}", CITED, re.MULTILINE)
    ]  # fmt: skip
    assert not missing, missing
