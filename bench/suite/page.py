"""The report of a run: one HTML file that opens from disk, with its plots drawn as SVG inside of it; and the plot and
the line for a README. Pure: rows in, text out.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import SPEEDS, Row
from .table import OURS, Case

COLOURS = ("#1f6f8b", "#d97706", "#6b7280", "#7c3aed", "#15803d", "#b91c1c", "#a16207", "#0e7490", "#be185d")
WIDTH, LEFT, BAR, GAP = 760, 170, 16, 6
FONT = "font-family='sans-serif' font-size='12'"
BEGIN, END = "<!-- bench: made by logyard bench run -->", "<!-- bench end -->"
README_CASES = ("closed-256", "pipelined-256", "pipelined-64k", "logs-1000")
STYLE = """
body { font: 15px sans-serif; max-width: 1100px; margin: 2em auto; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child, td.note { text-align: left } .note { color: #777; font-size: 13px }
"""  # noqa: E501


def by_case(rows: Sequence[Row]) -> list[tuple[Case, list[Row]]]:
    """Return the rows of each case together, ours first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case.name, []).append(row)
    return [
        (group[0].case, sorted(group, key=lambda row: (row.system != OURS, row.system))) for group in found.values()
    ]


def number(value: float) -> str:
    """Return a figure as it is read: three digits count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def svg(title: str, groups: Sequence[tuple[Case, Sequence[Row]]]) -> str:
    """Return horizontal bars: the median of each row, with a line from the least to the most of its rounds."""
    systems = list(dict.fromkeys(row.system for _, rows in groups for row in rows))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(systems)}
    parts, top = [f"<text x='8' y='18' {FONT} font-weight='bold'>{html.escape(title)}</text>"], 30
    for case, rows in groups:
        parts.append(f"<text x='8' y='{top + 12}' {FONT}>{html.escape(f'{case.told} ({case.unit})')}</text>")
        top += BAR + GAP
        # Each case has a scale of its own: figures of different cases are not compared.
        most = max((row.high for row in rows), default=0.0) or 1.0
        for row in rows:
            parts += bar(row, top, most, colours[row.system])
            top += BAR + GAP
        top += GAP
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' height='{top}' "
        f"role='img'><rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>"
    )


def bar(row: Row, top: int, most: float, colour: str) -> list[str]:
    """Return one system's bar, or why it has none."""
    room = WIDTH - LEFT - 130
    middle = top + BAR / 2
    name = f"<text x='{LEFT - 8}' y='{middle + 4}' text-anchor='end' {FONT}>{html.escape(row.system)}</text>"
    if not row.rounds:
        why = html.escape("; ".join(row.failed)[:90] or "no figure")
        return [name, f"<text x='{LEFT}' y='{middle + 4}' {FONT} fill='#777'>{why}</text>"]
    wide, low, high = (LEFT + room * value / most for value in (row.median, row.low, row.high))
    return [
        name,
        f"<rect x='{LEFT}' y='{top}' width='{wide - LEFT:.1f}' height='{BAR}' fill='{colour}'/>",
        f"<line x1='{low:.1f}' x2='{high:.1f}' y1='{middle}' y2='{middle}' stroke='#111' stroke-width='1.5'/>",
        f"<text x='{max(wide, high) + 6:.1f}' y='{middle + 4}' {FONT}>{number(row.median)}</text>",
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one case's table: medians with spread, latencies, costs, the machine's speeds before them, remarks."""
    head = ("system", "median", "least - most", "rounds", "p50 ms", "p99 ms", "CPU us/op", "bytes written/op",
            "memory MiB", "client share", "consumed /s", "loop M/s", "sync us", "disk MB/s", "loopback us",
            "remarks")  # fmt: skip
    lines = [f"<tr>{''.join(f'<th>{one}</th>' for one in head)}</tr>"]
    for row in rows:
        beside = row.beside
        cells = [
            html.escape(f"{row.system} {row.version}"), number(row.median) if row.rounds else "-",
            f"{number(row.low)} - {number(row.high)}" if row.rounds else "-", str(row.rounds),
            *(number(beside[key]) if key in beside else "" for key in (
                "p50_ms", "p99_ms", "server_cpu_us_per_op", "written_bytes_per_op")),
            number(beside["server_resident_bytes"] / (1 << 20)) if "server_resident_bytes" in beside else "",
            *(number(beside[key]) if key in beside else "" for key in ("client_share", "consumed_per_s")),
            *(number(row.speeds[key]) if key in row.speeds else "" for key in SPEEDS),
        ]  # fmt: skip
        note = html.escape("; ".join([*row.notes, *row.failed]))
        lines.append(f"<tr>{''.join(f'<td>{one}</td>' for one in cells)}<td class='note'>{note}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def machines(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the machine's speeds over all samples, least and most: a machine that changed explains a figure."""
    keys = list(dict.fromkeys(key for sample in samples for key in sample.get("machine") or {}))
    lines = []
    for key in keys:
        values = [sample["machine"][key] for sample in samples if key in (sample.get("machine") or {})]
        if all(isinstance(value, (int, float)) for value in values):
            said = f"{number(min(values))} - {number(max(values))}" if min(values) != max(values) else number(values[0])
        else:
            said = ", ".join(dict.fromkeys(map(str, values)))
        lines.append(f"<tr><td>{html.escape(key)}</td><td>{html.escape(said)}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def report(title: str, rows: Sequence[Row], samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole page."""
    times = sorted(str(sample["at"]) for sample in samples if sample.get("at"))
    when = f"{times[0]} to {times[-1]}" if times else ""
    parts = [
        f"<h1>{html.escape(title)}</h1><p class='note'>{when}. Medians of rounds that alternate between the systems; "
        "the line on a bar goes from the least to the most. Latencies of closed loops are those of closed loops; the "
        "cases called open count from when an operation was due. Ratios below 1.5 mean little on a shared machine."
        "</p><h2>Machine</h2><p class='note'>Measured before every sample, least and most.</p>",
        machines(samples),
    ]
    for case, group in by_case(rows):
        better = "more is better" if case.more else "less is better"
        heading = f"{case.name}: {case.told}, {case.nodes} node{'s' * (case.nodes != 1)} ({case.unit}, {better})"
        parts.append(f"<h2>{html.escape(heading)}</h2>{svg(case.name, [(case, group)])}{table(group)}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def for_readme(rows: Sequence[Row]) -> list[tuple[Case, list[Row]]]:
    """Return what the README's plot shows: the four cases of the profile standard, or the first four there are."""
    groups = [(case, [row for row in group if row.rounds]) for case, group in by_case(rows)]
    groups = [(case, group) for case, group in groups if any(row.system == OURS for row in group)]
    wanted = [(case, group) for case, group in groups if case.name in README_CASES]
    return (wanted or groups)[:4]


def honest_line(rows: Sequence[Row], samples: Sequence[Mapping[str, Any]], words: str) -> str:
    """Return one line of a run that these words asked for: for each case what we reach over each other, the worst
    first, what limits comparing, and what it was measured on."""
    told, remarks = [], {}
    for case, group in for_readme(rows):
        ours = next(row for row in group if row.system == OURS)
        gains = []
        for row in group:
            if row is not ours and row.median and not row.apart:
                gain = ours.median / row.median if case.more else row.median / ours.median
                gains.append((gain, f"{number(gain)} x {row.system} {row.version}"))
                remarks.update({row.system: row.notes} if row.notes else {})
        others = ", ".join(said for _, said in sorted(gains))
        told.append(f"{case.told}: {number(ours.median)} {case.unit}{f' ({others})' if others else ''}")
    machine: Mapping[str, Any] = next((sample["machine"] for sample in samples if sample.get("machine")), {})
    day = min((str(sample["at"])[:10] for sample in samples if sample.get("at")), default="")
    rounds = sorted({row.rounds for _, group in for_readme(rows) for row in group}) or [0]
    notes = "; ".join(f"{system}: {', '.join(found)}" for system, found in remarks.items())
    counted = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    how = f"medians of {counted} alternating rounds" if rounds[-1] > 1 else "one round, so no spread is known"
    return (
        f"`logyard bench run {words}`, {day}, {machine.get('cores', '?')} shared cores, "
        f"Linux {machine.get('kernel', '?')}, {how}. {'; '.join(told)}. Below 1 x the other does more, and "
        f"0.7 to 1.5 is noise here.{f' ({notes})' if notes else ''}"
    )


def with_block(readme: str, picture: str, line: str) -> str | None:
    """Return a README with its block made anew; None if it has no place for it."""
    before, found, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        return None
    return f"{before}{BEGIN}\n![Measured beside others]({picture})\n\n{line}\n{END}{after}"
