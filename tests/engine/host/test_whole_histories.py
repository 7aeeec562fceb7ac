"""Random histories of everything at once: sessions, uploads, timers, follow-ups, faulty commands with skips, sleeping
groups, snapshots, truncations, migrations, crashes and partitions; checked against a model of each promise.

Every acknowledged frame of a session is in the log exactly once, every timer and follow-up happened exactly once, all
members hold equal states and live sets, and the books of payload bytes equal a count from scratch.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.machine import Append, Applied, Batch, Context, Effect, Frame, Monitor, Reject, Sections, Timer
from logyard.engine.raft.core import LEADER
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply
from logyard.service.check.run import check_directory

from .cluster import KIB, Cluster, cluster, until
from .test_histories import History, check_books
from .test_uploads import bind, cut, piece

STEPS = 60
TTL = 60_000
WINDOW = 20


class Busybody(AppendLog):
    """An append log that also sets timers, asks for follow-ups, monitors sessions, and fails when it is told to."""

    __slots__ = ("notes", "now")

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.now = 0

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        self.now = context.timestamp
        return super().apply_batch(context, frames)

    def _other(
        self, context: Context, frame: Frame, frames: Sequence[Frame], effects: list[Effect]
    ) -> bytes | Reject | None:
        verb, _, rest = frame.commands.partition(b" ")
        text = rest.decode()
        if verb == b"boom":
            self.notes.append(f"boom {text}")
            raise ZeroDivisionError(text)
        if verb == b"timer":
            effects.append(Timer(text, self.now + 1 + sum(rest) % 200))
        elif verb == b"follow":
            effects += [Append(b"note " + rest + b"/%d" % number) for number in range(2)]
        elif verb == b"monitor":
            effects.append(Monitor(int(text)))
        elif verb == b"note":
            self.notes.append(f"note {text}")
        else:
            return super()._other(context, frame, frames, effects)
        return b"done"

    def on_timer(self, context: Context, name: str) -> Applied:
        self.notes.append(f"rang {name}")
        return Applied(b"", [Append(b"note after " + name.encode())])

    def on_session_end(self, context: Context, session: int) -> Applied:
        self.notes.append(f"ended {session}")
        return Applied(b"")

    def snapshot(self) -> Sections:
        return {**super().snapshot(), "notes": "\n".join(self.notes).encode()}

    def restore(self, sections: Sections) -> None:
        super().restore(sections)
        self.notes = sections["notes"].decode().split("\n") if sections["notes"] else []


def machines(name: str, arguments: dict[str, Any]) -> Any:
    return Busybody()


class Client:
    """One session at a time; `pending`: what was sent and not answered, by sequence."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.session = 0
        self.sequence = 0
        self.uploads = 0
        self.pending: dict[int, tuple[memoryview, str, bytes]] = {}
        # An upload's pieces not yet sent, and its whole body.
        self.open: list[tuple[int, int, bytes, bytes]] = []

    def add(self, make: Any, kind: str, body: bytes) -> None:
        self.sequence += 1
        self.pending[self.sequence] = (make(self.sequence), kind, body)

    @property
    def room(self) -> bool:
        return len(self.pending) == 0 or self.sequence - min(self.pending) < WINDOW


