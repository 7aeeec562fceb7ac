"""`check` of directories whose machines were used: it applies a group's log as a member does, and judges by that."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from logyard.engine.config import SystemConfig
from logyard.engine.log.meta_rows import STORE
from logyard.engine.machine import Applied, Context, Machine, OwnReject, PayloadRange, PayloadRef, Reject, Sections
from logyard.engine.replica import apply
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.machines.kv import KV
from logyard.machines.kv.command import COMPACT, DELETE, GRANT, KEEP, PUT, REVOKE
from logyard.machines.log.command import APPEND
from logyard.machines.mux import Mux, envelope
from logyard.machines.queue import command as qc
from logyard.payloads import checkpoints
from logyard.pipeline.directory.groups import Replay
from logyard.pipeline.directory.payloads import _Group
from logyard.pipeline.directory.report import DAMAGE, UNKNOWN
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame, produce_command
from logyard.service.check.process import inspect
from logyard.service.check.run import check_directory
from logyard.service.embedded import EmbeddedSystem, open_system
from logyard.service.own_machines import machine_factory
from tests.engine.host.test_uploads import bind, piece
from tests.inside import engine_of, node_of
from tests.sim.bugs import Bug, edited, planted

from .test_run import holding, meta_of

CONFIG = SystemConfig(
    wal_file_bytes=1 << 20, wal_batch_bytes=1 << 18, wal_stock_files=1, generation_bytes=16 << 20,
    generation_transaction_bytes=1 << 20,
)  # fmt: skip
HERE = "tests.service.check.test_machines"
TTL = 600_000
TIMEOUT_S = 60
HISTORIES = 40


class Both(Mux):
    """Two stores in one group."""

    def __init__(self) -> None:
        super().__init__({1: lambda: KV(history=20), 2: KV})


class Picky:
    """Counts commands, and fails at the word "bad"."""

    version = 1

    def __init__(self) -> None:
        self.count = 0

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        if command == b"bad":
            raise ValueError("a bad word")
        self.count += 1
        return Applied(b"%d" % self.count)

    def snapshot(self) -> Sections:
        return {"count": b"%d" % self.count}

    def restore(self, sections: Sections) -> None:
        self.count = int(sections["count"])

    def live_refs(self) -> Iterator[PayloadRange]:
        return iter(())


class Chatty(Picky):
    """Prints, what a check reads among it."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        print("5\n{}\napplied", command)
        return super().apply(context, command, refs)


OWN: dict[str, type[Machine]] = {"both": Both, "picky": Picky, "chatty": Chatty}
PLACES = {name: f"{HERE}:{kind.__name__}" for name, kind in OWN.items()}


class Group:
    """One group of an embedded system, its commands and its sessions."""

    def __init__(self, system: EmbeddedSystem, name: str) -> None:
        self.node = node_of(system)
        self.name = name

    @property
    def member(self) -> Member:
        return self.node.system.member(self.name)

    async def say(self, *records: tuple[bytes, bytes | None], **shape: Any) -> bytes | Reject:
        """The reply to one frame."""
        try:
            return await self.node.commit(self.member, encode_frame(records, **shape))
        except LogyardError as error:
            return OwnReject(error.code, str(error))

    async def tell(self, *command: Any, tag: int = 0) -> bytes | Reject:
        """A KV command without payload."""
        packed = msgpack.packb(command)
        return await self.say((b"", None), command=envelope(tag, packed) if tag else packed)

    async def put(self, key: bytes, value: bytes, tag: int = 0, lease: int = 0) -> bytes | Reject:
        """A KV value that is a payload."""
        named = [0, len(value), hashlib.sha256(value).digest()[:16]]
        packed = msgpack.packb([PUT, key, named, lease, 0])
        return await self.say((b"", value), command=envelope(tag, packed) if tag else packed)

    async def begin(self, session: int) -> None:
        await self.node.open_session(self.name, session, session, TTL)

    async def end(self, session: int) -> None:
        await self.node.close_session(self.name, session)

    async def snapshot(self) -> None:
        await self.node.snapshot([self.name])


@asynccontextmanager
async def running(path: Path, *groups: dict[str, Any]) -> AsyncIterator[tuple[EmbeddedSystem, list[Group]]]:
    """A node in this process with these groups."""
    with trio.fail_after(TIMEOUT_S):
        async with open_system(path, CONFIG, OWN) as system:
            specs = [{"members": [1], "arguments": {}, **one} for one in groups]
            await system.node.create_groups(specs)
            found = [Group(system, str(one["name"])) for one in groups]
            for one in found:
                member = one.member
                await wait(member, lambda member=member: member.raft.leader == 1)  # type: ignore[misc]
                await engine_of(system).replicas.leadership.read_index(member)
            yield system, found


