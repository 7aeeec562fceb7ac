"""From options to ranges of offsets: pure functions of what the options say and what logs there are.

Called by `datasource` on the driver; a stream's batches are made of the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from .errors import DataLoss, OptionError
from .options import EARLIEST, LATEST, Offsets, Options
from .sources import LogInfo, Wanted


def check_named(options: Options, infos: Sequence[LogInfo], names: Collection[str] | None = None) -> None:
    """Raise `OptionError` for a log that is named and is not there, or not chosen. `names` are the partitions of the
    options' topics."""
    known = {info.name for info in infos}
    option = "subscribe" if options.assign is None else "assign"
    for name in names or options.names or ():
        if name not in known:
            if options.topics is not None:
                raise OptionError(
                    f"subscribeTopic: partition {name!r} is on no node that answers, or it is being made: try again"
                )
            raise OptionError(f"{option}: there is no append log {name!r}")
    named = {
        "startingOffsets": options.starting, "endingOffsets": options.ending,
        "startingOffsetsByTimestamp": options.starting_times, "endingOffsetsByTimestamp": options.ending_times,
    }  # fmt: skip
    for option, value in named.items():
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                raise OptionError(f"{option}: {name!r} is not one of the logs that are read")


def starting_times(options: Options, infos: Sequence[LogInfo]) -> dict[str, int]:
    """Return the logs whose start is a time, with it."""
    return _times(options.starting_time, options.starting_times, infos)


def ending_times(options: Options, infos: Sequence[LogInfo]) -> dict[str, int]:
    """Return the logs whose end is a time, with it."""
    return _times(options.ending_time, options.ending_times, infos)


def _times(everywhere: int | None, by_log: Mapping[str, int] | None, infos: Sequence[LogInfo]) -> dict[str, int]:
    if everywhere is not None:
        return {info.name: everywhere for info in infos}
    return dict(by_log or {})


def resolve(
    options: Options,
    infos: Sequence[LogInfo],
    starts: Mapping[str, int],
    ends: Mapping[str, int],
    nodes: Callable[[LogInfo], tuple[int, ...]] = lambda info: info.members,
) -> list[Wanted]:
    """Return the range of each log, in their order; empty ranges are left out. `starts` and `ends` are the offsets that
    times were found to be. Raises `OptionError` for an offset that is not there yet, `DataLoss` for one that is
    gone."""
    found = []
    for info in infos:
        if options.assign is not None and options.assign[info.name] != (EARLIEST, LATEST):
            first, end = options.assign[info.name]
            named = "assign", "assign"
        else:
            first = _offset(options.starting, info.name, EARLIEST)
            end = _offset(options.ending, info.name, LATEST)
            # A log may have grown between both questions.
            if info.name in starts:
                first = min(starts[info.name], info.end)
            if info.name in ends:
                end = min(ends[info.name], info.end)
            named = "startingOffsets", "endingOffsets"
        first = {EARLIEST: info.start, LATEST: info.end}.get(first, first)
        end = {LATEST: info.end}.get(end, end)
        _check(options, info, named, first, end, by_time=info.name in starts)
        if first < end:
            found.append(Wanted(info.name, info.uid, first, end, nodes(info)))
    return found


def first_offsets(options: Options, infos: Sequence[LogInfo], starts: Mapping[str, int]) -> dict[str, int]:
    """Return where a new stream begins in each log. `starts` and errors as for `resolve`."""
    found = {}
    for info in infos:
        first = _offset(options.starting, info.name, EARLIEST)
        if info.name in starts:
            first = min(starts[info.name], info.end)
        first = {EARLIEST: info.start, LATEST: info.end}.get(first, first)
        named = "startingOffsets", "startingOffsets"
        _check(options, info, named, first, info.end, by_time=info.name in starts)
        found[info.name] = first
    return found


def _check(options: Options, info: LogInfo, named: tuple[str, str], first: int, end: int, *, by_time: bool) -> None:
    """Raise for a range that is not there yet, or no more."""
    if by_time and first >= info.end and options.strategy == "error":
        raise OptionError(
            f"startingTimestamp: log {info.name!r} has no record stamped then or later; set "
            "startingOffsetsByTimestampStrategy=latest to read nothing of such logs"
        )
    for option, offset in zip(named, (first, end), strict=True):
        if offset > info.end:
            raise OptionError(f"{option}: log {info.name!r} ends at {info.end}, {offset} is not there yet")
    if first < min(info.start, end) and options.fail:
        raise DataLoss(
            f"log {info.name!r}: records {first}..{min(info.start, end) - 1} were truncated, it starts at "
            f"{info.start}; set {named[0]} to -2 (earliest), or failOnDataLoss=false for a row of kind 'gap'",
            log=info.name,
            first=first,
            end=min(info.start, end),
        )


def _offset(asked: Offsets, name: str, otherwise: int) -> int:
    return asked.get(name, otherwise) if isinstance(asked, dict) else asked
