"""Reading everything back from one chosen member and comparing it with the ledger, byte for byte.

Each answer names the node that gave it: an answer of another node is a failure. A record of the source without an
acknowledgement at its place is a second copy: appends are exactly-once, so one of them is a failure, too. Called by
`service.demo.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio
import xxhash

from .source import SourceRecord, log_name

if TYPE_CHECKING:
    from logyard.client.aio import Yard
    from logyard.protocol.records import Record

    from .ingest import Ledger

READERS = 4
PAGE_RECORDS = 256
PAGE_BYTES = 4 * 1024 * 1024
READ_TIMEOUT_S = 60.0


class Verified:
    """What a reading found. `lost` and `mismatched` are sets of (log, offset): several readings are united."""

    __slots__ = ("bytes_read", "duplicates", "lost", "members", "mismatched", "records_read")

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.lost: set[tuple[int, int]] = set()
        self.mismatched: set[tuple[int, int]] = set()
        self.duplicates: set[tuple[int, int]] = set()
        self.records_read = 0
        self.bytes_read = 0

    def count(self, size: int) -> None:
        """Count a record that was read."""
        self.records_read += 1
        self.bytes_read += size

    def unite(self, other: Verified) -> None:
        """Add what another reading found."""
        self.lost |= other.lost
        self.mismatched |= other.mismatched
        self.duplicates |= other.duplicates
        self.records_read += other.records_read
        self.bytes_read += other.bytes_read


def matches(record: Record, expected: SourceRecord) -> bool:
    """Return whether a record holds exactly the metadata and the bytes of a source record."""
    view = record.view if record.view is not None else b""
    return (
        record.size == expected.file.size
        and record.metadata == expected.metadata
        and xxhash.xxh3_128_digest(view) == expected.file.digest
    )


def judge(ledger: Ledger, found: Verified, log: int, record: Record, node: int) -> None:
    """Compare one record with what the ledger says of its place."""
    place = (log, record.offset)
    number = ledger.offsets[log].get(record.offset)
    if number is None:
        try:
            number = json.loads(record.metadata)["record"]
            expected = ledger.records[number]
        except (ValueError, KeyError, TypeError, IndexError):
            expected = None
        if expected is not None and expected.log == log and matches(record, expected):
            found.duplicates.add(place)
            return
    elif matches(record, ledger.records[number]):
        return
    found.mismatched.add(place)
    ledger.problem(f"{log_name(log)} offset {record.offset} on node {node} holds other bytes than were acknowledged")


async def read_log(
    yard: Yard, ledger: Ledger, found: Verified, log: int, node: int, start: int, progress: Callable[[int], None]
) -> None:
    """Read one log from `start` to its end on one member; what is acknowledged and not there is lost."""
    handle = yard.log(log_name(log))
    expected = {offset for offset in ledger.offsets[log] if offset >= start}
    at = start
    while True:
        page = await handle.poll(
            at, max_records=PAGE_RECORDS, max_bytes=PAGE_BYTES, node=node, bodies=True, timeout=READ_TIMEOUT_S
        )
        if page.node != node:
            found.mismatched.add((log, at))
            ledger.problem(f"{log_name(log)}: node {page.node} answered in place of node {node}")
        for record in page:
            if record.left_out:
                record.fill(await handle.read_body(record.offset, 0, record.size, node=node, uid=page.uid))
            judge(ledger, found, log, record, node)
            expected.discard(record.offset)
            found.count(record.size)
            progress(record.size)
        if page.next >= page.end:
            break
        if page.next <= at and not len(page):
            ledger.problem(f"{log_name(log)} on node {node}: no progress at offset {at} of {page.end}")
            break
        at = page.next
    for offset in expected:
        found.lost.add((log, offset))
        ledger.problem(f"{log_name(log)} offset {offset} is acknowledged and not on node {node}")


async def verify_member(
    yard: Yard,
    ledger: Ledger,
    found: Verified,
    node: int,
    starts: Sequence[int],
    progress: Callable[[int], None] = lambda size: None,
) -> None:
    """Read every log from its start on one member, `READERS` logs at a time."""
    logs = iter(range(len(ledger.offsets)))

    async def reader() -> None:
        for log in logs:
            await read_log(yard, ledger, found, log, node, starts[log], progress)

    async with trio.open_nursery() as nursery:
        for _ in range(READERS):
            nursery.start_soon(reader)
    found.members.add(node)


async def verify_all(
    yards: Sequence[Yard],
    ledger: Ledger,
    nodes: Sequence[int],
    starts: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> Verified:
    """Read everything from each of the members, all at once; one connection a member."""
    found = Verified()
    begin = starts if starts is not None else [0] * len(ledger.offsets)
    async with trio.open_nursery() as nursery:
        for number, node in enumerate(nodes):
            nursery.start_soon(verify_member, yards[number % len(yards)], ledger, found, node, begin, progress)
    return found
