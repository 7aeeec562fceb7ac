"""The table of sessions and the rule by which frames reach the machine, alone: each is applied once, with one reply."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from logyard.engine.entry import Frame, encode_system
from logyard.engine.machine import RESERVED_CODES, Batch, Context, Position, Reject, Release
from logyard.engine.replica.sessions import (
    REPLY_BYTES,
    WINDOW,
    ApplyBatch,
    Sessions,
    apply_guarded,
    apply_next,
    run_batch,
)
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND
from logyard.protocol.frame import UNIFORM

CLIENT = 77
SESSION = 4242
TTL = 60_000


def shown(context: Context, frames: list[Frame]) -> Batch:
    return Batch([f.commands for f in frames])


def plain(session: int, sequence: int, first: int, command: bytes = b"x", records: int = 1) -> Frame:
    return Frame(UNIFORM, 0, records, len(command), 0, 0, session, sequence, command, first)


def own(first: int, name: str, *arguments: object) -> Frame:
    packed = encode_system(name, *arguments)
    return Frame(UNIFORM | 2, 0, 1, 0, 0, 0, 0, 0, bytes(packed[40:]), first)


def entry_of(sessions: Sessions | None, index: int, *frames: Frame) -> tuple[Sessions | None, Batch, list[Frame]]:
    seen: list[Frame] = []

    def run(context: Context, some: list[Frame]) -> Batch:
        seen.extend(some)
        return shown(context, some)

    context = Context(1, index, 1, 0, 1, sum(one.records for one in frames))
    after, batch, _ = apply_guarded(sessions, context, frames, run, lambda _, command: repr(command).encode())
    return after, batch, seen


def table() -> Sessions:
    found, _, _ = entry_of(None, 1, own(0, "register", SESSION, CLIENT, TTL))
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_short_way_of_a_usual_entry_comes_to_what_the_rule_comes_to(seed: int) -> None:
    draw = random.Random(seed)

    def machine(context: Context, frames: Sequence[Frame]) -> Batch:
        replies = [Reject("no", "it refuses") if one.commands == b"no" else one.commands for one in frames]
        return Batch(replies, [])

    short, general, taken = table(), table(), 0
    for index in range(2, 400):
        sequence = draw.choice((general.by_id[SESSION].highest + draw.randint(-2, 70), draw.randint(-3, 300)))
        one = plain(draw.choice((SESSION, SESSION, SESSION, 5, 0)), sequence, 0, draw.choice((b"yes", b"no")))
        context = Context(1, index, 1, 0, 1, 1)
        before = short.encode()
        quick = apply_next(short, context, [one], machine)
        if quick is None:
            assert short.encode() == before, "nothing was changed"
            quick = guarded(short, context, one, machine)
        else:
            taken += 1
        slow = guarded(general, context, one, machine)
        assert str(quick.replies) == str(slow.replies) and list(quick.effects) == list(slow.effects)
        assert short.encode() == general.encode() and short.bytes == general.bytes
    assert taken > 50


def guarded(sessions: Sessions, context: Context, one: Frame, machine: ApplyBatch) -> Batch:
    def run(context: Context, shown: list[Frame]) -> Batch:
        return run_batch(machine, context, shown)

    return apply_guarded(sessions, context, [one], run, lambda _, command: b"").batch


def code(reply: bytes | Reject) -> str:
    assert isinstance(reply, Reject)
    return reply.code


def test_a_duplicate_gets_the_first_reply_and_its_payload_is_released() -> None:
    sessions, batch, seen = entry_of(table(), 5, plain(SESSION, 1, 0, b"one"), plain(SESSION, 1, 1, b"again", 3))
    assert batch.replies == [b"one", b"one"] and len(seen) == 1
    assert list(batch.effects) == [Release(Position(5, 1), Position(5, 4))]
    _, batch, seen = entry_of(sessions, 6, plain(SESSION, 1, 0, b"later"), plain(0, 0, 1, b"free"))
    assert batch.replies == [b"one", b"free"] and [one.first for one in seen] == [1]
    assert list(batch.effects) == [Release(Position(6, 0), Position(6, 1))]
    _, batch, _ = entry_of(sessions, 7, plain(SESSION, 1, 0, b"alone", 2))
    assert list(batch.effects) == [Release(Position(7, 0), Position(8, 0))], "the whole entry is dead"


def test_the_edges_of_the_window() -> None:
    sessions: Sessions | None = table()
    for sequence in (0, WINDOW + 1):
        _, batch, seen = entry_of(sessions, 2, plain(SESSION, sequence, 0))
        assert code(batch.replies[0]) in ("sequence_out_of_window", "stale_sequence") and not seen
    sessions, batch, seen = entry_of(sessions, 3, plain(SESSION, WINDOW, 0, b"64"), plain(SESSION, 1, 1, b"1"))
    assert batch.replies == [b"64", b"1"] and len(seen) == 2, "the window's first one may come last"
    sessions, batch, _ = entry_of(sessions, 4, plain(SESSION, 1, 0), plain(SESSION, 2 * WINDOW, 1, b"far"))
    assert batch.replies == [b"1", b"far"]
    sessions, batch, seen = entry_of(sessions, 5, plain(SESSION, WINDOW, 0), plain(SESSION, WINDOW + 1, 1, b"65"))
    assert code(batch.replies[0]) == "stale_sequence" and batch.replies[1] == b"65", "64 is as far back as it goes"
    assert sessions is not None and sorted(sessions.by_id[SESSION].replies) == [WINDOW + 1, 2 * WINDOW]
    assert sessions.bytes == 5


def test_more_frames_of_one_entry_than_the_window_holds() -> None:
    frames = [plain(SESSION, number, number - 1, b"%d" % number) for number in range(1, 3 * WINDOW)]
    sessions, batch, seen = entry_of(table(), 2, *frames)
    assert len(seen) == len(frames) and batch.replies[-1] == b"%d" % (3 * WINDOW - 1)
    assert sessions is not None and len(sessions.by_id[SESSION].replies) == WINDOW
    assert sessions.bytes == sum(len(b"%d" % number) for number in range(2 * WINDOW, 3 * WINDOW))


def test_sessions_begin_once_and_end_for_good() -> None:
    sessions = table()
    _, batch, _ = entry_of(sessions, 2, own(0, "register", SESSION, CLIENT, TTL), own(1, "register", SESSION, 1, TTL))
    assert batch.replies[0] == b"" and code(batch.replies[1]) == "refused"
    _, batch, seen = entry_of(sessions, 3, plain(99, 1, 0))
    assert code(batch.replies[0]) == "session_expired" and not seen
    # The engine's own commands go first, wherever they stand in the entry.
    after, batch, seen = entry_of(sessions, 4, plain(SESSION, 1, 0), own(1, "expire", SESSION, 5), own(2, "timer", 3))
    assert code(batch.replies[0]) == "session_expired" and list(batch.replies[1:]) == [b"", b"['timer', 3]"]
    assert after is None and not seen, "a group without sessions has no table"


def test_a_machines_refusal_is_kept_and_a_long_reply_is_not() -> None:
    sessions = table()
    context = Context(1, 2, 1, 0, 1, 2)
    replies: list[bytes | Reject] = [Reject("full", "no"), b"r" * (REPLY_BYTES + 1)]
    frames = [plain(SESSION, 1, 0), plain(SESSION, 2, 1)]
    apply_guarded(sessions, context, frames, lambda *_: Batch(replies), lambda *_: b"")
    copy = Sessions.decode(sessions.encode())
    for found in (sessions, copy):
        _, batch, _ = entry_of(found, 3, *frames)
        assert [code(reply) for reply in batch.replies] == ["full", "reply_not_kept"]
    assert copy.encode() == sessions.encode() and copy.bytes == sessions.bytes


def test_what_a_batch_machine_refuses_is_released() -> None:
    log = AppendLog()
    context = Context(1, 3, 1, 0, 1, 3)
    batch = run_batch(log.apply_batch, context, [plain(0, 0, 0, APPEND, 2), plain(0, 0, 2, b"nonsense")])
    assert list(batch.effects) == [Release(Position(3, 2), Position(3, 3))]
    assert [tuple(one) for one in log.live_refs()] == [((0, 0), (3, 2)), ((3, 3), (4, 0))]


# A cluster


@pytest.mark.parametrize("session", [0, SESSION])
def test_a_batch_machines_reply_that_is_no_bytes_is_its_fault(session: int) -> None:
    def text(context: Context, frames: Sequence[Frame]) -> Batch:
        return Batch(["text"] * len(frames))  # type: ignore[list-item]

    context = Context(1, 2, 1, 0, 1, 1)
    with pytest.raises(TypeError, match="a str, not bytes"):
        if session:
            apply_next(table(), context, [plain(session, 1, 0)], text)
        else:
            run_batch(text, context, [plain(session, 1, 0)])


@pytest.mark.parametrize("code", sorted(RESERVED_CODES))
def test_a_machine_has_none_of_the_engines_own_codes(code: str) -> None:
    """A client would take it for the engine's, and send the command again and again."""
    with pytest.raises(ValueError, match="the engine's own"):
        Reject(code, "by a machine")
