"""What a log holds, as one number: the sum of its records' hashes, each of offset, metadata and payload hash.

It does not depend on how a log was cut into parts or batches, nor on Raft's indexes and terms, so it is the same for a
log, its export and its import. `digest_logs` computes it on Spark. Used by `export`, `importing` and the demo.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128_intdigest

from ..opening import open_source
from ..options import Options, parse_options
from ..ranges import ranges_now
from ..sources import RECORD, LogInfo, Wanted
from .running import Progress, Result, bins, run_tasks, silent

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

HEAD = struct.Struct("<QqI")
"""offset, payload size (-1: none), metadata bytes."""
MASK = (1 << 128) - 1
TASK_BYTES = 64 << 20
TASKS_LEAST = 8
ROW_BYTES = 256


class Digest(NamedTuple):
    """Of some records of a log: how many, bytes of their payloads, and the sum of their hashes."""

    rows: int = 0
    payload_bytes: int = 0
    value: int = 0

    def plus(self, other: Digest) -> Digest:
        """Return the digest of both."""
        return Digest(self.rows + other.rows, self.payload_bytes + other.payload_bytes, self.value + other.value & MASK)

    @property
    def text(self) -> str:
        """The sum as hex."""
        return f"{self.value:032x}"


def digest_of(batch: pyarrow.RecordBatch) -> Digest:
    """Return the digest of a batch of records whose payloads were read; raise ValueError for a gap, or a payload
    without a hash."""
    value = size = 0
    columns = [batch.column(name).to_pylist() for name in ("offset", "payload_size", "meta", "payload_hash", "kind")]
    for offset, length, meta, digest, kind in zip(*columns, strict=True):
        if kind != RECORD or (length is not None and digest is None):
            raise ValueError(f"offset {offset} is not a record whose payload was read")
        head = HEAD.pack(offset, -1 if length is None else length, len(meta))
        value += xxh3_128_intdigest(b"".join((head, meta, digest or b"")))
        size += length or 0
    return Digest(batch.num_rows, size, value & MASK)


def runs_of(batch: pyarrow.RecordBatch) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
    """Yield the rows of each log in a batch."""
    import pyarrow.compute

    runs = pyarrow.compute.run_end_encode(batch.column("log"))
    at = 0
    for end, name in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
        yield name, batch.slice(at, end - at)
        at = end


def ranges_of(options: Options) -> tuple[Sequence[LogInfo], list[tuple[int, Wanted]]]:
    """Return the logs that options name, and (weight, range) of what is to be read of each. Raises as `ranges_now`."""
    from ..network import preferred

    infos, ranges = ranges_now(options, preferred)
    sizes = {info.name: info.bytes // max(1, info.end - info.start) for info in infos}
    return infos, [((one.end - one.first) * (sizes[one.log] + ROW_BYTES), one) for one in ranges]


def digest_logs(spark: SparkSession, given: Mapping[str, str], progress: Progress = silent) -> dict[str, Digest]:
    """Return the digest of each log that the data source's options `given` name: every payload is read and
    hash-checked."""
    options = parse_options({**given, "includePayload": "none", "verify": "true"})
    infos, ranges = ranges_of(options)
    found = {info.name: Digest() for info in infos}
    count = max(TASKS_LEAST, sum(weight for weight, _ in ranges) // TASK_BYTES)
    for result in run_tasks(spark, partial(_digests, options), bins(ranges, count)):
        digest = Digest(result["rows"], result["bytes"], int(result["digest"], 16))
        found[result["log"]] = found[result["log"]].plus(digest)
        progress(digest.rows)
    return found


def _digests(options: Options, ranges: list[Wanted]) -> Iterator[Result]:
    found: dict[str, Digest] = {}
    with closing(open_source(options)) as source:
        for batch in source.read(ranges, options.reading):
            for name, part in runs_of(batch):
                found[name] = found.get(name, Digest()).plus(digest_of(part))
    for name, digest in found.items():
        yield {"log": name, "rows": digest.rows, "bytes": digest.payload_bytes, "digest": digest.text}
