"""What logs there are, kept from one look to the next: nodes tell what changed, and only that is merged anew.

A stream looks at each trigger, over thousands of logs of which a few have something new. Pure but for what it is told;
used by `stream`, filled by `network.NetworkSource.follow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from logyard.client.scans import Changed, LogRow

from .sources import LogInfo


class LogTable:
    """The logs that `chosen` takes, as the nodes that answered have them. `missing` are nodes that did not."""

    def __init__(self, chosen: Callable[[str], bool]) -> None:
        self.infos: dict[str, LogInfo] = {}
        self.missing: frozenset[int] = frozenset()
        self._chosen = chosen
        self._rows: dict[int, dict[str, LogRow]] = {}
        self._marks: dict[int, int] = {}

    def mark(self, node: int) -> int:
        """Return what to ask a node about: changes since then."""
        return self._marks.get(node, 0)

    def update(self, answers: Iterable[tuple[int, Changed]], missing: frozenset[int]) -> None:
        """Take the answers of one look. What a node said that is missing now counts no more: it may be long ago."""
        changed: set[str] = set()
        self.missing = missing
        heard = dict(answers)
        for node in self._rows.keys() - heard.keys():
            changed.update(self._rows.pop(node))
            self._marks.pop(node)
        for node, answer in heard.items():
            rows = self._rows.setdefault(node, {})
            if answer.whole:
                changed.update(rows)
                rows.clear()
            for row in answer.rows:
                if row.name in self.infos or row.name in changed or self._chosen(row.name):
                    rows[row.name] = row
                    changed.add(row.name)
            for name in answer.gone:
                if rows.pop(name, None) is not None:
                    changed.add(name)
            self._marks[node] = answer.mark
        for name in changed:
            same = [rows[name] for rows in self._rows.values() if name in rows]
            if same:
                self.infos[name] = merged(same)
            else:
                self.infos.pop(name, None)


def merged(rows: list[LogRow]) -> LogInfo:
    """Return one log of the rows of its members: what any member has applied is committed, so the longest is the truth;
    of two groups with one name, the one that more members know."""
    same = rows
    if any(row.uid != rows[0].uid for row in rows):
        by_uid: dict[int, list[LogRow]] = {}
        for row in rows:
            by_uid.setdefault(row.uid, []).append(row)
        same = max(by_uid.values(), key=lambda same: (len(same), same[0].uid))
    best = max(same, key=lambda row: (row.end, row.leader))
    start, size = max(row.start for row in same), max(row.bytes for row in same)
    leader = best.leader or max(row.leader for row in same)
    return LogInfo(rows[0].name, best.uid, min(start, best.end), best.end, size, leader, best.members)