def report_of(path: Path, machines: dict[str, str] | None = None) -> dict[str, Any]:
    return inspect(path, frozenset(), lambda line: None, machine_factory(PLACES if machines is None else machines))


def severities(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(one["severity"], one["kind"], one["message"]) for one in report["findings"]]


def sound(path: Path) -> None:
    """Nothing is damaged, and nothing is left open."""
    found = [one for one in severities(report_of(path)) if one[0] in (DAMAGE, UNKNOWN)]
    assert found == []


async def clients_come_and_go(group: Group, first: int) -> None:
    for session in range(first, first + 10):
        await group.begin(session)
    for session in range(first, first + 10):
        await group.end(session)


KINDS: dict[str, dict[str, Any]] = {
    "log": {"name": "log", "machine": "log"},
    "keyed": {"name": "keyed", "machine": "log", "arguments": {"compact": "key"}},
    "kv": {"name": "kv", "machine": "kv", "arguments": {"history": 20}},
    "queue": {"name": "queue", "machine": "queue", "arguments": {"max_length": 30}},
    "both": {"name": "both", "machine": "both"},
}


@pytest.mark.parametrize("kind", ["kv", "queue", "both"])
def test_clients_that_came_and_went_are_no_damage(tmp_path: Path, kind: str) -> None:
    """Ends of sessions are entries without payload; once their segment is gone nothing tells of them."""

    async def life() -> None:
        async with running(tmp_path / "data", KINDS[kind]) as (system, [group]):
            for number in range(3):
                await step_of(kind, random.Random(number), group, number)
            await system.compact()
            await clients_come_and_go(group, 100)
            await group.snapshot()
            await system.compact()
            for number in range(3):
                await step_of(kind, random.Random(number), group, number)
            await system.compact()
            await group.snapshot()
            await system.compact()

    trio.run(life)
    sound(tmp_path / "data")


def test_a_compaction_that_goes_on_in_a_follow_up_is_no_damage(tmp_path: Path) -> None:
    """What the follow-up released is not missing: whoever applies the log applies it, too."""

    async def life() -> None:
        async with running(tmp_path / "data", {"name": "kv", "machine": "kv"}) as (system, [group]):
            for number in range(30):
                await group.put(b"key", b"%d" % number * 3000)
            await system.compact()
            await group.tell(COMPACT, 28)
            await wait(group.member, lambda: not group.member.kept or not group.member.kept.appends)
            await group.put(b"key", b"last")
            for _ in range(2):
                await system.compact()

    trio.run(life)
    sound(tmp_path / "data")


def test_a_value_that_nobody_can_find_is_damage(tmp_path: Path) -> None:
    """Among the stretches that leave no trace: the state says which of them is a value."""

    async def life() -> None:
        async with running(tmp_path / "data", KINDS["kv"]) as (system, [group]):
            await group.put(b"a", b"first" * 100)
            await system.compact()
            await clients_come_and_go(group, 100)
            await group.put(b"b", b"second" * 100)
            await group.snapshot()
            await system.compact()
            await group.put(b"c", b"third" * 100)
            await system.compact()
            await group.snapshot()
            await system.compact()

    trio.run(life)
    sound(tmp_path / "data")
    meta = meta_of(tmp_path / "data")
    for key, value in list(meta.scan(STORE)):
        uid, homes, marks = checkpoints.decode(key[1:], value)
        meta.commit([(key, checkpoints.encode(uid, homes[1:], marks))])
    meta.close()
    assert any(one[0] == DAMAGE for one in severities(report_of(tmp_path / "data")))


# Machines that are not at hand, and commands that fail


async def used(path: Path, kind: str = "both") -> None:
    async with running(path, KINDS[kind]) as (_, [group]):
        for number in range(8):
            await step_of(kind, random.Random(number), group, number)
        await group.put(b"kept", b"kept value" * 1000, tag=1)
        await group.snapshot()
        for number in range(30):
            # History is short: what is released now, only the machine can tell.
            await group.put(b"x", b"%d" % number * 3000, tag=1)


