"""The log against a plain list of terms: terms, slices, hints, truncation, release and compaction in random order."""

from __future__ import annotations

import random

import pytest

from logyard.engine.entry import COMMANDS, build_plain
from logyard.engine.raft.raft_log import SEGMENT_ENTRIES, RaftLog

from .network import entries_of


def test_terms_at_the_edges() -> None:
    log = RaftLog(5, 2, entries=entries_of(2, 3, 3, first=6))
    assert [log.term(index) for index in range(3, 10)] == [None, None, 2, 2, 3, 3, None]
    assert (log.first_index, log.memory_first, log.last_index, log.last_term, log.stable) == (6, 6, 8, 3, 8)
    assert RaftLog().term(0) == 0 and RaftLog().last_index == 0


def test_recovered_from_segments_and_memory() -> None:
    log = RaftLog(2, 1, [(3, 1), (5, 2), (8, 3)], entries_of(2, 2, 4, first=6))
    log.check()
    assert [log.term(index) for index in range(2, 9)] == [1, 1, 1, 2, 2, 2, 4]
    assert log.memory_first == 6 and log.runs == ((3, 1), (5, 2), (8, 4))
    bare = RaftLog(2, 1, [(3, 1), (5, 2)], last_index=9)
    bare.check()
    assert (bare.last_index, bare.last_term, bare.memory_first, bare.stable) == (9, 2, 10, 9)
    assert bare.slice(9, 9, 100) is None


def test_a_slice_is_bounded_in_bytes_but_never_empty() -> None:
    log = RaftLog(entries=[build_plain(index, 1, COMMANDS, 0, b"x" * 1000) for index in range(1, 6)])
    size = log.entries[0].size
    assert [entry.index for entry in log.slice(2, 5, 2 * size) or ()] == [2, 3]
    assert [entry.index for entry in log.slice(2, 5, 2 * size - 1) or ()] == [2]
    assert [entry.index for entry in log.slice(2, 5, 1) or ()] == [2]
    assert [entry.index for entry in log.slice(2, 4, 1 << 30) or ()] == [2, 3, 4]
    assert log.slice(4, 3, 100) == []
    log.release_memory(3)
    assert log.slice(3, 5, 100) is None and log.slice(4, 4, 1) == [log.entry(4)] and log.entry(3) is None


def test_what_is_asked_of_segments_follows_what_left_memory() -> None:
    log = RaftLog(entries=entries_of(*[1] * 500))
    mean = log.entries[0].size
    fresh = RaftLog(0, 0, [(1, 1)], last_index=500)
    assert fresh.segment_last(1, 1 << 20) == SEGMENT_ENTRIES
    log.release_memory(400)
    assert log.segment_last(1, 10 * mean) == 10
    assert log.segment_last(399, 10 * mean) == 400
    assert log.segment_last(5, 1) == 5


def test_stable_falls_with_truncation_and_what_is_not_stable_is_not_released() -> None:
    log = RaftLog(entries=entries_of(1, 1, 1))
    log.append(entries_of(2, 2, first=4))
    assert log.stable == 3
    log.release_memory(5)
    assert log.memory_first == 4
    log.truncate(2)
    assert (log.stable, log.last_index, log.memory_first, log.last_term) == (1, 1, 2, 1)
    log.check()


@pytest.mark.parametrize(
    "entries", [entries_of(1, first=5), entries_of(0, first=4), [*entries_of(1, first=4), *entries_of(1, first=6)]]
)
def test_only_what_continues_the_log_is_appended(entries: list) -> None:  # type: ignore[type-arg]
    log = RaftLog(entries=entries_of(1, 1, 1))
    with pytest.raises(AssertionError):
        log.append(entries)


@pytest.mark.parametrize("seed", range(30))
def test_against_a_list_of_terms(seed: int) -> None:
    rng = random.Random(seed)
    log = RaftLog()
    terms = [0]
    snapshot, memory = 0, 1
    for _ in range(120):
        last = len(terms) - 1
        dice = rng.random()
        if dice < 0.4:
            new = sorted(max(terms[-1], 1) + rng.choice((0, 0, 0, 1, 3)) for _ in range(rng.randrange(1, 5)))
            log.append(entries_of(*new, first=last + 1))
            terms += new
        elif dice < 0.5:
            term = max(terms[-1], 1) + rng.randrange(2)
            log.push(entries_of(term, first=last + 1)[0])
            terms.append(term)
        elif dice < 0.65 and last > snapshot:
            cut = rng.randrange(snapshot + 1, last + 1)
            log.truncate(cut)
            del terms[cut:]
            memory = min(memory, cut)
        elif dice < 0.8:
            log.stable = log.last_index
            upto = rng.randrange(last + 1)
            log.release_memory(upto)
            memory = max(memory, upto + 1)
        elif dice < 0.9 and last > snapshot:
            snapshot = rng.randrange(snapshot + 1, last + 1)
            log.compact(snapshot, terms[snapshot])
            memory = max(memory, snapshot + 1)
        elif dice < 0.92:
            snapshot = last + rng.randrange(1, 4)
            term = terms[-1] + 1
            log.reset(snapshot, term)
            terms += [term] * (snapshot - last)
            memory = snapshot + 1
        log.check()
        last = len(terms) - 1
        assert (log.snapshot_index, log.memory_first, log.last_index) == (snapshot, memory, last)
        assert [log.term(i) for i in range(last + 2)] == [None] * snapshot + terms[snapshot:] + [None]
        index, term = rng.randrange(snapshot, last + 1), rng.randrange(terms[-1] + 2)
        want = next((i for i in range(index, snapshot, -1) if terms[i] <= term), snapshot)
        assert log.conflict_hint(index, term) == want
