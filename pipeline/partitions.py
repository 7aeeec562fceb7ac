"""From ranges to tasks: many small logs in one, a long one in several, by weight. Pure; called by `datasource`.

A task costs about 27 ms however little it does, so there are few; those of one node are apart in the order of tasks, so
that those that run together ask different nodes. A stream's tasks are cut by names and rows alone (`cut`): a batch that
is repeated after a failure must have the same ones, whoever leads then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .sources import LogInfo, Wanted

ROW_BYTES = 128
"""What a row weighs beside its payload."""
LOG_BYTES = 16 << 10
"""What a log weighs beside its rows: finding its first record."""
LEAST_BYTES = 4 << 20
"""Not worth a task of its own, unless more are asked for."""
LOG_ROWS_WEIGHT = 1000
"""What a log weighs in a stream's task beside its rows: about as long as so many rows take."""


class Weighed(NamedTuple):
    """A range and about how many bytes it moves."""

    wanted: Wanted
    weight: int


def weigh(wanted: Wanted, info: LogInfo, bodies: bool) -> Weighed:
    """Return a range with its weight in bytes; with `bodies` payloads are read, too."""
    rows = wanted.end - wanted.first
    share = info.bytes * rows // max(1, info.end - info.start) if bodies else 0
    return Weighed(wanted, LOG_BYTES + rows * ROW_BYTES + share)


def spread(ranges: Sequence[Weighed], leaders: Mapping[str, int]) -> list[Weighed]:
    """Return each range with its nodes in the order in which to ask them: the follower with the least to do first, the
    leader last. Same input, same output."""
    load: dict[int, int] = defaultdict(int)
    found = []
    for one in sorted(ranges, key=lambda one: (-one.weight, one.wanted.log)):
        leader = leaders.get(one.wanted.log, 0)
        followers = sorted((node for node in one.wanted.nodes if node != leader), key=lambda node: (load[node], node))
        nodes = (*followers, leader) if leader in one.wanted.nodes else tuple(followers)
        if nodes:
            load[nodes[0]] += one.weight
        found.append(Weighed(one.wanted._replace(nodes=nodes), one.weight))
    return found


def pack(ranges: Sequence[Weighed], max_bytes: int, min_partitions: int | None, cores: int) -> list[tuple[Wanted, ...]]:
    """Return tasks of about equal weight, at most about `max_bytes` each; no range is in two of them at once, but for
    parts of a long one."""
    total = sum(one.weight for one in ranges)
    if not total:
        return []
    few = min(2 * cores, -(-total // LEAST_BYTES))
    count = max(min_partitions or few, -(-total // max_bytes), 1)
    target = max(1, -(-total // count))
    tasks: list[tuple[int, list[Wanted]]] = []
    room = 0
    for one in sorted(ranges, key=lambda one: (one.wanted.nodes[:1], one.wanted.log)):
        wanted, weight = one
        while True:
            rows = wanted.end - wanted.first
            if room <= 0:
                tasks.append((wanted.nodes[0] if wanted.nodes else 0, []))
                room = target
            if weight <= room + room // 8 or rows == 1:
                tasks[-1][1].append(wanted)
                room -= weight
                break
            taken = min(rows - 1, max(1, rows * room // weight))
            tasks[-1][1].append(wanted._replace(end=wanted.first + taken))
            wanted = wanted._replace(first=wanted.first + taken)
            weight -= weight * taken // rows
            room = 0
    return [tuple(task) for _, task in _mixed(tasks)]


def cut(ranges: Sequence[Wanted], max_rows: int, min_partitions: int | None) -> list[tuple[Wanted, ...]]:
    """Return a stream's tasks: logs by name, each task up to `max_rows` with `LOG_ROWS_WEIGHT` for each log. A log that
    is longer is split evenly, any other stays whole, so that its records stay in order. Depends on nothing else."""
    total = sum(_stream_weight(one) for one in ranges)
    if not total:
        return []
    room = max(1, min(max_rows, -(-total // (min_partitions or 1))))
    tasks: list[list[Wanted]] = []
    left = 0
    for one in sorted(ranges):
        rows = one.end - one.first
        parts = min(rows, -(-_stream_weight(one) // room))
        for number in range(parts):
            first, end = (one.first + rows * at // parts for at in (number, number + 1))
            part = one._replace(first=first, end=end)
            weight = _stream_weight(part)
            if weight > left:
                tasks.append([])
                left = room
            tasks[-1].append(part)
            left -= weight
    return [tuple(task) for task in tasks]


def _stream_weight(one: Wanted) -> int:
    return one.end - one.first + LOG_ROWS_WEIGHT


def _mixed(tasks: Sequence[tuple[int, list[Wanted]]]) -> list[tuple[int, list[Wanted]]]:
    """Return one of each node in turn."""
    seen: dict[int, int] = defaultdict(int)
    order = []
    for number, (node, _) in enumerate(tasks):
        order.append((seen[node], node, number))
        seen[node] += 1
    return [tasks[number] for *_, number in sorted(order)]
