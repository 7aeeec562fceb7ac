"""How many records a lane puts into a frame."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from logyard.client.lane import BATCH_BYTES, BATCH_RECORDS, FEW_BYTES, FEW_RECORDS, Lane, Window
from logyard.protocol import wire
from logyard.protocol.errors import LogyardError, NoSpace, Unknown, UnknownGroup, encode_error
from logyard.protocol.pending import FAILED


def lane() -> Lane:
    return Lane("a", Window(1 << 40, lambda: None), lambda: 0.0, lambda one: None, random.Random(1))


def frames_of(sizes: list[int]) -> list[list[int]]:
    """The sizes of the bodies in each frame."""
    one = lane()
    found: dict[int, list[int]] = {}
    for size in sizes:
        batch, number = one.add(b"", bytes(size), 1.0)
        found.setdefault(batch.serial, []).append(size)
        assert number == len(found[batch.serial]) - 1
    return list(found.values())


@pytest.mark.parametrize(
    ("size", "records"),
    [
        (100, BATCH_RECORDS), (256, -(-BATCH_BYTES // 264)), (4096, 128), (32_768, FEW_RECORDS), (65_536, 16),
        (100_000, 10), (300_000, 3), (500_000, 2), (BATCH_BYTES, 1), (1 << 20, 1),
    ],
)  # fmt: skip
def test_a_frame_of_few_large_records_grows_to_an_entrys_size(size: int, records: int) -> None:
    frames = frames_of([size] * (2 * records + 1))
    assert [len(frame) for frame in frames] == [records, records, 1]


def test_no_frame_of_mixed_records_is_larger_than_an_entry() -> None:
    chance: Any = random.Random(3)
    for _ in range(20):
        sizes = [chance.choice((10, 3000, 70_000, 400_000, 2_000_000)) for _ in range(60)]
        frames = frames_of(sizes)
        assert [size for frame in frames for size in frame] == sizes
        for frame in frames:
            assert len(frame) == 1 or sum(frame) <= FEW_BYTES


def test_records_that_may_wait_for_ever_share_a_frame() -> None:
    one = lane()
    first, _ = one.add(b"", b"x", math.inf)
    assert one.add(b"", b"y", math.inf) == (first, 1)
    hasty, _ = one.add(b"", b"z", 1.0)
    assert hasty is not first and one.add(b"", b"z", math.inf)[0] is not hasty


def pending(ambiguous: bool) -> tuple[Lane, Any]:
    """A lane with a batch under way, an earlier try of which may have been applied."""
    one = lane()
    batch, _ = one.add(b"", b"x", 1.0)
    (taken,) = one.take(0.0)
    assert taken is batch
    if ambiguous:
        one.cut(batch, LogyardError("the connection ended"))
        one.take(10.0)
    return one, batch


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_refusal_of_the_second_try_says_nothing_of_the_first(ambiguous: bool) -> None:
    def told(code: str) -> str:
        one, batch = pending(ambiguous)
        one.answered(batch, wire.ERROR, wire.pack({"code": code, "message": "no", "retry": "never", "details": {}}))
        return str(batch.pending.error.code)

    for code in ("unknown_group", "group_stopped", "bad_request"):
        assert told(code) == ("unknown" if ambiguous else code)
    assert told("too_old") == "too_old", "a committed refusal of the machine"
    for code in ("reply_not_kept", "stale_sequence"):
        assert told(code) == "unknown", "it was applied, or its frame was, and nobody says what came of it"


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_group_that_is_nowhere_says_nothing_of_what_was_sent_before(ambiguous: bool) -> None:
    one = lane()
    batch, _ = one.add(b"", b"x", 1.0)
    if ambiguous:
        one.take(0.0)
        one.cut(batch, LogyardError("the connection ended"))
    one.fail(UnknownGroup("no group 'a'"))
    assert batch.pending.error is not None and batch.pending.error.code == ("unknown" if ambiguous else "unknown_group")


def test_what_no_session_numbers_is_not_sent_again_when_nobody_knows_what_came_of_it() -> None:
    """It would be there twice; with a session it is asked again."""
    for flags, done in ((wire.REPLY_APPEND, True), (0, False)):
        one = lane()
        batch, _ = one.add(b"", b"x", 60.0, flags)
        (taken,) = one.take(0.0)
        taken.reply(0, FAILED, encode_error(Unknown("a test")))
        assert batch.pending.done is done and one.waiting is not done
        assert isinstance(batch.pending.error, Unknown) is done


def test_what_waits_behind_a_refusal_is_told_of_it() -> None:
    """And not that no leader was found."""
    one = lane()
    first, _ = one.add(b"", b"1", 5.0)
    (taken,) = one.take(0.0)
    taken.reply(0, FAILED, wire.pack({"code": "no_space", "message": "full", "retry": "same_session"}))
    second, _ = one.add(b"", b"2", 0.1)
    one.expire(1.0)
    assert isinstance(second.pending.error, NoSpace) and not first.pending.done


def test_records_with_other_patience_do_not_share_a_frame() -> None:
    """One that waits for a leader would fail, or go on waiting, with the first one of its frame."""
    one = lane()
    hasty, _ = one.add(b"", b"1", 0.5)
    patient, _ = one.add(b"", b"2", 30.0)
    one.expire(1.0)
    assert hasty.pending.done and not patient.pending.done


def test_a_record_that_comes_later_has_its_own_time() -> None:
    now = 0.0
    one = Lane("a", Window(1 << 40, lambda: None), lambda: now, lambda lane: None, random.Random(1))
    first, _ = one.add(b"", b"1", 30.0)
    now = 29.0
    one.expire(now)
    second, _ = one.add(b"", b"2", 30.0)
    now = 31.0
    one.expire(now)
    assert first.pending.done and not second.pending.done


def test_what_waits_for_one_that_is_given_up_goes_on_then() -> None:
    """It was refused while that one was under way, and waits for its answer to keep the order."""
    kicked: list[Lane] = []
    one = Lane("a", Window(1 << 40, lambda: None), lambda: 0.0, kicked.append, random.Random(1))
    one.add(b"", b"1", 1.0)
    one.take(0.0)
    one.add_many([(b"", b"2")], 60.0)
    (second,) = one.take(0.0)
    second.reply(0, FAILED, wire.pack({"code": "busy", "message": "full", "retry": "same_session"}))
    kicked.clear()
    one.expire(10.0)
    assert not one.sent and kicked == [one] and one.take(10.0) == [second]