def test_a_machine_that_is_not_at_hand_is_unknown_and_never_damage(tmp_path: Path) -> None:
    trio.run(used, tmp_path)
    sound(tmp_path)
    found = severities(report_of(tmp_path, {}))
    assert [one for one in found if one[0] == DAMAGE] == []
    (unknown,) = {text for severity, kind, text in found if (severity, kind) == (UNKNOWN, "machine")}
    assert "'both'" in unknown and "--machine" in unknown
    # Nor is what does not verify: it may have died.
    path, at = holding(tmp_path / "wal", "*.wal", b"29" * 500)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"#")
    found = severities(report_of(tmp_path, {}))
    assert not any(one[0] == DAMAGE for one in found) and any(
        "hash" in text for one, _, text in found if one == UNKNOWN
    )
    assert any("hash" in text for one, _, text in severities(report_of(tmp_path)) if one == DAMAGE)


def test_a_machine_that_prints_is_judged_as_any_other(tmp_path: Path) -> None:
    """A check in a process of its own answers on standard output."""

    async def life() -> None:
        async with running(tmp_path, {"name": "chatty", "machine": "chatty"}) as (_, [group]):
            await group.say((b"", None), command=b"one")

    trio.run(life)
    report = check_directory(tmp_path, machines=PLACES)
    assert report["ok"] and not [one for one in report["findings"] if one["severity"] == UNKNOWN]


def test_below_a_snapshot_nothing_needs_to_be_applied(tmp_path: Path) -> None:
    """What lives is in the snapshot: a machine that is not at hand hides no damage then."""

    async def life() -> None:
        async with running(tmp_path, KINDS["both"]) as (_, [group]):
            await group.put(b"kept", b"kept value" * 1000, tag=1)
            await group.snapshot()
        # A batch behind it: the last one of all may be torn.
        async with running(tmp_path, KINDS["both"]):
            pass

    trio.run(life)
    assert severities(report_of(tmp_path, {})) == []
    path, at = holding(tmp_path / "wal", "*.wal", b"kept value" * 100)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"#")
    assert any("hash" in text for one, _, text in severities(report_of(tmp_path, {})) if one == DAMAGE)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_command_that_failed_is_applied_as_its_member_does(tmp_path: Path, skipped: bool) -> None:
    """Without a skip the group stands still there and no byte is damaged; after one, the log goes on without it."""

    async def life() -> None:
        async with running(tmp_path, {"name": "picky", "machine": "picky"}) as (system, [group]):
            member = group.member
            await group.say((b"", b"good"), command=b"good")
            await group.say((b"", b"bad"), command=b"bad")
            assert member.halt is not None
            if skipped:
                await system.node.skip("picky", member.halt.index, member.halt.ordinal)
                assert await group.say((b"", b"good"), command=b"good") == b"2"

    trio.run(life)
    found = severities(report_of(tmp_path))
    assert not any(one[0] == DAMAGE for one in found)
    assert any("a bad word" in text for one, _, text in found if one == UNKNOWN) is not skipped


# Random histories


def value_of(draw: random.Random, number: int) -> bytes:
    return b"<%d %d>" % (number, draw.getrandbits(32)) * draw.choice((1, 20, 600))


async def step_kv(draw: random.Random, group: Group, number: int, tag: int = 0) -> None:
    key = b"key-%d" % draw.randrange(12)
    what = draw.randrange(10)
    if what < 5:
        await group.put(key, value_of(draw, number), tag, draw.choice((0, 0, 1, 2)))
    elif what == 5:
        await group.tell(PUT, key, b"small", 0, 0, tag=tag)
    elif what == 6:
        await group.tell(DELETE, key, draw.choice((b"", b"\0")), 0, tag=tag)
    elif what == 7:
        await group.tell(COMPACT, draw.randrange(1, number + 3), tag=tag)
    elif what == 8:
        await group.tell(GRANT, draw.choice((50, 60_000)), draw.choice((1, 2)), tag=tag)
    else:
        await group.tell(draw.choice((KEEP, REVOKE)), draw.choice((1, 2)), tag=tag)


async def step_both(draw: random.Random, group: Group, number: int) -> None:
    await step_kv(draw, group, number, draw.choice((1, 1, 2, 3)))


