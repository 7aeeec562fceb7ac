"""Merging the files of an hour, when it is an hour old: no more than two stay for each partition.

Rows do not change, so readers and the sink's commits are not disturbed; what was merged stays on the disk until a
vacuum. Late rows are files of their own hour again, which is merged again when a partition has more than two.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from .rules import HOUR

FILES_MAX = 2
AGE = timedelta(hours=1)
"""Since its end."""

log = logging.getLogger(__name__)


def crowded(table: Path, now: datetime) -> list[str]:
    """Return the hours that are old enough and have a partition of more than `FILES_MAX` files."""
    import deltalake
    import pyarrow

    newest = (now - AGE - timedelta(hours=1)).isoformat()[:13]
    actions: Any = deltalake.DeltaTable(str(table)).get_add_actions(flatten=True)
    files = pyarrow.table(actions)
    columns = [files[name].to_pylist() for name in files.column_names if name.startswith("partition.")]
    hours = files[f"partition.{HOUR}"].to_pylist()
    counts = Counter(zip(hours, *columns, strict=True))
    return sorted({hour for (hour, *_), count in counts.items() if count > FILES_MAX and hour <= newest})


def compact(table: Path, now: datetime) -> tuple[int, int]:
    """Merge the files of crowded hours; return how many became how many. What another job is faster with stays for the
    next time."""
    import deltalake
    from deltalake.exceptions import CommitFailedError

    removed = added = 0
    for hour in crowded(table, now):
        try:
            found: dict[str, Any] = deltalake.DeltaTable(str(table)).optimize.compact([(HOUR, "=", hour)])
        except CommitFailedError as error:
            log.warning("%s: hour %s is not merged yet: %s", table, hour, error)
            continue
        removed += found["numFilesRemoved"]
        added += found["numFilesAdded"]
    return removed, added
