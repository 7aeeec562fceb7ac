"""The report of a suite's run, from samples alone: what it shows, and that nothing of it comes from elsewhere."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from logyard.bench.suite import page
from logyard.bench.suite.figures import rows
from logyard.bench.suite.table import OURS, case_of

MACHINE = {"cores": 2, "kernel": "6.1", "fdatasync_us": 120.0, "filesystem": "ext4"}


def sample(case: str, system: str, value: float, number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "case": case, "system": system, "round": number, "version": "1.0", "at": "2026-11-23T10:00:00Z",
        "machine": MACHINE, "figures": {case_of(case).figure: value, "p50_ms": 1.5, "p99_ms": 4.0}, **more,
    }  # fmt: skip


SAMPLES = [
    sample("closed-256", OURS, 100.0),
    sample("closed-256", OURS, 140.0, 2),
    sample("closed-256", "etcd", 50.0),
    sample("closed-256", "ra", 500.0, notes=["its machine does <nothing>"]),
    {**sample("closed-256", "redis", 0.0), "failed": "not installed: apt-get install redis-server", "figures": {}},
    sample("recover-100", OURS, 0.5),
]


def test_the_report_stands_alone_and_shows_every_row() -> None:
    text = page.report("smoke of logyard", rows(SAMPLES), SAMPLES)
    # Opened from disk it must find everything in itself.
    assert not re.search(r"(src|href)=|@import|<script", text)
    assert text.count("<svg") == 2 and text.count("<table>") == 3
    assert "<th>loop M/s</th><th>sync us</th>" in text and "<td></td><td>120</td><td></td>" in text
    for said in ("100 - 140", "not installed: apt-get install redis-server", "less is better", "fdatasync_us"):
        assert said in text
    assert "does &lt;nothing&gt;" in text and "<nothing>" not in text
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)


def test_a_bar_is_as_long_as_its_share_of_the_longest() -> None:
    (group,) = page.by_case(rows([sample("closed-256", OURS, 100.0), sample("closed-256", "etcd", 50.0)]))
    drawing = page.svg("one", [group])
    bars = [float(width) for width in re.findall(r"<rect x='\d+' y='\d+' width='([\d.]+)'", drawing)]
    assert bars[0] == 2 * bars[1] > 100


def test_the_machine_is_shown_though_the_first_rival_is_not_installed() -> None:
    missing = {"case": "closed-256", "system": "etcd", "round": 1, "failed": "not installed: x", "version": ""}
    assert "fdatasync_us" in page.machines([missing, SAMPLES[0]])


def test_rounds_of_another_hour_are_marked_and_no_ratio_is_made_of_them() -> None:
    found = [sample("closed-256", OURS, 100.0), sample("closed-256", "etcd", 80.0),
             sample("closed-256", "ra", 50.0, at="2026-11-27T10:00:00Z")]  # fmt: skip
    ours, etcd, ra = sorted(rows(found), key=lambda row: (row.system != OURS, row.system))
    assert ra.notes == ["not made in the hour of ours: rounds 1"] and not ours.notes and not etcd.notes
    line = page.honest_line(rows(found), found, "standard")
    assert "1.25 x etcd" in line and "x ra" not in line


def test_nothing_measured_is_a_page_too() -> None:
    assert "<h1>empty</h1>" in page.report("empty", [], [])


def test_the_line_says_where_we_are_behind() -> None:
    line = page.honest_line(rows(SAMPLES), SAMPLES, "standard --against etcd")
    assert line.startswith("`logyard bench run standard --against etcd`, ")
    assert "120 /s (0.24 x ra 1.0, 2.4 x etcd 1.0)" in line
    assert "2026-11-23, 2 shared cores" in line and "redis" not in line
    assert "medians of 1 to 2 alternating rounds" in line and "(ra: its machine does <nothing>)" in line


def test_alone_the_line_is_our_own_figures() -> None:
    found = [sample("closed-256", OURS, 1234.0)]
    assert "256 B, 64 closed-loop clients: 1,234 /s. " in page.honest_line(rows(found), found, "smoke")


def test_a_readme_has_its_block_made_anew_and_nothing_else_touched() -> None:
    readme = f"# title\n{page.BEGIN}\nold\n{page.END}\nrest\n"
    found = page.with_block(readme, "docs/bench.svg", "a line")
    assert found == f"# title\n{page.BEGIN}\n![Measured beside others](docs/bench.svg)\n\na line\n{page.END}\nrest\n"
    assert page.with_block("# title\n", "docs/bench.svg", "a line") is None