class Whole(History):
    """The model: what must be there once, what may be there once."""

    def __init__(self, c: Cluster, draw: random.Random, faults: bool) -> None:
        super().__init__(c, draw)
        self.faults = faults
        self.settled = False
        self.clients = [Client(number) for number in range(1, 4)]
        self.sessions = 0
        self.tags = 0
        self.once: set[bytes] = set()
        self.notes: set[str] = set()

    def verbs(self) -> list[str]:
        found = ["talk"] * 14 + ["upload"] * 3 + ["append", "truncate", "truncate", "snapshot", "compact", "roll"]
        found += ["crash", "crash", "start", "start", "start", "part", "heal", "heal", "transfer", "end", "read"]
        if self.c.config.hibernate_after_ms:
            found += ["rest"] * 4
        return found + (["blow"] + ["mend"] * 4 if self.faults else [])

    async def step(self) -> None:
        verb = self.draw.choice(self.verbs())
        try:
            with trio.move_on_after(2):
                await getattr(self, verb)()
        except LogyardError as error:
            assert error.code not in ("corrupt", "error", "bad_request"), (verb, error)

    async def send(self, number: int, frame: memoryview) -> bytes:
        answer: PendingReply[bytes] = PendingReply()
        self.c.system(number).replicas.commands.submit(self.c.member(number).uid, frame, answer, 1)
        return await answer.wait(trio.Event)

    # What clients do

    async def talk(self) -> None:
        client = self.draw.choice(self.clients)
        number = self.believed_leader()
        if not client.session:
            self.sessions += 1
            with trio.fail_after(5):
                await self.c.nodes[number].open_session("log", 1000 + self.sessions, client.number, TTL)
            client.session, client.sequence = 1000 + self.sessions, 0
        for _ in range(self.draw.randint(1, 4)):
            if client.room:
                self.invent(client)
        await self.push(client, number)

    def invent(self, client: Client) -> None:
        session = client.session
        if client.open:
            upload, at, part, whole = client.open.pop(0)
            if part:
                client.add(lambda sequence: piece(sequence, upload, at, part, session), "piece", b"")
            else:
                self.started.add(whole)
                client.add(lambda sequence: bind(sequence, upload, len(whole), session=session), "bind", whole)
            return
        self.tags += 1
        what = self.draw.random()
        verb = "append" if what < 0.6 else "timer" if what < 0.75 else "follow" if what < 0.9 else "monitor"
        if verb == "append":
            body = b"s%d;" % self.tags * self.draw.choice((1, 5, 600, 3 * KIB))
            self.started.add(body)
            client.add(lambda sequence: frame_of(session, sequence, APPEND, body), "append", body)
            return
        text = b"%d" % (session if verb == "monitor" else self.tags)
        command = verb.encode() + b" " + text
        client.add(lambda sequence: frame_of(session, sequence, command, b"x"), verb, text)

    async def upload(self) -> None:
        client = self.draw.choice(self.clients)
        if not client.open:
            self.tags += 1
            client.uploads += 1
            body = (b"u%d;" % self.tags * 20 * KIB)[: self.draw.choice((30, 9000, 40_000))]
            parts = [(client.uploads, at, part, b"") for at, part in cut(body, self.draw.choice((8000, 20_000)))]
            client.open = [*parts, (client.uploads, 0, b"", body)]
            if self.draw.random() < 0.3:
                # Never bound.
                client.open.pop()

    async def push(self, client: Client, number: int, patience: float = 0.3) -> None:
        """Send what is pending, some of it twice, in a random order."""
        session = client.session

        async def one(sequence: int) -> None:
            frame, kind, body = client.pending[sequence]
            try:
                with trio.move_on_after(patience):
                    reply = await self.send(number, frame)
                    if client.pending.pop(sequence, None) is not None:
                        self.done(client, kind, body, reply)
            except LogyardError as error:
                if error.code in ("session_expired", "unknown_upload", "incomplete_upload"):
                    assert error.code == "session_expired", (error.code, kind, sequence)
                    if client.session == session:
                        # What is pending was applied, or never will be.
                        client.session, client.pending, client.open = 0, {}, []
                else:
                    assert error.code in ("not_leader", "unknown", "busy", "group_stopped"), (error, kind, sequence)

        async with trio.open_nursery() as nursery:
            sequences = sorted(client.pending)
            uploads = [one for one in sequences if client.pending[one][1] == "bind"]
            for sequence in sequences:
                # An upload is bound when its pieces are acknowledged, as clients do.
                if any(sequence > least for least in uploads[:1] if client.pending[least][1] != "bind"):
                    continue
                if client.pending[sequence][1] == "bind" and any(
                    kind == "piece" for at, (_, kind, _) in client.pending.items() if at < sequence
                ):
                    continue
                for _ in range(self.draw.choice((1, 1, 2))):
                    nursery.start_soon(one, sequence)

    def done(self, client: Client, kind: str, body: bytes, reply: bytes) -> None:
        if kind in ("append", "bind"):
            offset, count = APPEND_REPLY.unpack(reply)
            assert count == 1 and self.acknowledged.setdefault(offset, body) == body, "one offset, one record"
            assert body not in self.once, "applied twice"
            self.once.add(body)
        elif kind == "timer":
            self.notes |= {f"rang {body.decode()}", f"note after {body.decode()}"}
        elif kind == "follow":
            self.notes |= {f"note {body.decode()}/{number}" for number in range(2)}

    async def end(self) -> None:
        client = self.draw.choice(self.clients)
        if client.session:
            await self.c.nodes[self.believed_leader()].close_session("log", client.session)

    # Faults of the machine

    async def blow(self) -> None:
        frame = frame_of(0, 0, b"boom %d" % self.tags, b"x" * self.draw.choice((1, 5000)))
        with trio.move_on_after(0.2):
            await self.send(self.believed_leader(), frame)

    async def mend(self) -> None:
        for number in self.c.nodes:
            member = self.c.replica(number)
            if member is not None and member.halt is not None and member.raft.role == LEADER:
                with trio.move_on_after(0.5):
                    await self.c.nodes[number].skip("log", member.halt.index, member.halt.ordinal)
                return

    async def settle(self) -> None:
        """All nodes run, all faults are skipped, everything pending is answered."""
        self.c.network.heal()
        for number in self.c.ids:
            if number not in self.c.nodes:
                await self.c.start(number)
        for _ in range(300):
            try:
                await self.mend()
                with trio.fail_after(5):
                    leader = await self.c.leader()
                for client in self.clients:
                    if client.session and client.pending:
                        await self.push(client, leader, 1.0)
                if not any(client.session and client.pending for client in self.clients):
                    break
            except (LogyardError, trio.TooSlowError):
                pass
            await trio.sleep(0.01)
        left = [client.pending for client in self.clients if client.session]
        assert not any(left), left
        await super().settle()
        self.settled = True

    async def read(self) -> None:
        try:
            await super().read()
        except AssertionError as error:
            if "group_stopped" not in str(error):
                raise


