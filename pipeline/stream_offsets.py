"""Where a stream is in its logs, what its next batch reads, and how a limit is shared out: pure functions.

An offset is what Spark keeps in the checkpoint: ``{"v": 1, "turn": NAME, "logs": {NAME: [uid, next]}}``, each log that
was ever seen. A log that was met in that very batch has a third number, its first offset in it: so what a batch reads
follows from its two offsets alone, and a batch that is repeated reads the same; a fourth one is the uid of the log of
that name that was read to its end before, a topic's partition that was taken away. A query's very first offset, which
is asked for again and again, is marked as ``initial``: its first batch has the third number for each log (decision
0030). ``"gone": {TOPIC: uid}`` says up to which partition that is gone each topic was looked at, ``"lost": [NAME]``
which partitions came and went in that very batch, unread. Used by `stream`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from logyard.protocol.errors import LogyardError

from .errors import DataLoss
from .options import Options
from .sources import LogInfo, Wanted

VERSION = 1


class BadOffset(LogyardError):
    """A checkpoint's offset is of another version, or none."""

    code = "bad_offset"


class Position(NamedTuple):
    """The next offset to be read of log `uid`. `first`: the log was met in this batch, which begins there; `after`: the
    uid of the log that had its name before, a partition that ended and was read."""

    uid: int
    next: int
    first: int | None = None
    after: int | None = None

    def plain(self) -> list[int]:
        """Return it for JSON."""
        return [part for part in self if part is not None]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """A place in the stream. `turn`: the log that was the last to take part in a limited batch. `initial`: where a new
    query begins, which may be elsewhere when Spark asks once more. `gone`: by topic the uid of the newest partition
    that was gone then (0: none); None where no topics are read, and of earlier builds. `lost`: partitions that came
    and went in this batch before anything of them was read."""

    logs: Mapping[str, Position] = field(default_factory=dict)
    turn: str = ""
    initial: bool = False
    gone: Mapping[str, int] | None = None
    lost: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return what Spark stores as JSON."""
        logs = {
            name: [one.uid, one.next] if one.first is None else one.plain() for name, one in self.logs.items()
        }  # fmt: skip
        marked: dict[str, Any] = {"initial": True} if self.initial else {}
        if self.gone is not None:
            marked["gone"] = self.gone
        if self.lost:
            marked["lost"] = list(self.lost)
        return {"v": VERSION, **marked, "turn": self.turn, "logs": logs}


def parse_offset(value: Any) -> StreamOffset:
    """Return a checkpoint's offset. Raises `BadOffset`."""
    if not isinstance(value, dict) or "v" not in value:
        raise BadOffset(
            f"checkpoint: {_short(value)} is no offset of the format logyard: the checkpoint is another source's, or "
            "damaged; start the query with a new checkpointLocation and startingOffsets"
        )
    if value["v"] != VERSION:
        raise BadOffset(
            f"checkpoint: its offsets are of version {value['v']!r}, this logyard knows version {VERSION}: use the "
            "logyard that wrote it, or start the query with a new checkpointLocation and startingOffsets"
        )
    logs, turn = value.get("logs"), value.get("turn", "")
    gone, lost = value.get("gone"), value.get("lost", [])
    if not isinstance(logs, dict) or not isinstance(turn, str) or not _are_partitions(gone, lost):
        raise _damaged(value)
    found: dict[str, Position] = {}
    for name, one in logs.items():
        # Ten thousand times a trigger: the usual case first, and spelled out.
        if type(one) is list and len(one) == 2 and type(one[0]) is type(one[1]) is int and one[0] >= 0 <= one[1]:
            found[name] = Position(one[0], one[1])
        elif _met_here(one):
            found[name] = Position(*one)
        else:
            raise _damaged(one)
    return StreamOffset(found, turn, value.get("initial") is True, gone, tuple(lost))


def _are_partitions(gone: Any, lost: Any) -> bool:
    """Return whether that is what an offset says of partitions that are gone."""
    known = gone is None or (isinstance(gone, dict) and all(type(uid) is int for uid in gone.values()))
    return known and isinstance(lost, list) and all(isinstance(name, str) for name in lost)


def _met_here(one: Any) -> bool:
    """Return whether it is the position in a log that was met in that batch."""
    if not (isinstance(one, list) and len(one) in (3, 4) and all(type(part) is int for part in one)):
        return False
    return bool(0 <= one[2] <= one[1])


