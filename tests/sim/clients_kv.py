"""Clients of a KV group: puts, deletions and reads of a few keys, and a watch that follows all of them.

The history of every key is linearizable (`tests.linearizability`); each acknowledged change has a revision of its own;
a watch that is resumed at any node sees every revision once, in order, with what was put there. Values are functions of
their tags, the larger ones payloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.protocol import kv as kw
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame
from tests.linearizability.cell import solve_cell
from tests.linearizability.history import Operation

from .clients import Client, Frame, Group, Workload

KEYS = 8
CLIENTS = 2
DELETED = 0.05
"""Deletions, of the last key only: a key's history without them is decided at once."""
WATCH_S = 2.0
NEWEST = 3000
"""Operations of a key that are judged together."""
CONFIGURATIONS = 20_000
"""What judging one key may cost: a second or two."""
UNREAD = -1
"""The tag of a value that a member below its floor does not give."""


class KvGroup(Group):
    """`keys`: by key, what was asked and answered. `changes`: by revision, (key, tag or None) as acknowledged; `seen`:
    as watched, up to `next`."""

    machine = "kv"

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__(work, name)
        self.line = 0
        self.watching = False
        self.reset()
        for _ in range(CLIENTS):
            KvClient(work, self)
        self.watcher = Watcher(self)
        work.loop.at(0.0, None, self.watcher.go)

    def reset(self) -> None:
        self.keys: dict[bytes, list[Operation]] = {b"k%d" % number: [] for number in range(KEYS)}
        self.changes: dict[int, tuple[bytes, int | None]] = {}
        self.seen: dict[int, tuple[bytes, int | None]] = {}
        self.newest = 0
        self.next = 0

    def invoke(self, process: int, f: str, key: bytes, tag: int | None = None) -> Operation:
        """An operation begins."""
        self.line += 1
        self.work.operations += 1
        found = Operation(process, f, tag, self.line)
        self.keys[key].append(found)
        return found

    def ended(self, operation: Operation, result: int | None = None) -> None:
        """It was answered."""
        self.line += 1
        operation.result, operation.end = result, self.line

    def changed(self, revision: int, key: bytes, tag: int | None) -> None:
        """A change was acknowledged."""
        work = self.work
        if self.changes.setdefault(revision, (key, tag)) != (key, tag):
            work.fault(f"{self.name}: revision {revision} is {self.changes[revision]} and {(key, tag)}")
        self.newest = max(self.newest, revision)
        work.acknowledged += 1
        seen = self.seen.get(revision)
        if revision < self.next and seen not in ((key, tag), (key, UNREAD)):
            work.fault(f"{self.name}: a watch saw {seen} at {revision}, answered was {(key, tag)}")

    def tag_of(self, value: bytes) -> int:
        """Of a value as a node gives it."""
        tag = int(value[:20].partition(b";")[0])
        if self.work.body(tag) != value:
            self.work.fault(f"{self.name}: a value of {len(value)} bytes is not that of {tag}")
        return tag

    def lacks(self, machine: Any) -> str:
        revision = machine.state.revision
        return f"revision {revision} of {self.newest}" if revision < self.newest else ""

    def pending(self) -> list[str]:
        if self.created and self.next <= self.newest:
            return [f"{self.name}: its watch stands at {self.next}, {self.newest} was answered"]
        return []

    # Reads

    def read(self, number: int, consistency: str) -> None:
        if consistency != "linearizable":
            return
        uid, process = self.uid, -number
        asked = {key: self.invoke(process, "get", key) for key in self.keys}

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                if uid == self.uid:
                    self._answered(asked, *result)
            elif not isinstance(error, LogyardError):
                self.work.cluster.on_bug(f"a read of {self.name} from node {number}", error)

        questions = [msgpack.packb(kw.get_array(kw.Get(key), 0, 0)) for key in asked]
        node = self.work.cluster.node(number)
        self.work.cluster.spawn(number, node.kv.fetch(self.name, questions, consistency), "fetch", done)

    def _answered(self, asked: dict[bytes, Operation], header: dict[str, Any], parts: Sequence[Any]) -> None:
        decoder = kw.Decoder(kw.bodies_of(header["places"], memoryview(b"".join(parts))))
        for (key, operation), answer in zip(asked.items(), header["answers"], strict=False):
            revision, *fields = kw.answer_of(answer)
            found = decoder.result(kw.RANGE, revision, fields).kvs  # type: ignore[union-attr]
            if decoder.missing:
                self.work.fault(f"{self.name}: the answer for {key!r} lacks {decoder.missing}")
            self.ended(operation, self.tag_of(found[0].value) if found else None)

    def judge(self) -> None:
        for key, operations in self.keys.items():
            told = [one for one in operations if one.f != "get" or not one.pending][:NEWEST]
            if len(operations) > len(told):
                # What begins later is not asked about, and what it wrote may have been read.
                told = [one for one in told if one.f != "get" or one.end < told[-1].start]
            verdict = solve_cell(told, CONFIGURATIONS)
            self.work.hits["kv.decided" if verdict.valid is not None else "kv.undecided"] += 1
            if verdict.valid is False:
                self.work.fault(f"{self.name}: the history of {key!r} is not linearizable: {verdict.reason}")