async def step_log(draw: random.Random, group: Group, number: int) -> None:
    what = draw.randrange(10)
    records = [(b"h", value_of(draw, number)) for _ in range(draw.randrange(1, 4))]
    if what < 6:
        await group.say(*records, command=APPEND)
    elif what == 6:
        bounds = await group.node.bounds(group.name)
        await group.node.truncate(group.name, draw.randint(bounds["start"], bounds["end"]))
    elif what == 7:
        await group.node.open_producer(group.name, 7)
        await group.say(*records, command=produce_command(7, draw.randrange(1, number + 2)))
    elif what == 8:
        await group.node.retain(group.name, 0, 0, draw.choice((0, 5, 40)))
    else:
        await group.say(*records, command=b"\xff none")


async def step_keyed(draw: random.Random, group: Group, number: int) -> None:
    removed = draw.randrange(4) == 0
    key = b"key-%d" % draw.randrange(6)
    command = (b"\x07" if removed else b"\x06") + key
    await group.say((b"h", None if removed else value_of(draw, number)), commands=[command])


async def step_queue(draw: random.Random, group: Group, number: int) -> None:
    what = draw.randrange(8)
    if what < 5:
        body = value_of(draw, number)
        count = draw.randrange(1, 4)
        ttl, delay = draw.choice(((0, 0), (1, 0), (0, 30), (60_000, 0)))
        command = qc.PUBLISH_COMMAND.pack(qc.PUBLISH, draw.randrange(2), 0, 0, ttl, delay, 0, 0)
        await group.say(*[(b"", body)] * count, command=command + len(body).to_bytes(4, "little"))
    elif what == 5:
        await group.say((b"", None), command=qc.PURGE_COMMAND.pack(qc.PURGE, draw.randrange(1, 8)))
    else:
        await group.say((b"", None), command=qc.CANCEL_HEAD.pack(qc.CANCEL) + qc.ID.pack(draw.randrange(1, number + 2)))


async def consume(draw: random.Random, group: Group, session: int, sequence: int) -> None:
    """A consumer attaches, or settles some of what it holds, in a session of its own."""
    if sequence == 1:
        command = qc.ATTACH_COMMAND.pack(qc.ATTACH, 1, qc.AUTO, 0, 10, 1 << 20, 60_000)
    else:
        what = draw.choice((qc.ACK, qc.ACK, qc.REQUEUE, qc.REJECT))
        first = draw.randrange(1, 20)
        command = qc.SETTLE_HEAD.pack(qc.SETTLE, 1, what) + qc.RANGE.pack(first, first + draw.randrange(5))
    await group.say((b"", None), command=command, session=session, sequence=sequence)


async def upload(draw: random.Random, group: Group, session: int, sequence: int, number: int) -> int:
    """A payload in pieces: bound, given up, or left as it is; the next sequence."""
    system, member = group.node.system, group.member
    parts = [bytes([number % 251]) * 6000 for _ in range(draw.randrange(1, 4))]
    frames = [piece(sequence + at, number, 6000 * at, part, session) for at, part in enumerate(parts)]
    end = draw.choice(("bind", "bind", "give up", "leave"))
    at = sequence + len(frames)
    if end == "bind":
        frames.append(bind(at, number, 6000 * len(parts), b"m", session))
    elif end == "give up":
        frames.append(piece(at, number, 0, None, session))
    for frame in frames:
        await group.node.commit(member, [frame])
    assert system.member(group.name) is member
    return sequence + len(frames)


STEPS: dict[str, Callable[[random.Random, Group, int], Awaitable[None]]] = {
    "kv": step_kv, "both": step_both, "log": step_log, "keyed": step_keyed, "queue": step_queue,
}  # fmt: skip


async def step_of(kind: str, draw: random.Random, group: Group, number: int) -> None:
    await STEPS[kind](draw, group, number)


async def history(path: Path, kind: str, draw: random.Random, packed: bool = False) -> None:
    """Some runs of one node: steps of the machine, sessions that come and go, uploads, snapshots, compaction. `packed`:
    at last everything is moved, and what is dead goes."""
    number, session, sequence = 0, 0, 1
    for _ in range(draw.randrange(1, 4)):
        async with running(path, KINDS[kind]) as (system, [group]):
            for _ in range(draw.randrange(10, 60)):
                number += 1
                what = draw.randrange(20)
                if what < 12:
                    await step_of(kind, draw, group, number)
                elif what == 12:
                    apart = draw.random() < 0.5
                    if apart:
                        await system.compact()
                    await clients_come_and_go(group, 1000 + 20 * number)
                    if apart:
                        await group.snapshot()
                        await system.compact()
                elif what == 13:
                    await group.snapshot()
                elif what == 14:
                    await system.compact()
                elif what < 17 and session:
                    if kind == "queue":
                        await consume(draw, group, session, sequence)
                        sequence += 1
                    elif kind == "log":
                        sequence = await upload(draw, group, session, sequence, number)
                elif session and what == 17:
                    await group.end(session)
                    session = 0
                elif not session:
                    session, sequence = number, 1
                    await group.begin(session)
            if packed:
                await system.compact()
                await group.snapshot()
                await system.compact()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_are_sound(tmp_path: Path, kind: str, seed: int) -> None:
    trio.run(history, tmp_path / "data", kind, random.Random(f"{kind} {seed}"))
    sound(tmp_path / "data")


