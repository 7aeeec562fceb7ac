"""Rates between two looks at a cluster's status, and the tables that show them. Plain functions; `cli_admin` looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .cli.output import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType

Statuses: TypeAlias = Mapping[int, Mapping[str, Any]]

COUNTERS: Final = ("fdatasyncs", "bytes_written", "commit", "elections", "busy")
"""Status fields that only grow while a process lives; the rate of `busy` is that of all causes."""
RATES: Final = tuple(f"{name}_per_s" for name in COUNTERS)
COUNTS: Final = ("pid", "groups", "led", "fdatasyncs")
SIZES: Final = ("wal_bytes_live", "generations_bytes_live", "payload_disk_bytes", "snapshot_bytes", "memory_rss")


def counter(row: Mapping[str, Any], name: str) -> float:
    """Return a counter's value; a mapping counts as its sum."""
    value = row.get(name, 0)
    return float(sum(value.values()) if isinstance(value, Mapping) else value)


def rates(before: Statuses, now: Statuses, seconds: float) -> dict[int, dict[str, float]]:
    """Return rates per node and second since `before`. A node that was not seen then, or has restarted since, has none
    yet."""
    found: dict[int, dict[str, float]] = {}
    for node, row in now.items():
        old = before.get(node)
        if "error" in row or old is None or "error" in old or old.get("pid") != row.get("pid") or seconds <= 0:
            continue
        found[node] = {
            shown: round(max(0.0, counter(row, name) - counter(old, name)) / seconds, 1)
            for name, shown in zip(COUNTERS, RATES, strict=True)
        }
    return found


def missing(found: Statuses) -> list[int]:
    """Return the nodes that gave no status."""
    return [node for node, row in found.items() if "error" in row]


def size_text(value: object) -> str:
    """Return a byte count for the table; "" where the node did not say."""
    return bytes_text(value) if isinstance(value, (int, float)) else ""


def label(node: int, row: Mapping[str, Any]) -> object:
    """Return a node's number, with the name that it was given."""
    name = row.get("name", "")
    return node if name in ("", f"node-{node}") else f"{node} {name}"


def rows(found: Statuses) -> list[list[object]]:
    """Return one row of counts and sizes for each node that answered."""
    return [
        [label(node, row), *(row.get(key, "") for key in COUNTS), *(size_text(row.get(key)) for key in SIZES)]
        for node, row in sorted(found.items())
        if "error" not in row
    ]


def troubles(found: Statuses) -> list[str]:
    """Return what an operator should know of disks and data directories, one line each."""
    lines: dict[str, None] = {}
    for node, row in sorted(found.items()):
        disk, space = row.get("disk", {}), row.get("space", {})
        if disk.get("slow"):
            lines[f"node {node}: its disk is slow ({disk['sync_ms']:g} ms a sync), others lead where they can"] = None
        if space.get("full"):
            lines[f"node {node}: its disk is full ({space.get('reason', '')}), writes wait"] = None
        if frozen := row.get("jobs", {}).get("frozen"):
            lines[f"node {node}: restart it, nothing is recycled or unlinked until then ({frozen})"] = None
        scrub = row.get("scrub", {})
        if scrub.get("running"):
            lines[f"node {node}: scrub at {scrub['running']}, {size_text(scrub['pass_bytes'])} read"] = None
        if scrub.get("left"):
            lines[f"node {node}: {scrub['left']} damages are not repaired, `logyard scrub --last` names them"] = None
        for peer in row.get("peers", ()):
            if peer.get("outdated"):
                lines[f"node {peer['node']} is refused: {peer['outdated']}"] = None
    return list(lines)


def rate_rows(found: Statuses, rate: Mapping[int, Mapping[str, float]]) -> list[list[object]]:
    """Return one row of rates and of what is short for each node that answered."""
    shown: list[list[object]] = []
    for node, row in sorted(found.items()):
        if "error" in row:
            continue
        mine = rate.get(node, {})
        cells: list[object] = [node]
        for name in RATES:
            value = mine.get(name)
            cells.append("" if value is None else size_text(value) if name.startswith("bytes") else f"{value:g}")
        busy: Mapping[str, int] = row.get("busy", {})
        worst = max(busy, key=lambda cause: busy[cause], default="")
        pulling = [str(one["node"]) for one in row.get("followers", ()) if one.get("pulling")]
        stalled = row.get("wal", {}).get("stalled_ms", 0)
        shown.append([*cells, row.get("stopped", ""), f"{stalled:g}", ", ".join(pulling), worst])
    return shown


def screen(found: Statuses, rate: Mapping[int, Mapping[str, float]]) -> RenderableType:
    """Return what `status --watch` shows."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> Table:
        made = Table(*columns, title=title, title_justify="left")
        for line in lines:
            made.add_row(*(escape(str(cell)) for cell in line))
        return made

    gone = [Text(f"node {node} does not answer: {found[node].get('message', '')}") for node in missing(found)]
    gone += [Text(line) for line in troubles(found)]
    return Group(
        table("nodes", ("node", *COUNTS, *SIZES), rows(found)),
        table("rates", ("node", *RATES, "stopped", "stalled_ms", "pulling", "most refused by"), rate_rows(found, rate)),
        *gone,
    )