class KvClient(Client):
    """Frames of changes; `what`: their operations, with key and tag."""

    group: KvGroup

    def say(self, burst: int) -> int:
        work, group = self.work, self.group
        before = work.operations
        self.sequence += 1
        what: list[tuple[Operation, bytes, int | None]] = []
        commands: list[bytes] = []
        records: list[tuple[bytes, Any]] = []
        keys = sorted(group.keys)
        for key in work.draw.choices(keys, k=max(1, burst // 2)):
            if key == b"k%d" % (KEYS - 1) and work.draw.random() < DELETED * KEYS:
                command, bodies = kw.encode(kw.Delete(key))
                what.append((group.invoke(self.number, "delete", key), key, None))
            else:
                tag = work.invent(1)
                command, bodies = kw.encode(kw.Put(key, work.body(tag)))
                what.append((group.invoke(self.number, "put", key, tag), key, tag))
            commands.append(command)
            records.append((b"", bodies[0] if bodies else None))
        data = encode_frame(records, commands=commands, session=self.session, sequence=self.sequence)
        self.put(what, b"".join(data))
        for number in work.cluster.up:
            if work.cluster.leads(number, group.name):
                work.read(group, number, "linearizable")
        return work.operations - before

    def answered(self, frame: Frame, data: bytes) -> None:
        unpacker = msgpack.Unpacker()
        unpacker.feed(data)
        answers = list(unpacker)
        group = self.group
        if len(answers) != len(frame.what):
            self.work.fault(f"{group.name}: {len(frame.what)} changes were answered with {answers}")
        for (operation, key, tag), answer in zip(frame.what, answers, strict=True):
            revision, *fields = kw.answer_of(answer)
            group.ended(operation)
            if tag is not None or fields[0]:
                group.changed(revision, key, tag)
        self.work.ask_leaders(group)


class Watcher:
    """Asks one node after the other for the events behind what it has seen."""

    def __init__(self, group: KvGroup) -> None:
        self.group = group
        self.under_way = 0

    def go(self) -> None:
        """Ask, and again later."""
        group, work = self.group, self.group.work
        work.loop.at(work.loop.now + WATCH_S * work.draw.uniform(0.5, 1.5), None, self.go)
        up = work.cluster.up
        if not group.created or not up or work.loop.now < group.quiet_until:
            return
        number = work.draw.choice(up)
        host, uid = work.cluster.hosts[number], group.uid
        if host.life is None or host.life.paused_until > work.loop.now:
            return

        # A member that is behind may still have the group that was deleted under this name.
        known = self._is_at(number)

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                if uid == group.uid and known and self._is_at(number):
                    self.took(*result)
            elif not isinstance(error, LogyardError):
                work.cluster.on_bug(f"a watch of {group.name} at node {number}", error)

        node = work.cluster.node(number)
        # From the first revision on: an empty state has revision 1.
        call = node.kv.events(group.name, kw.FROM_KEY, kw.FROM_KEY, 0, max(group.next, 2), 0.0, "local")
        work.cluster.spawn(number, call, "watch", done)

    def _is_at(self, number: int) -> bool:
        group = self.group
        member = group.work.cluster.replica(number, group.name)
        return member is None or member.uid == group.uid

    def took(self, header: dict[str, Any], parts: Sequence[Any]) -> None:
        """Events, or none."""
        group, fault = self.group, self.group.work.fault
        if header["kind"] != "events":
            fault(f"{group.name}: a watch was told {header}")
        decoder = kw.Decoder(kw.bodies_of(header["places"], memoryview(b"".join(parts))))
        for row in header["revisions"]:
            for changes in decoder.changes(row).values():
                self._saw(changes.revision, changes.events, bool(decoder.missing))
        group.next = max(group.next, header["next"])

    def _saw(self, revision: int, events: Sequence[kw.Event], missing: bool) -> None:
        group, fault = self.group, self.group.work.fault
        if revision < group.next:
            return
        if revision != max(group.next, 2):
            fault(f"{group.name}: a watch at {group.next} went on with {revision}")
        if len(events) != 1:
            fault(f"{group.name}: revision {revision} has {len(events)} events")
        key, kv = events[0].key, events[0].kv
        tag = None if kv is None else UNREAD if missing else group.tag_of(kv.value)
        told = group.changes.get(revision)
        if told is not None and told != (key, tag) and (tag != UNREAD or told[0] != key):
            fault(f"{group.name}: a watch saw {(key, tag)} at revision {revision}, answered was {told}")
        group.seen[revision] = key, tag
        group.next = revision + 1
