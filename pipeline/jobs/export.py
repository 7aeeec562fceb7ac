"""Export: logs to Parquet, one directory a log, with a manifest that proves that nothing is missing.

Tasks write their files themselves, so no payload goes through the JVM. Every payload is read and checked against its
stored hash. Run again after it was killed, an export goes on: the ranges are those of its plan, and parts that
are there whole, by their hashes, are not read from the logs again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow
import pyarrow.parquet as parquet

from ..opening import open_source
from ..options import Options, parse_options
from ..schema import arrow_schema
from ..sources import LogSource, Wanted
from .digests import TASK_BYTES, TASKS_LEAST, Digest, digest_of, ranges_of, runs_of
from .manifest import (
    DATA,
    FOOTER,
    FORMAT,
    PLAN,
    ExportError,
    Part,
    check_whole,
    folder_of,
    is_temporary,
    sync,
    write_manifest,
    write_once,
)
from .parts import PLACE, is_whole
from .running import Progress, Result, bins, run_tasks, silent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAYLOADS = ("column", "files", "none")
PART_BYTES = 128 << 20
READ_PARTS = 64
"""Parts that are read at once: small ones share an answer."""
INLINE_BYTES = 16 << 20
"""A larger payload is a file of its own, whatever was asked for: a cell of it would need many times its size."""
UNFINISHED = ".tmp"


class Export(NamedTuple):
    """What to export where. `given` are options of the data source: servers or path, which logs, and from where to
    where of each. `payloads`: as a
    column, as a file each, or none."""

    given: Mapping[str, str]
    out: Path
    payloads: str = "column"
    part_bytes: int = PART_BYTES

    @property
    def options(self) -> Options:
        """As the data source's."""
        inline = "none" if self.payloads == "none" else "inline"
        verify = "false" if self.payloads == "none" else "true"
        return parse_options(
            {**self.given, "includePayload": inline, "maxInlineBytes": str(INLINE_BYTES), "verify": verify}
        )


def run_export(spark: SparkSession, export: Export, progress: Progress = silent) -> dict[str, Any]:
    """Export; return plain figures. `progress` counts records. Raises `ExportError` where `out` holds another export,
    and what reading raises."""
    out = export.out
    out.mkdir(parents=True, exist_ok=True)
    plan = make_plan(export)
    tasks = plan_tasks(plan, export)
    parts: dict[str, list[Part]] = {}
    skipped = 0
    for result in run_tasks(spark, partial(export_parts, export, str(plan["export"])), tasks):
        part = Part(**result["part"])
        parts.setdefault(part.log, []).append(part)
        skipped += result["skipped"]
        progress(part.rows)
    logs = [check_whole(row["log"], row["start"], row["end"], parts.get(row["log"], [])) for row in plan["logs"]]
    logs = [log._replace(uid=row["uid"]) for log, row in zip(logs, plan["logs"], strict=True)]
    # Of attempts that were killed; one that is still at work, and late, fails.
    for left in (out / DATA).glob(f"*/.*{UNFINISHED}"):
        left.unlink(missing_ok=True)
    for folder in (*(out / DATA).glob("*"), out / DATA):
        if folder.is_dir():
            sync(folder)
    write_manifest(out, plan, logs)
    total = Digest()
    for log in logs:
        total = total.plus(log.sum)
    return {
        "ok": True, "out": str(out), "export": plan["export"], "logs": len(logs), "rows": total.rows,
        "payload_bytes": total.payload_bytes, "parts": sum(map(len, parts.values())), "parts_skipped": skipped,
        "file_bytes": sum(part.bytes for found in parts.values() for part in found), "digest": total.text,
    }  # fmt: skip


def make_plan(export: Export) -> dict[str, Any]:
    """Return the plan that is there already, or a new one: the range of each log as it is now."""
    path = export.out / PLAN
    asked = {"given": dict(export.given), "payloads": export.payloads, "part_bytes": export.part_bytes}
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {key: found[key] for key in asked} != asked or found["format"] != FORMAT:
            raise ExportError(f"{export.out} holds an export of something else: give a new directory")
        return found
    if any(not is_temporary(one) for one in export.out.iterdir()):
        raise ExportError(f"{export.out} is not empty, and has no {PLAN}: give a new directory")
    infos, ranges = ranges_of(export.options)
    chosen = {one.log: (weight, one) for weight, one in ranges}
    rows = []
    for info in infos:
        # Of a log of which nothing is chosen, its end.
        weight, one = chosen.get(info.name, (0, Wanted(info.name, info.uid, info.end, info.end)))
        start = max(one.first, info.start)
        rows.append({"log": info.name, "uid": info.uid, "start": start, "end": max(one.end, start), "bytes": weight,
                     "nodes": one.nodes})  # fmt: skip
    plan = {"format": FORMAT, "export": secrets.token_hex(8), **asked, "logs": rows}
    if write_once(path, json.dumps(plan)):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found
    # Another run of this export was faster.
    return make_plan(export)