def _damaged(value: Any) -> BadOffset:
    return BadOffset(
        f"checkpoint: {_short(value)} in its offsets is not what logyard writes: the checkpoint is damaged; delete its "
        "newest files in offsets/ if that batch was not committed, or start with a new checkpointLocation"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Lost(NamedTuple):
    """A log that ended before it was read to its end: it was deleted, or made anew. How much is missing from `next` on
    nobody knows."""

    log: str
    next: int


class Batch(NamedTuple):
    """What is read between two offsets: ranges, by name, and logs that ended."""

    ranges: list[Wanted]
    lost: list[Lost]


def between(start: StreamOffset, end: StreamOffset) -> Batch:
    """Return what a batch reads. Raises `BadOffset` for an end that lies before its start."""
    ranges: list[Wanted] = []
    lost: list[Lost] = []
    if start.initial:
        # Another one, perhaps, than that which the end was made from: nothing of it counts.
        start = StreamOffset()
    for name, one in sorted(end.logs.items()):
        known = start.logs.get(name)
        if known is not None and known.uid == one.uid:
            first = known.next
        else:
            if known is not None and known.uid != one.after:
                lost.append(Lost(name, known.next))
            first = one.next if one.first is None else one.first
        if first > one.next:
            raise BadOffset(
                f"checkpoint: a batch of log {name!r} would begin at {first} and end at {one.next}: its files in "
                "offsets/ are not of one query; start with a new checkpointLocation"
            )
        if first < one.next:
            ranges.append(Wanted(name, one.uid, first, one.next))
    lost += [Lost(name, start.logs[name].next) for name in sorted(start.logs.keys() - end.logs.keys())]
    lost += [Lost(name, 0) for name in end.lost]
    return Batch(ranges, lost)


class Limit(NamedTuple):
    """How much a batch may hold: `budget` in units of which a record of a log costs `costs` (1 where it is not there);
    a log that takes part gets at least `least` records."""

    budget: int
    least: int
    costs: Mapping[str, int]


def is_read(name: str, known: Position, ended: Mapping[tuple[str, int], int]) -> bool:
    """Return whether a log was a partition that ended, and all of it was read."""
    end = ended.get((name, known.uid))
    return end is not None and known.next >= end


def without_passed_over(
    ended: Mapping[tuple[str, int], int], gone: Mapping[str, Sequence[tuple[str, int, int]]], start: StreamOffset
) -> dict[tuple[str, int], int]:
    """Return where partitions ended, without those of `start` whose name another one had since, with records, that is
    gone as well: of that nothing was read. `gone`: by topic (name, uid, end) of those that are gone, the oldest
    first."""
    passed = set()
    for lives in gone.values():
        met: set[str] = set()
        for name, uid, end in lives:
            known = start.logs.get(name)
            if known is not None and known.uid == uid:
                met.add(name)
            elif known is not None and end and name in met:
                passed.add((name, known.uid))
    return {one: end for one, end in ended.items() if one not in passed}


def came_and_went(gone: Mapping[str, Sequence[tuple[str, int, int]]], start: StreamOffset) -> list[str]:
    """Return the names of partitions that came after `start` and are gone, with records, and of which `start` knows
    none. `gone`: by topic (name, uid, end) of those that are gone, the oldest first."""
    found: set[str] = set()
    for topic, lives in gone.items():
        newest = (start.gone or {}).get(topic)
        if newest is None:
            continue
        uids = [uid for _, uid, _ in lives]
        new = lives[uids.index(newest) + 1 :] if newest in uids else lives
        found |= {name for name, _, end in new if end and name not in start.logs}
    return sorted(found)


def advance(
    start: StreamOffset,
    infos: Sequence[LogInfo],
    gone: Collection[str],
    options: Options,
    limit: Limit | None,
    ended: Mapping[tuple[str, int], int] | None = None,
) -> StreamOffset:
    """Return the end of the next batch; `start` itself when there is nothing new. `gone` are logs that were deleted,
    for certain; any other that is not in `infos` keeps its place; `ended` says where partitions ended, by name and uid.
    Raises `DataLoss` unless a gap is allowed."""
    if options.fail and (lost := sorted(name for name in gone if name in start.logs)):
        raise _deleted(lost[0], start.logs[lost[0]].next, "it was deleted; records")
    logs = {
        name: one if one.first is None else Position(one.uid, one.next)
        for name, one in start.logs.items() if name not in gone
    }  # fmt: skip
    changed = len(logs) < len(start.logs)
    # Where each log that has something new goes on in this batch, and how many records it has.
    begins: dict[str, int] = {}
    backlog: list[tuple[str, int]] = []
    met: list[str] = []
    gaps: dict[str, int] = {}
    after: dict[str, tuple[int, int]] = {}
    for info in infos:
        name, uid, first, end = info[:4]
        known = logs.get(name)
        if known is not None and known.uid == uid:
            begin = known.next
            if begin >= end and begin >= first:
                continue
            if begin < first:
                if options.fail:
                    raise DataLoss(
                        f"log {name!r}: records {begin}..{first - 1} were truncated before the stream read them; set "
                        "failOnDataLoss=false to go on with a row of kind 'gap'",
                        log=name,
                        first=begin,
                        end=first,
                    )
                # The gap is one row of this batch, however many records are missing.
                gaps[name] = begin
                begin = first
                logs[name] = Position(uid, begin)
                changed = True
        else:
            if known is not None and is_read(name, known, ended or {}):
                after[name] = first, known.uid
            elif known is not None and options.fail:
                raise _deleted(name, known.next, "it was deleted and made anew; records")
            begin = end if known is None and options.new_logs == "latest" else first
            logs[name] = Position(uid, begin)
            met.append(name)
            changed = True
        if end > begin:
            begins[name] = begin
            backlog.append((name, end - begin))
    if not changed and not backlog:
        return start
    granted, turn = share(backlog, limit, start.turn) if limit and backlog else (dict(backlog), start.turn)
    for name, rows in granted.items():
        logs[name] = Position(logs[name].uid, begins[name] + rows)
    for name in {*granted, *gaps} if start.initial else met:
        if name in begins or name in gaps:
            begin = gaps.get(name, begins.get(name, 0))
            if begin < logs[name].next:
                logs[name] = logs[name]._replace(first=begin)
    for name, (first, uid) in after.items():
        logs[name] = logs[name]._replace(first=first, after=uid)
    return StreamOffset(logs, turn, gone=start.gone)


def unread(name: str) -> DataLoss:
    """Return the error for a partition that came and went."""
    return _deleted(name, 0, "it came and went between two triggers; records")


def _deleted(name: str, following: int, what: str) -> DataLoss:
    return DataLoss(
        f"log {name!r}: {what} from {following} on may have been lost; set failOnDataLoss=false to go on with a row of "
        "kind 'gap'",
        log=name,
        first=following,
    )


def share(backlog: Sequence[tuple[str, int]], limit: Limit, turn: str) -> tuple[dict[str, int], str]:
    """Return how many records of each log a batch takes, and whose turn was the last.

    Logs come in turn, by name, behind the one that was the last: those take part that get `least` records or all they
    have, and what is left deepens them. So few logs give many records each: a log costs a batch about as much as a
    thousand of its records."""
    order = sorted(backlog, key=lambda one: (one[0] <= turn, one[0]))
    granted: dict[str, int] = {}
    left = limit.budget
    following: tuple[str, int] | None = None
    for name, rows in order:
        wanted = min(rows, limit.least)
        fits = left // limit.costs.get(name, 1)
        if fits < wanted:
            following = (name, fits)
            break
        granted[name] = wanted
        left -= wanted * limit.costs.get(name, 1)
        turn = name
    if not granted:
        # Not even one log's share: as much of it as fits, and never nothing.
        name, fits = order[0][0], max(1, left // limit.costs.get(order[0][0], 1))
        return {name: min(order[0][1], fits)}, name
    deep = [(name, rows, limit.costs.get(name, 1)) for name, rows in order if name in granted]
    while True:
        deep = [(name, rows, cost) for name, rows, cost in deep if granted[name] < rows]
        each = left // sum(cost for *_, cost in deep) if deep else 0
        if not each:
            break
        for name, rows, cost in deep:
            more = min(each, rows - granted[name])
            granted[name] += more
            left -= more * cost
    for name, rows, cost in deep:
        more = min(left // cost, rows - granted[name])
        granted[name] += more
        left -= more * cost
    if following is not None and (fits := left // limit.costs.get(following[0], 1)):
        # What those have no records for; its turn comes first next time all the same.
        granted[following[0]] = fits
    return granted, turn
