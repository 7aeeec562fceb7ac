"""logyard inside your own process: `open_system` gives the same engine as the daemon, without sockets.

One directory, one node, groups of one member; the verbs are those of the clients. Everything acknowledged is durable.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from logyard.client.background import background
from logyard.client.board import Standing, standings
from logyard.client.log import offsets_of
from logyard.client.numbering import epoch_of
from logyard.client.producer import EpochWriter, Producer, producer_number
from logyard.client.tail import TAIL_WAIT_S, Cursor, Tailed
from logyard.engine.config import SystemConfig
from logyard.engine.machine import Machine
from logyard.engine.ports import NoPeers
from logyard.engine.replica.member import Member
from logyard.engine.types import Buffer
from logyard.machines.command import APPEND_REPLY
from logyard.machines.log import AppendLog
from logyard.machines.registry import create_machine
from logyard.protocol.compression import encode, parse, ranges_of, wants
from logyard.protocol.errors import Gone, LogyardError, Refused, WrongKind
from logyard.protocol.frame import FRAME_BYTES_MAX, Frame, encode_frame
from logyard.protocol.records import Page, Record

from . import log_reader
from .node import Node, build_system

MACHINES: dict[type, str] = {AppendLog: "log"}
POLL_BYTES = 4 << 20


class EmbeddedLog:
    """The group `name` of this process, an append log or a machine of one's own: whatever has that name now, awake or
    not, as with the clients' handles."""

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self.name = name

    @property
    def _member(self) -> Member:
        """Of now: a group that slept has another one. Raises `UnknownGroup`."""
        return self._node.system.member(self.name)

    async def append(self, metadata: bytes, payload: Buffer | None = None, *, compress: str | None = None) -> int:
        """Append one record; returns its offset once it is durable. `compress`: ``zstd`` or ``none``, by default as the
        log's option says."""
        return (await self.append_many([(metadata, payload)], compress=compress)).start

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        compress: str | None = None,
        timeout: float | None = None,
        keys: Iterable[bytes] | None = None,
        command: bytes = b"",
    ) -> range:
        """Append records atomically: all of them, with consecutive offsets, or none. `keys`: one for each record of a
        keyed log; a record without payload takes its key away. `command`: of a producer's append, see `producer`."""
        self._is_log()
        frame = Frame(command=command)
        zstd = wants(compress, self._member.spec.arguments.get("compress") == "zstd")
        found = (encode(head, body) if zstd and body is not None else (head, body) for head, body in records)
        frame.put_many(found, keys)
        with trio.fail_after(math.inf if timeout is None else timeout):
            first, count = APPEND_REPLY.unpack(await self._node.commit(self._member, frame.encode()))
        return offsets_of(first, count)

    def _is_log(self) -> None:
        """Raise `WrongKind` for a group of a machine of one's own, which takes `command`s."""
        if not isinstance(self._member.machine, AppendLog):
            raise WrongKind(self.name, self._member.spec.machine, "log")

    async def command(self, command: bytes, payload: Buffer | None = None, *, metadata: bytes = b"") -> bytes:
        """Return the reply of any machine to a command with one record. Raises what it is refused with."""
        return await self._node.commit(self._member, encode_frame([(metadata, payload)], command=command))

    async def poll(
        self,
        offset: int,
        *,
        max_records: int = 1000,
        max_bytes: int = POLL_BYTES,
        wait: float = 0.0,
        bodies: bool = True,
        since: int | None = None,
    ) -> Page:
        """Return records from `offset` on, or from the first one stamped at `since` (ms since 1970) or later; at least
        one unless the log ends there. Waits up to `wait` seconds for one."""
        header, blocks = await self._node.poll(
            self.name, offset, max_records, max_bytes, wait, bodies, "local", since=since, uid=self._member.uid
        )
        asked = header.get("offset", offset)
        return Page(b"".join(blocks), header["start"], header["end"], header["node"], asked, max_records)

    async def read(self, offset: int) -> Record:
        """Return one record. Raises `OutOfRange`."""
        page = await self.poll(offset, max_records=1)
        for record in page:
            if record.offset != offset:
                raise Gone(f"log {self.name!r}: the record at {offset} gave way to a newer one with its key")
            return record
        raise Gone(f"log {self.name!r} has no record {offset} yet; it ends at {page.end}")

    async def read_body(self, offset: int, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes start..stop of one record's body."""
        body = await self._node.read_body(self.name, offset, start, stop)
        if not isinstance(body, log_reader.Encoded):
            return bytes(body)
        encoding = parse(body.envelope)
        steps = ranges_of(encoding, body.stored, start, encoding.size if stop is None else min(stop, encoding.size))
        found: list[Buffer] = []
        step = next(steps, None)
        while step is not None:
            if isinstance(step, tuple):
                part = await self._node.read_body(self.name, offset, *step, stored=True)
                assert not isinstance(part, log_reader.Encoded)
                step = steps.send(part)
            else:
                found.append(step)
                step = next(steps, None)
        return b"".join(found)

    async def records(self, start: int | None = None, stop: int | None = None) -> AsyncIterator[Record]:
        """Yield records from `start` (default: the first) up to `stop` (default: the present end)."""
        bounds = await self._node.bounds(self.name)
        at = bounds["start"] if start is None else start
        end = bounds["end"] if stop is None else min(stop, bounds["end"])
        while at < end:
            page = await self.poll(at, max_records=end - at)
            for record in page:
                yield record
            at = page.next

    async def tail(
        self, cursor: Cursor | None = None, *, follow: bool = True, max_records: int = 1000, bodies: bool = True
    ) -> AsyncIterator[Tailed]:
        """Yield records from `cursor` on, a batch at a time, each with the place behind it; see `client._async.log`.
        Raises `Refused` for a cursor of another log, `OutOfRange` when records that it has not passed are gone."""
        uid = self._member.uid
        at = Cursor(uid, (await self._node.bounds(self.name))["start"]) if cursor is None else cursor
        if at.uid != uid:
            raise Refused(f"log {self.name!r} was made anew: the cursor is of another one, {at.uid:016x}")
        while True:
            page = await self.poll(
                at.offset, max_records=max_records, wait=TAIL_WAIT_S if follow else 0.0, bodies=bodies
            )
            records = page.records
            for record in records:
                if record.left_out and record.size <= FRAME_BYTES_MAX:
                    record.fill(await self.read_body(record.offset))
            if records:
                at = Cursor(uid, page.next)
                yield Tailed(records, at)
            elif not follow:
                return

    async def seek(self, since: int) -> int:
        """Return the first offset stamped at `since` (ms since 1970) or later, or the log's end."""
        return (await self.poll(0, max_records=1, bodies=False, since=since)).asked

    async def retain(self, *, age: float = 0.0, bytes: int = 0, records: int = 0) -> int:
        """Set what the log keeps from now on; see `client._async.log`."""
        return await self._node.retain(self.name, round(age * 1000), bytes, records)

    async def producer(self, name: int | str) -> Producer:
        """Return an idempotent producer of this log; see `client.producer`."""
        number = producer_number(name)
        return Producer(self, number, await self._node.open_producer(self.name, number))

    async def epoch(self, producer: int | str, incarnation: int, epoch: int, lane: int = 0) -> EpochWriter:
        """Return a writer of one lane of a fenced producer's epoch; see `client.producer`."""
        writer = EpochWriter(self, epoch_of(producer, incarnation, epoch), lane)
        await self._node.open_epoch(self.name, *writer.epoch)
        return writer

    async def close_epoch(self, producer: int | str, incarnation: int, epoch: int) -> None:
        """Take no more frames of an epoch of a fenced producer, nor of any before it."""
        await self._node.close_epoch(self.name, *epoch_of(producer, incarnation, epoch))

    async def epoch_state(self, producer: int | str) -> tuple[int, int, bool] | None:
        """Return a fenced producer's incarnation, its newest epoch here, and whether that takes frames."""
        return await self._node.epoch_state(self.name, producer_number(producer))

    async def truncate(self, before: int) -> int:
        """Drop the records before an offset; returns the log's start."""
        return await self._node.truncate(self.name, before)

    async def query(self, request: bytes, *, consistency: str = "local", index: int = 0) -> bytes:
        """Ask the machine's `query`; `index`: not before it is applied. `consistency`: local, leader, linearizable."""
        return await self._node.query(self.name, request, consistency, index)

    async def wait_applied(self, index: int, *, term: int = 0, timeout: float = 30.0) -> int:
        """Wait until `index` is applied here; return what is. Raises `Busy` after `timeout` seconds, `Refused` or
        `Gone` for an entry that is not of `term`, if one is named."""
        return await self._node.wait_applied(self.name, index, term, timeout)

    async def snapshot(self) -> dict[str, Any]:
        """Snapshot this group now."""
        return await self._node.snapshot([self.name])

    def bounds(self) -> tuple[int, int]:
        """Return (start, end)."""
        machine = log_reader.append_log(self._member)
        return machine.start, machine.end

    def describe(self) -> dict[str, Any]:
        """Return everything about the group."""
        return self._node.describe(self.name)


class EmbeddedSystem:
    """A node of this process."""

    def __init__(self, node: Node, machines: Mapping[str, type[Machine]]) -> None:
        self.node = node
        self._kinds = {**MACHINES, **{kind: name for name, kind in machines.items()}}

    async def start_group(self, name: str, machine: Machine) -> EmbeddedLog:
        """Return the group `name`, created when it is new. `machine` says its kind. Raises `GroupExists` for another
        kind."""
        kind = self._kinds.get(type(machine))
        if kind is None:
            raise LogyardError(f"{type(machine).__name__} is not a machine that logyard knows by name")
        await self.node.create_groups(
            [{"name": name, "members": [self.node.node_id], "machine": kind, "arguments": _arguments(machine)}]
        )
        member = self.node.system.member(name)
        with trio.fail_after(10):
            await self.node.system.wait(member, lambda: member.raft.leader == self.node.node_id)
            # What an earlier run acknowledged is applied when a read of this term is.
            await self.node.system.read_index(member)
        return EmbeddedLog(self.node, name)

    async def delete_group(self, name: str) -> None:
        """Delete a group and everything in it."""
        await self.node.delete_group(name)

    async def compact(self) -> dict[str, Any]:
        """Migrate and rewrite payloads now."""
        return await self.node.compact()

    def groups(self) -> list[dict[str, Any]]:
        """Return a row a group."""
        return self.node.groups()

    def leaderboard(self) -> list[Standing]:
        """Return who leads what, since when, from this node's tables: no group is asked, whatever state it is in."""
        return standings(self.node.board("", len(self.node.system.names)))

    def status(self) -> dict[str, Any]:
        """Return counters and sizes."""
        return self.node.status()


def _arguments(machine: Machine) -> dict[str, Any]:
    """Return what defines an append log beside its kind."""
    return {"compact": "key"} if isinstance(machine, AppendLog) and machine.keys is not None else {}


@asynccontextmanager
async def open_system(
    path: str | Path, config: SystemConfig | None = None, machines: Mapping[str, type[Machine]] | None = None
) -> AsyncIterator[EmbeddedSystem]:
    """Open (or create) a directory as a node of its own. `machines`: your own kinds by name, each made without
    arguments; a name is for good. Raises `DirectoryInUse`, `WrongIdentity`, `Corrupt`; what the block raises comes as
    it is."""
    own = dict(machines or {})

    def made(name: str, arguments: dict[str, Any]) -> Machine:
        return own[name]() if name in own else create_machine(name, arguments)

    system = build_system(Path(path), 1, "embedded", config or SystemConfig(), machines=made)
    await system.open()
    try:
        async with background(trio.open_nursery(), trio.Cancelled) as nursery:
            await nursery.start(system.run, NoPeers())
            yield EmbeddedSystem(Node(system), own)
    finally:
        system.part()
        system.close()
