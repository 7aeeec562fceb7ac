"""The append log as a machine: replies, anchors, truncation, refusals, snapshots; one entry at a time or one
command."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.machine import Context, Frame, PayloadRange, PayloadRef, Position, Reject, Release
from logyard.machines.log.command import APPEND, APPEND_REPLY, TRUNCATE_REPLY, truncate_command
from logyard.machines.log.machine import ANCHOR_BYTES, ANCHOR_ENTRIES, AppendLog
from logyard.machines.log.slices import Slice, slices
from logyard.machines.registry import create_machine
from logyard.protocol.errors import BadRequest, OutOfRange
from logyard.protocol.frame import UNIFORM, append_command


def append(records: int, size: int = 10) -> Frame:
    return Frame(UNIFORM, 0, records, 1, size, 0, 0, 0, APPEND)


def truncate(offset: int, index: int, ordinal: int = 0) -> Frame:
    command = truncate_command(offset, Position(index, ordinal))
    return Frame(UNIFORM, 0, 1, len(command), 8, 0, 0, 0, command)


def context(index: int) -> Context:
    return Context(1, index, 1, 0, 1)


def applied(log: AppendLog, index: int, *frames: Frame) -> tuple[list[object], list[object]]:
    batch = log.apply_batch(context(index), frames)
    return list(batch.replies), list(batch.effects)


def test_offsets_are_dense_over_frames_and_entries() -> None:
    log = AppendLog()
    replies, effects = applied(log, 3, append(2), append(5), append(1))
    assert [APPEND_REPLY.unpack(reply) for reply in replies] == [(0, 2), (2, 5), (7, 1)]  # type: ignore[arg-type]
    replies, _ = applied(log, 9, append(4))
    assert replies == [APPEND_REPLY.pack(8, 4)] and (log.start, log.end) == (0, 12) and not effects


def test_a_truncation_releases_what_lies_before_it_once() -> None:
    log = AppendLog()
    applied(log, 3, append(10))
    replies, effects = applied(log, 4, truncate(6, 3, 6))
    assert replies == [TRUNCATE_REPLY.pack(6)] and effects == [Release(Position(0, 0), Position(3, 6))]
    assert applied(log, 5, truncate(6, 3, 6)) == ([TRUNCATE_REPLY.pack(6)], [])
    assert applied(log, 6, truncate(2, 3, 2)) == ([TRUNCATE_REPLY.pack(6)], [])
    replies, effects = applied(log, 7, truncate(10, 7))
    assert effects == [Release(Position(3, 6), Position(7, 0))] and (log.start, log.end) == (10, 10)
    assert applied(log, 8, truncate(10, 9)) == ([TRUNCATE_REPLY.pack(10)], [])
    assert applied(log, 9, append(1))[0] == [APPEND_REPLY.pack(10, 1)]
    assert log.anchor(10) == (10, Position(7, 0))


def test_refusals_change_nothing() -> None:
    log = AppendLog()
    applied(log, 3, append(4))
    applied(log, 4, truncate(2, 3, 2))
    before = log.snapshot()
    bad = [
        truncate(5, 3, 5),
        truncate(3, 3, 1),
        Frame(UNIFORM, 0, 1, 3, 8, 0, 0, 0, b"odd"),
        Frame(UNIFORM, 0, 1, 0, 8, 0, 0, 0, b""),
        Frame(0, 0, 1, 5, 8, 0, 0, 0, b"\x01\0\0\0\x01"),
        Frame(UNIFORM, 0, 1, 22, 8, 0, 0, 0, truncate_command(3, Position(3, 3)) + b"x"),
    ]
    for frame in bad:
        replies, effects = applied(log, 4, frame)
        assert isinstance(replies[0], Reject) and not effects
    assert [reply.code for reply in (applied(log, 4, one)[0][0] for one in bad[:2])] == ["out_of_range", "bad_request"]  # type: ignore[attr-defined]
    # What was refused is no part of the log, and its payload is nobody's.
    assert {index for index, _, _ in log.holes} == {4}
    log.holes.clear()
    assert log.snapshot() == before


def test_frames_that_were_not_shown_have_no_offsets() -> None:
    log = AppendLog()
    frames = [append(2), append(3), append(1)]
    firsts = [0, 2, 5]
    shown = [frames[0]._replace(first=0), frames[2]._replace(first=5)]
    entry = Context(1, 3, 1, 0, 1, 6, skipped=((2, 3),))
    assert list(log.apply_batch(entry, shown).replies) == [APPEND_REPLY.pack(0, 2), APPEND_REPLY.pack(2, 1)]
    log.apply_batch(Context(1, 4, 1, 0, 1, 3, skipped=((0, 3),)), [])
    log.apply_batch(Context(1, 5, 1, 0, 1, 1), [append(1)])
    copy = AppendLog()
    copy.restore(log.snapshot())
    for one in (log, copy):
        assert one.holes == [(3, 2, 3), (4, 0, 0)] and set(one.holes_of(3)) == {2} and not one.holes_of(5)
        found, offset = slices(
            [a._replace(first=b) for a, b in zip(frames, firsts, strict=True)], 0, 0, one.holes_of(3)
        )
        assert found == [Slice(0, 0, 0, 0, 2), Slice(2, 2, 5, 0, 1)] and offset == 3
        assert [tuple(live) for live in one.live_refs()] == [((0, 0), (3, 2)), ((3, 5), (4, 0)), ((5, 0), (6, 0))]
    applied(log, 6, truncate(3, 5, 0))
    assert log.holes == []
    old = msgpack.unpackb(copy.snapshot()["log"])[:-2]
    copy.restore({"log": msgpack.packb(old)})
    assert copy.holes == [], "a snapshot of the first release has none"


def test_a_refusal_in_a_batch_leaves_the_other_frames_alone() -> None:
    log = AppendLog()
    replies, _ = applied(log, 3, append(2), truncate(99, 3), append(3))
    assert (
        replies[0] == APPEND_REPLY.pack(0, 2)
        and isinstance(replies[1], Reject)
        and replies[2] == APPEND_REPLY.pack(2, 3)
    )


def test_anchors_are_sparse_and_stand_before_their_entry() -> None:
    log = AppendLog()
    for index in range(1, 3 * ANCHOR_ENTRIES + 1):
        applied(log, index, append(2))
    assert log.anchors == [(2 * at * ANCHOR_ENTRIES, at * ANCHOR_ENTRIES + 1) for at in range(3)]
    heavy = AppendLog()
    for index in range(1, 9):
        applied(heavy, index, append(1, ANCHOR_BYTES))
    assert heavy.anchors == [(index - 1, index) for index in range(1, 9)]
    assert heavy.anchor(5) == (5, Position(6, 0)) and log.anchor(2 * ANCHOR_ENTRIES + 1) == (2048, Position(1025, 0))


def test_anchors_below_the_start_are_no_place_to_count_from() -> None:
    log = AppendLog()
    for index in range(1, 9):
        applied(log, index, append(2, ANCHOR_BYTES))
    applied(log, 9, truncate(5, 3, 1))
    assert log.anchor(5) == (5, Position(3, 1)) and log.anchor(6) == (6, Position(4, 0))
    assert log.anchors[0][0] <= 5 and len(log.anchors) == 6
    for offset in (4, 16, -1):
        with pytest.raises(OutOfRange) as caught:
            log.anchor(offset)
        assert caught.value.details == {"start": 5, "end": 16}
    with pytest.raises(OutOfRange):
        AppendLog().anchor(0)


def test_live_refs_are_everything_from_the_start_on() -> None:
    log = AppendLog()
    applied(log, 3, append(4))
    applied(log, 4, truncate(2, 3, 2))
    assert list(log.live_refs()) == [PayloadRange(Position(3, 2), Position(5, 0))]


steps = st.lists(st.one_of(st.integers(1, 5).map(lambda n: ("append", n)), st.just(("truncate", 0))), max_size=40)


@given(steps, st.integers(0, 39))
def test_a_restored_log_goes_on_as_if_nothing_had_happened(history: list[tuple[str, int]], cut: int) -> None:
    log, other = AppendLog(), AppendLog()
    places: list[Position] = []
    for index, (verb, count) in enumerate(history, 1):
        if verb == "append":
            frame = append(count, ANCHOR_BYTES // 3)
            places += [Position(index, at) for at in range(count)]
        else:
            offset = (log.start + log.end + 1) // 2
            position = places[offset] if offset < log.end else Position(index, 0)
            frame = truncate(offset, *position)
        first = log.apply_batch(context(index), (frame,))
        if index > cut:
            assert first == other.apply_batch(context(index), (frame,))
        if index == cut:
            other.restore(log.snapshot())
        elif index < cut:
            other.apply_batch(context(index), (frame,))
        for offset in range(log.start, log.end):
            at, position = log.anchor(offset)
            assert log.start <= at <= offset and position <= places[offset]
            assert (
                position == (log.start_position if at == log.start else (places[at].index, 0)) or places[at] == position
            )
    assert log.snapshot() == other.snapshot() and list(log.live_refs()) == list(other.live_refs())


def test_one_command_at_a_time_gives_the_same_state() -> None:
    batched, single = AppendLog(), AppendLog()
    ref = PayloadRef(1, 1, 0, 1, 0, b"")
    for index, command in enumerate((APPEND, APPEND, truncate_command(1, Position(2, 0)), APPEND), 1):
        frame = Frame(UNIFORM, 0, 1, len(command), 0, 0, 0, 0, command)
        batch = batched.apply_batch(context(index), (frame,))
        found = single.apply(context(index), command, (ref,))
        assert [found.reply] == list(batch.replies) and list(found.effects) == list(batch.effects)
    assert single.snapshot() == batched.snapshot()
    with pytest.raises(Reject):
        single.apply(context(9), b"?", (ref,))


def test_slices_count_append_frames_only() -> None:
    frames = [append(3), truncate(1, 1), append(2)]
    assert slices(frames, 10) == ([Slice(10, 0, 0, 0, 3), Slice(13, 2, 4, 0, 2)], 15)
    assert slices(frames, 12, 2) == ([Slice(12, 0, 2, 2, 1), Slice(13, 2, 4, 0, 2)], 15)
    assert slices(frames, 13, 3) == ([Slice(13, 2, 4, 0, 2)], 15)
    assert slices(frames, 14, 5) == ([Slice(14, 2, 5, 1, 1)], 15)
    assert slices([], 7) == ([], 7)


def test_the_registry_knows_the_log_and_nothing_else() -> None:
    assert isinstance(create_machine("log", {}), AppendLog)
    for name, arguments in (("stack", {}), ("log", {"size": 1})):
        with pytest.raises(BadRequest):
            create_machine(name, arguments)


def append_at(offset: int, records: int) -> Frame:
    command = append_command(offset)
    return Frame(UNIFORM, 0, records, len(command), 10, 0, 0, 0, command)


def test_a_log_with_a_start_appends_where_it_is_told_or_not_at_all() -> None:
    log = create_machine("log", {"start": 100})
    assert isinstance(log, AppendLog) and (log.start, log.end) == (100, 100)
    replies, effects = applied(log, 3, append_at(100, 2), append_at(100, 2), append(1), append_at(103, 4))
    assert replies[0] == APPEND_REPLY.pack(100, 2) and replies[2:] == [
        APPEND_REPLY.pack(102, 1), APPEND_REPLY.pack(103, 4)
    ]  # fmt: skip
    assert isinstance(replies[1], Reject) and replies[1].code == "out_of_range" and "ends at 102" in replies[1].message
    assert not effects and log.end == 107
    frames = [frame._replace(first=first) for frame, first in zip(
        (append_at(100, 2), append_at(100, 2), append(1), append_at(103, 4)), (0, 2, 4, 5), strict=True
    )]  # fmt: skip
    # The engine gives frames their ordinals; here the refused one has that of the first.
    assert slices(frames, 100, 0, {2})[1] == 107
    assert log.anchor(100) == (100, Position(0, 0)) and log.anchor(106) == (100, Position(0, 0))
    with pytest.raises(OutOfRange, match=r"100\.\.106"):
        log.anchor(99)
    copy = create_machine("log", {"start": 100})
    copy.restore(log.snapshot())
    assert isinstance(copy, AppendLog) and (copy.start, copy.end, copy.placed) == (100, 107, True)


def test_a_log_without_a_start_refuses_to_append_at_an_offset() -> None:
    log = AppendLog()
    (reply,), _ = applied(log, 3, append_at(0, 2))
    assert isinstance(reply, Reject) and reply.code == "bad_request" and (log.end, log.holes) == (0, [(3, 0, 2)])


@pytest.mark.parametrize("start", [-1, 1.5, "7", True, 1 << 62])
def test_a_start_is_an_offset(start: object) -> None:
    with pytest.raises(BadRequest, match="start"):
        create_machine("log", {"start": start})
