"""A scan's answer: records of many logs as columns, so that neither end makes an object of a record.

Sections, one after another: runs (each some records of one entry), their packs' tables, all metadata, all small bodies,
a directory of other bodies, those bodies. A run's pack is there whole, so that its hash can be checked; `skip` and
`records` say which of its records are meant. Encoded by the server (`service.log.scan`), read by `pipeline.frames`;
docs/wire-client.md has the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from .frame import ABSENT, MARK, Buffer

__all__ = ["ABSENT", "BODY", "LONG_UNIT", "RUN", "Columns", "Extra", "Sections", "sections"]

RUN = struct.Struct("<QQQqIIIIIIII16s")
"""first offset (of record `skip`), index, term, timestamp (ms since 1970), number of the range, records, skip, records
of the pack, unit number of the pack, metadata bytes, small bodies' bytes, rows in the directory, hash of the pack."""
BODY = struct.Struct("<IIQQ16s")
"""record of the pack, unit number, size, bytes that came along (all or 0), hash of the unit: one row of the
directory."""
LONG_UNIT = 0xFFFFFFFF
"""As a unit number in the directory: a payload that came in pieces, which have hashes of their own."""


JOINED_BYTES = 4096
"""Parts below it, on the average, travel as one buffer: they cost a copy, and many buffers cost more."""


class Extra(NamedTuple):
    """A body that is not in its pack: `data` is empty where it did not come along."""

    record: int
    unit: int
    size: int
    digest: bytes
    data: Sequence[Buffer]


class Columns:
    """What a scan gathers. `size`: bytes so far; `rows`: records so far."""

    __slots__ = ("size", "rows", "_runs", "_tables", "_heads", "_smalls", "_directory", "_bodies")

    def __init__(self) -> None:
        self.size = self.rows = 0
        self._runs: list[bytes] = []
        self._tables: list[Buffer] = []
        self._heads: list[Buffer] = []
        self._smalls: list[Buffer] = []
        self._directory: list[bytes] = []
        self._bodies: list[Buffer] = []

    def add(
        self,
        place: tuple[int, int, int, int],
        number: int,
        records: int,
        skip: int,
        pack: memoryview,
        pack_records: int,
        unit: int,
        digest: bytes,
        bodies: bool,
        extras: Sequence[Extra] = (),
    ) -> None:
        """Add one run; `place` is (first offset, index, term, timestamp). `bodies`: the pack's small ones come
        along."""
        table_end = 8 * pack_records
        if pack_records == 1:
            heads = int.from_bytes(pack[:4], "little")
        else:
            heads = sum(struct.unpack_from(f"<{2 * pack_records}I", pack)[::2])
        # Without the marks of compressed payloads: all heads of a pack together are far below one.
        heads_end = table_end + heads % MARK
        end = len(pack) if bodies else heads_end
        if not bodies and len(pack) > heads_end:
            # What is not sent is not to be kept until the answer is.
            pack = memoryview(bytes(pack[:heads_end]))
        self._runs.append(
            RUN.pack(
                *place, number, records, skip, pack_records, unit, heads_end - table_end, end - heads_end, len(extras),
                digest,
            )
        )  # fmt: skip
        self._tables.append(pack[:table_end])
        self._heads.append(pack[table_end:heads_end])
        if end > heads_end:
            self._smalls.append(pack[heads_end:end])
        for extra in extras:
            sent = sum(map(len, extra.data))
            self._directory.append(BODY.pack(extra.record, extra.unit, extra.size, sent, extra.digest))
            self._bodies += extra.data
            self.size += BODY.size + sent
        self.size += RUN.size + end
        self.rows += records

    def finish(self) -> tuple[dict[str, Any], list[Buffer]]:
        """Return (what the header says of the sections, the sections)."""
        sections = (self._runs, self._tables, self._heads, self._smalls, self._directory)
        parts: list[Buffer] = []
        lengths = []
        for section in sections:
            size = sum(map(len, section))
            lengths.append(size)
            parts += section if size > JOINED_BYTES * len(section) else [b"".join(section)]
        return {"sections": lengths}, [*parts, *self._bodies]


class Sections(NamedTuple):
    """Views of an answer's parts."""

    runs: memoryview
    table: memoryview
    heads: memoryview
    smalls: memoryview
    directory: memoryview
    bodies: memoryview


def sections(header: Any, data: memoryview) -> Sections:
    """Return the parts of a scan's answer; raise ValueError when the header's lengths do not fit the bytes."""
    lengths = header["sections"]
    if len(lengths) != 5 or any(length < 0 for length in lengths) or sum(lengths) > len(data):
        raise ValueError("the sections of a scan's answer do not add up")
    parts, at = [], 0
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    runs, table, heads, smalls, directory = parts
    if len(runs) % RUN.size or len(table) % 8 or len(directory) % BODY.size:
        raise ValueError("the sections of a scan's answer do not add up")
    return Sections(runs, table, heads, smalls, directory, data[at:])