async def keep_one(kind: str, group: Group) -> bytes:
    """Something that lives to the end, in a stretch of history behind which more follows."""
    body = b"<to be kept>" * 500
    if kind in ("kv", "both"):
        await group.put(b"kept", body, tag=1 if kind == "both" else 0)
    elif kind == "keyed":
        await group.say((b"h", body), commands=[b"\x06kept"])
    elif kind == "queue":
        command = qc.PUBLISH_COMMAND.pack(qc.PUBLISH, 1, 0, 0, 0, 3_600_000, 0, 0)
        await group.say((b"", body), command=command + len(body).to_bytes(4, "little"))
    else:
        await group.say((b"h", body), command=APPEND)
    return body


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_history_a_bad_byte_of_what_lives_is_damage(tmp_path: Path, kind: str, moved: bool) -> None:
    draw, bodies = random.Random(f"{kind} {moved}"), []
    trio.run(history, tmp_path, kind, draw)

    async def end() -> None:
        async with running(tmp_path, KINDS[kind]) as (system, [group]):
            bodies.append(await keep_one(kind, group))
            await clients_come_and_go(group, 100_000)
            if moved:
                await group.snapshot()
                await system.compact()
        async with running(tmp_path, KINDS[kind]):
            pass

    trio.run(end)
    sound(tmp_path)
    folder, pattern = (tmp_path / "payloads", "gen-*/data.mdb") if moved else (tmp_path / "wal", "*.wal")
    path, at = holding(folder, pattern, bodies[0][:2000])
    with open(path, "r+b") as file:
        file.seek(at + 1000)
        file.write(b"#")
    found = severities(report_of(tmp_path))
    assert any(one == DAMAGE and kind == "payload" for one, kind, _ in found), found
    path.unlink()
    assert any(one == DAMAGE for one, _, _ in severities(report_of(tmp_path)))


PLANTED = {
    "follow_ups": (
        "both",
        Bug("follow_ups", "", [(Replay, "_effects", edited(("isinstance(effect, REPLICATED)", "False")))]),
    ),
    "own_commands": (
        "kv",
        Bug("own_commands", "", [(apply, "_on_system", lambda old: lambda *arguments: b"")]),
    ),
    "no_trace": (
        "kv",
        Bug(
            "no_trace",
            "",
            [
                (_Group, "holes", edited(("group.replay.spans() if group.replay is not None else ", ""))),
                (_Group, "_hole", edited(("elif log:", "elif True:"))),
            ],
        ),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_check_that_applies_less_than_a_member_is_found(tmp_path: Path, name: str) -> None:
    """The mended bugs, planted again: histories have what it takes to see them."""
    kind, bug = PLANTED[name]
    for seed in range(HISTORIES):
        path = tmp_path / str(seed)
        trio.run(history, path, kind, random.Random(f"planted {kind} {seed}"), name == "no_trace")
        with planted(bug):
            found = severities(report_of(path))
        if any(one in (DAMAGE, UNKNOWN) for one, _, _ in found):
            sound(path)
            return
    raise AssertionError(f"{HISTORIES} histories, and no false alarm")


def test_what_was_skipped_stays_out_in_a_repaired_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def life() -> None:
        async with running(tmp_path, {"name": "picky", "machine": "picky"}) as (system, [group]):
            await group.say((b"", b"good"), command=b"good")
            await group.say((b"", b"bad"), command=b"bad")
            halt = group.member.halt
            assert halt is not None
            await system.node.skip("picky", halt.index, halt.ordinal)
            assert await group.say((b"", b"good"), command=b"good") == b"2"

    trio.run(life)

    def apply(self: Picky, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        self.count += 1
        return Applied(b"%d" % self.count)

    monkeypatch.setattr(Picky, "apply", apply)
    assert not [one for one in severities(report_of(tmp_path)) if one[0] in (DAMAGE, UNKNOWN)]