def frame_of(session: int, sequence: int, command: bytes, body: bytes) -> memoryview:
    return memoryview(b"".join(encode_frame([(b"", body)], command=command, session=session, sequence=sequence)))


def state_of(c: Cluster, number: int) -> list[Any]:
    """Everything replicated."""
    member = c.member(number)
    uploads = member.uploads
    return [
        sorted(member.machine.snapshot().items()),
        member.sessions and member.sessions.encode(),
        sorted(member.kept.sections().items()) if member.kept is not None else [],
        sorted((key, sorted(one.pieces.items())) for key, one in uploads.open.items()) if uploads is not None else [],
        member.liveness.encode_live_set(member.raft.applied),
        member.version,
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(int(os.environ.get("LOGYARD_SEEDS", "4"))))
async def test_a_whole_history_adds_up(tmp_path: Path, seed: int) -> None:
    seed += int(os.environ.get("LOGYARD_SEED_BASE", "0"))
    draw = random.Random(seed)
    limits: dict[str, Any] = {
        "payload_cache_bytes": draw.choice((0, 0, 20 * KIB, 1 << 20)),
        "snapshot_piece_bytes": 64 * KIB,
        "hibernate_after_ms": 5 * (seed % 2),
        "hibernate_move_bytes": draw.choice((0, 20 * KIB, 1 << 20)),
        "snapshot_entries": draw.choice((20, 1 << 30)),
    }
    async with cluster(tmp_path, machines=machines, **limits) as c:
        history = Whole(c, draw, seed % 4 >= 2)
        for _ in range(STEPS):
            await history.step()
        with trio.move_on_after(45):
            await history.settle()
        assert history.settled, [(client.session, client.pending) for client in history.clients]
        due = {note for note in history.notes if note.startswith(("rang", "note after"))}

        def rang() -> bool:
            return all(due <= set(c.log(number).notes) for number in c.ids)

        await until(rang, lambda: f"timers ring: {due - set(c.log(1).notes)}")
        await c.applied()
        states = [state_of(c, number) for number in c.ids]
        assert states[0] == states[1] == states[2]
        notes = Counter(c.log(1).notes)
        assert history.notes <= notes.keys() and set(notes.values()) <= {1}, "each follow-up and timer, once"
        start, reads = c.log(1).start, []
        for number in c.ids:
            c.member(number).raft.check()
            assert c.member(number).state == "running", c.member(number).reason
            assert not c.system(number).transfers.snapshots.mismatches
            reads.append([body for _, body in await c.read(number, start)])
        assert reads[0] == reads[1] == reads[2]
        history.started.add(b"last")
        history.check(start, reads[0])
        there = set(reads[0])
        gone = [offset for offset, body in history.acknowledged.items() if offset >= start and body not in there]
        assert not gone, "acknowledged and gone"
        for number in c.ids:
            await check_books(c, number, reads[0])
        await c.close()
        for number in c.ids:
            report = await trio.to_thread.run_sync(check_directory, tmp_path / f"node-{number}")
            assert report["ok"], report