def plan_tasks(plan: Mapping[str, Any], export: Export) -> list[list[Wanted]]:
    """Return each log in parts of about `part_bytes`, several small ones in a task; the same for the same plan."""
    weighed: list[tuple[int, Wanted]] = []
    for row in plan["logs"]:
        rows = row["end"] - row["start"]
        count = min(rows, max(1, -(-row["bytes"] // export.part_bytes)))
        edges = [row["start"] + rows * number // count for number in range(count + 1)] if rows else []
        for first, end in pairwise(edges):
            wanted = Wanted(row["log"], row["uid"], first, end, tuple(row["nodes"]))
            weighed.append((row["bytes"] * (end - first) // rows, wanted))
    count = max(TASKS_LEAST, sum(weight for weight, _ in weighed) // TASK_BYTES)
    return bins(weighed, count)


def export_parts(export: Export, number: str, wanted: Sequence[Wanted]) -> Iterator[Result]:
    """Write the parts of one task that are not there."""
    left = []
    for one in wanted:
        part = existing(export, number, one)
        if part is not None and is_whole(export.out, part, export.payloads != "none"):
            yield {"part": part._asdict(), "skipped": 1}
        else:
            left.append(one)
    with closing(open_source(export.options)) as source:
        for at in range(0, len(left), READ_PARTS):
            for part in write_parts(export, number, source, left[at : at + READ_PARTS]):
                yield {"part": part._asdict(), "skipped": 0}


def path_of(wanted: Wanted) -> Path:
    """Return a part's file, relative to the export."""
    return Path(DATA) / folder_of(wanted.log) / f"{wanted.first:020d}-{wanted.end:020d}.parquet"


def unfinished(path: Path) -> Path:
    """Return where a file is written, by this attempt alone: of a part two may be at work, where an executor was given
    up too early, or an export is run twice at once. Spark passes over what begins with a dot."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")


def existing(export: Export, number: str, wanted: Wanted) -> Part | None:
    """Return a part that is there whole, by its footer."""
    path = export.out / path_of(wanted)
    try:
        footer = parquet.read_metadata(path)
        part = Part(**json.loads(footer.metadata[FOOTER]))
    except (OSError, pyarrow.ArrowException, KeyError, TypeError, ValueError):
        return None
    same = (part.export, part.log, part.first, part.end) == (number, wanted.log, wanted.first, wanted.end)
    whole = part.rows == footer.num_rows == wanted.end - wanted.first
    return part._replace(bytes=path.stat().st_size) if same and whole else None


def write_parts(export: Export, number: str, source: LogSource, wanted: Sequence[Wanted]) -> Iterator[Part]:
    """Read some ranges together; the records of each go to its file."""
    by_log: dict[str, list[PartWriter]] = {}
    for one in wanted:
        by_log.setdefault(one.log, []).append(PartWriter(export, number, source, one))
    try:
        for batch in source.read(wanted, export.options.reading):
            for log, rows in runs_of(batch):
                yield from _put(by_log[log], rows)
    finally:
        for writers in by_log.values():
            for writer in writers:
                writer.abandon()
    for writers in by_log.values():
        for writer in writers:
            if not writer.done:
                raise ExportError(f"log {writer.wanted.log!r}: records from {writer.next} on did not come")


def _put(writers: Sequence[PartWriter], rows: pyarrow.RecordBatch) -> Iterator[Part]:
    """Write records of one log; they may be of several parts, and those of one may come before those of another."""
    offsets = rows.column("offset").to_pylist()
    breaks = [at for at in range(1, len(offsets)) if offsets[at] != offsets[at - 1] + 1]
    for first, end in pairwise([0, *breaks, len(offsets)]):
        yield from _put_run(writers, rows.slice(first, end - first))


def _put_run(writers: Sequence[PartWriter], rows: pyarrow.RecordBatch) -> Iterator[Part]:
    """Write records of one log that follow one another."""
    at = 0
    while at < rows.num_rows:
        offset = rows.column("offset")[at].as_py()
        writer = next((one for one in writers if one.next == offset and not one.done), None)
        if writer is None:
            raise ExportError(f"log {writers[0].wanted.log!r}: record {offset} came out of order")
        taken = min(rows.num_rows - at, writer.wanted.end - offset)
        part = writer.put(rows.slice(at, taken))
        if part is not None:
            yield part
        at += taken


class PartWriter:
    """One file in the making. `next` is the offset that comes next."""

    def __init__(self, export: Export, number: str, source: LogSource, wanted: Wanted) -> None:
        self.wanted = wanted
        self.next = wanted.first
        self.done = False
        self._export = export
        self._number = number
        self._source = source
        self._path = export.out / path_of(wanted)
        self._temporary = unfinished(self._path)
        self._writer: parquet.ParquetWriter | None = None
        self._digest = Digest()
        fields = [field for field in arrow_schema(export.payloads != "none") if field.name != "log"]
        self._schema = pyarrow.schema([*fields, pyarrow.field(PLACE, pyarrow.string())])

    def put(self, rows: pyarrow.RecordBatch) -> Part | None:
        """Add records; return the part when it is whole."""
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = parquet.ParquetWriter(
                self._temporary,
                self._schema,
                compression="zstd",
                use_dictionary=["kind"],
                write_statistics=["offset"],
                write_page_checksum=True,
            )
        self._digest = self._digest.plus(_digest(rows, self._export.payloads))
        columns = {name: rows.column(name) for name in rows.schema.names if name != "log"}
        places: list[str | None] = [None] * rows.num_rows
        if self._export.payloads != "none":
            columns["payload"] = self._beside(rows, places)
        columns[PLACE] = pyarrow.array(places, pyarrow.string())
        self._writer.write_batch(pyarrow.record_batch(list(columns.values()), schema=self._schema))
        self.next += rows.num_rows
        return self._finish() if self.next == self.wanted.end else None

    def _beside(self, rows: pyarrow.RecordBatch, places: list[str | None]) -> pyarrow.Array:
        """Write payloads that become files; return the column without them."""
        sizes, payloads = rows.column("payload_size"), rows.column("payload")
        everything = self._export.payloads == "files"
        moved = [
            row for row in range(rows.num_rows)
            if sizes[row].is_valid and (everything or not payloads[row].is_valid)
        ]  # fmt: skip
        if not moved:
            return payloads
        for row in moved:
            offset = rows.column("offset")[row].as_py()
            name = f"{offset:020d}.payload"
            path = self._path.parent / name
            temporary = unfinished(path)
            with open(temporary, "wb") as file:
                if payloads[row].is_valid:
                    file.write(payloads[row].as_buffer())
                else:
                    for piece in self._source.body(self.wanted, offset, sizes[row].as_py()):
                        file.write(piece)
            sync(temporary)
            temporary.replace(path)
            places[row] = name
        gone = set(moved)
        return pyarrow.array([None if row in gone else payloads[row].as_py() for row in range(rows.num_rows)],
                             pyarrow.binary())  # fmt: skip

    def _finish(self) -> Part:
        assert self._writer is not None
        part = Part(
            self._number, self.wanted.log, self.wanted.uid, self.wanted.first, self.wanted.end,
            str(path_of(self.wanted)), *self._digest[:2], self._digest.text,
        )  # fmt: skip
        self._writer.add_key_value_metadata({FOOTER: json.dumps(part._asdict())})
        self._writer.close()
        self._writer = None
        sync(self._temporary)
        self._temporary.replace(self._path)
        self.done = True
        return part._replace(bytes=self._path.stat().st_size)

    def abandon(self) -> None:
        """Leave nothing behind of a file that is not whole."""
        if self._writer is not None:
            self._writer.close()
            self._temporary.unlink(missing_ok=True)
            self._writer = None


def _digest(rows: pyarrow.RecordBatch, payloads: str) -> Digest:
    if payloads == "none":
        sizes = rows.column("payload_size").to_pylist()
        return Digest(rows.num_rows, sum(size or 0 for size in sizes))
    return digest_of(rows)
