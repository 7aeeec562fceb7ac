"""The seam between Spark and where records come from: a running cluster or a stopped node's directory.

A `LogSource` tells what logs there are and reads ranges of them as Arrow record batches (`schema.arrow_schema`). Both
sources are opened on the driver for planning and again in each task for reading, and used by one thread at a time.
Nothing here imports Spark, Arrow or a network. Used by `datasource`, `jobs`; implemented by `network` and `directory`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 10_000
BATCH_BYTES = 4 << 20
"""A batch ends at whichever comes first; one record that is larger is a batch of its own."""
INLINE_BYTES = 16 << 20
"""`maxInlineBytes` unless told: a task needs about twice a cell in Python and five times in the JVM."""

RECORD = "record"
GAP = "gap"
"""A row's `kind`. A gap stands for records that were truncated before they could be read, where `Reading.gaps` allows
it: `offset` is the first of them, `payload_size` how many there are, every other column but `log` is null."""


class LogInfo(NamedTuple):
    """One append log as a source finds it: committed offsets `start` up to, without, `end`.

    `bytes`: about what its metadata and payloads occupy, 0 when not known. `leader` (0: none known) and `members` are
    nodes; a directory has its own node only. `uid` tells a log from an earlier one of the same name.
    """

    name: str
    uid: int
    start: int
    end: int
    bytes: int
    leader: int
    members: tuple[int, ...]


class Wanted(NamedTuple):
    """Offsets `first` up to, without, `end` of one log, to be read from `nodes`: any of them, best one first.

    `uid` is the log's at planning: a log that was deleted and made again is another one (0: whichever there is).
    """

    log: str
    uid: int
    first: int
    end: int
    nodes: tuple[int, ...] = ()


class Reading(NamedTuple):
    """What a read brings. Metadata is always there; `payload_hash` wherever the payload's bytes were read.

    `payloads`: a column `payload`, null for one above `inline_bytes`. `verify`: every payload is read and checked
    against its stored hash, also where none of them is returned. `gaps`: a truncated range is a row of kind `GAP` in
    place of a `DataLoss`.
    """

    payloads: bool = False
    inline_bytes: int = INLINE_BYTES
    verify: bool = False
    gaps: bool = False
    batch_rows: int = BATCH_ROWS
    batch_bytes: int = BATCH_BYTES


class LogSource(Protocol):
    """Where records come from. Errors are `LogyardError`s with the log, the offset and what to do in the first line."""

    def logs(self, names: Collection[str] | None = None, pattern: str | None = None) -> Sequence[LogInfo]:
        """Return the append logs called `names`, or whose whole name matches the regular expression `pattern` (re), or
        all of them; by name. Names that are not there are left out. Costs one call a node, however many logs."""
        ...

    def offsets_at(self, times: Mapping[str, int]) -> Mapping[str, int]:
        """Return for each log the first offset whose timestamp is at or after the given milliseconds since 1970; the
        log's end when there is none."""
        ...

    def read(self, wanted: Sequence[Wanted], reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        """Return every record of `wanted`, the logs one after another and each in the order of its offsets, in batches
        that may hold several logs. Raises `DataLoss` (truncated or deleted), `Corrupt` (hash), or what the network
        says."""
        ...

    def body(self, wanted: Wanted, offset: int, size: int) -> Iterator[bytes]:
        """Return the payload of one record of `wanted`, of `size` bytes, in pieces: for one that is too large for a
        batch."""
        ...

    def close(self) -> None:
        """Give up connections and files; closing twice is harmless."""
        ...
