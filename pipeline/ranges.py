"""What a read that ends has to read, as of now: the logs that options name, and the range of each. Used by `datasource`
and `jobs.digests`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from .offsets import check_named, ending_times, resolve, starting_times
from .opening import open_source
from .options import Options
from .sources import LogInfo, Wanted
from .topics import named_logs


def ranges_now(
    options: Options, nodes: Callable[[LogInfo], tuple[int, ...]] = lambda info: info.members
) -> tuple[Sequence[LogInfo], list[Wanted]]:
    """Return (logs, ranges), without the empty ones; `nodes` gives whom to ask for a log. Raises `OptionError`,
    `DataLoss`, what a cluster says."""
    with closing(open_source(options)) as source:
        names = named_logs(options, source)
        infos = source.logs(names, options.pattern)
        check_named(options, infos, names)
        starts, ends = starting_times(options, infos), ending_times(options, infos)
        found_starts = source.offsets_at(starts) if starts else {}
        found_ends = source.offsets_at(ends) if ends else {}
    return infos, resolve(options, infos, found_starts, found_ends, nodes)
