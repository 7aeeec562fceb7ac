"""The payload cache, alone: a bound in bytes, first in first out, that lets nothing go which the log still writes."""

from __future__ import annotations

import pytest

from logyard.engine.entry import COMMANDS, Entry
from logyard.engine.log.cache import ENTRIES_MIN, ENTRY_BYTES, UNWRITTEN_SECONDS, PayloadCache


def entry(index: int, size: int = 1000, written: bool = True) -> Entry:
    """An entry with a payload, in WAL file 1 if it is `written`."""
    made = Entry(index, 1, COMMANDS, b"", (bytes(size),) if size else (), size)
    made.file = int(written)
    return made


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(entries: list[Entry]) -> list[int]:
    return [one.index for one in entries if one.bodies is not None]


def test_the_oldest_gives_its_bytes_up_and_the_newest_stays() -> None:
    cache = PayloadCache(3000)
    entries = [entry(index) for index in range(1, 6)]
    for one in entries:
        cache.keep(one)
    assert kept(entries) == [3, 4, 5] and cache.bytes == 3000
    cache.keep(entry(6, 5000))
    assert cache.bytes == 0 and not kept(entries), "what is above the bound alone is not kept either"


def test_many_small_payloads_do_not_take_a_multiple_of_the_bound() -> None:
    bound = 3 * ENTRIES_MIN * ENTRY_BYTES
    cache = PayloadCache(bound)
    entries = [entry(index, 10) for index in range(4 * ENTRIES_MIN)]
    for one in entries:
        cache.keep(one)
    assert bound * 0.99 < len(kept(entries)) * (ENTRY_BYTES + 10) <= bound
    assert cache.shrink_by(1000) == 1000, "others ask for payload bytes, and get as many"


def test_what_has_no_payload_is_nobodys_concern() -> None:
    cache = PayloadCache(0)
    none = entry(1, 0)
    cache.keep(none)
    assert cache.bytes == 0 and none.bodies == ()


def test_what_is_not_written_yet_is_passed_over_and_goes_once_it_is() -> None:
    cache = PayloadCache(2000)
    entries = [entry(1, written=False), *(entry(index) for index in range(2, 6))]
    for one in entries:
        cache.keep(one)
    assert kept(entries) == [1, 5] and cache.bytes == 2000, "it counts, so one less of the others is kept"
    entries[0].file = 1
    cache.keep(entry(6))
    assert 1 not in kept(entries) and cache.bytes <= 2000


def test_what_is_never_written_leaves_the_books_and_keeps_its_bytes() -> None:
    clock = Clock()
    cache = PayloadCache(1000, clock)
    never = entry(1, written=False)
    cache.keep(never)
    cache.keep(entry(2))
    assert cache.bytes == 1000 and never.bodies
    clock.now = UNWRITTEN_SECONDS + 0.1
    cache.keep(entry(3, 100))
    assert cache.bytes == 100, "nobody else has it: it counts no more"
    assert never.bodies, "somebody may write it still"
    never.file = 1
    for index in range(4, 40):
        cache.keep(entry(index))
    assert 0 <= cache.bytes <= 1000, "it is not taken out of the books twice"


def test_one_that_is_never_written_does_not_hold_up_those_behind_it() -> None:
    cache = PayloadCache(10_000)
    never = entry(1, written=False)
    cache.keep(never)
    written: list[Entry] = []
    for index in range(2, 200):
        one = entry(index, written=False)
        cache.keep(one)
        assert one.bodies is not None, "the log still has to write it"
        one.file = 1
        written.append(one)
    assert len(kept(written)) <= 11 and never.bodies is not None and cache.bytes <= 11_000


def test_what_a_turn_may_send_stays_in_memory_until_it_ends() -> None:
    cache = PayloadCache(1500)
    sent = entry(1)
    cache.keep(sent)
    cache.hold()
    # Another group's entries come in behind a message with this one, which is encoded at the end of the turn.
    late = [entry(index, written=False) for index in range(2, 40)]
    for one in late:
        cache.keep(one)
    assert sent.bodies is not None
    cache.release()
    assert sent.bodies is None
    # As many as came in are looked at, so that those which were not written then do not stay for ever.
    for one in late:
        one.file = 1
    for index in range(50, 70):
        cache.keep(entry(index, 10, written=False))
    assert cache.bytes < 3000


def test_a_turn_that_brings_much_lets_as_much_go() -> None:
    cache = PayloadCache(0)
    before = [entry(index, written=False) for index in range(1, 31)]
    for one in before:
        cache.keep(one)
        assert one.bodies is not None
    for one in before:
        one.file = 1
    cache.hold()
    for index in range(31, 61):
        cache.keep(entry(index, written=False))
    assert len(kept(before)) == 30
    cache.release()
    assert not kept(before), "however many came in while nothing could go"


def test_a_turn_that_ends_twice_lets_no_more_go_than_is_too_much() -> None:
    cache = PayloadCache(2000)
    entries = [entry(1), entry(2)]
    cache.hold()
    for one in entries:
        cache.keep(one)
    cache.release()
    cache.release()
    assert kept(entries) == [1, 2]
    cache.keep(entry(3))
    assert kept(entries) == [2], "it is bounded again at once"


@pytest.mark.parametrize(("asked", "freed", "left"), [(0, 0, [1, 2, 3]), (1, 1000, [2, 3]), (1001, 2000, [3])])
def test_as_much_goes_as_is_asked_for(asked: int, freed: int, left: list[int]) -> None:
    cache = PayloadCache(5000)
    entries = [entry(index) for index in range(1, 4)]
    for one in entries:
        cache.keep(one)
    assert cache.shrink_by(asked) == freed and kept(entries) == left
    assert cache.bytes_max == 5000, "for this once"


def test_no_more_goes_than_is_written() -> None:
    cache = PayloadCache(5000)
    entries = [entry(1), entry(2, written=False)]
    for one in entries:
        cache.keep(one)
    assert cache.shrink_by(1 << 40) == 1000 and kept(entries) == [2] and cache.bytes == 1000
    assert cache.shrink_by(1 << 40) == 0
    entries[1].file = 1
    assert cache.shrink_by(1 << 40) == 1000 and cache.bytes == 0
