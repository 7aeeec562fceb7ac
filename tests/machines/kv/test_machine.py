"""The KV machine, operation by operation."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Batch, Context, Frame, PayloadRef, Position, Reject, Release
from logyard.machines.kv import KV, budget
from logyard.machines.kv import machine as kv_module
from logyard.machines.kv.command import (
    BY_MOD,
    BY_VALUE,
    COMPACT,
    COUNT_ONLY,
    DELETE,
    DESCENDING,
    DIFFERENT,
    EQUAL,
    GRANT,
    GREATER,
    KEEP,
    KEEP_LEASE,
    KEYS_ONLY,
    LESS,
    OF_CREATE,
    OF_LEASE,
    OF_MOD,
    OF_VALUE,
    OF_VERSION,
    PREVIOUS,
    PUT,
    RANGE,
    REVOKE,
    TIME_TO_LIVE,
    TXN,
    UNCOUNTED,
)
from logyard.machines.kv.digest import digest
from logyard.machines.kv.leases import STALE_MAX
from logyard.machines.kv.state import State

from .driver import Driver


def test_put_get_and_delete_count_revisions_and_versions() -> None:
    driver = Driver()
    assert driver.put(b"a", b"1") == [0, 2, None]
    assert driver.put(b"a", b"2", flags=PREVIOUS) == [0, 3, [b"a", 2, 2, 1, 0, b"1"]]
    assert driver.put(b"b", b"") == [0, 4, None]
    assert driver.rows() == [[b"a", 2, 3, 2, 0, b"2"], [b"b", 4, 4, 1, 0, b""]], "an empty value is a value"
    assert driver.do(DELETE, b"a", b"", PREVIOUS) == [0, 5, 1, [[b"a", 2, 3, 2, 0, b"2"]]]
    assert driver.do(DELETE, b"a", b"", 0) == [0, 5, 0, []], "nothing was there: no new revision"
    assert driver.rows(b"a", b"") == []
    assert driver.put(b"a", b"again") == [0, 6, None]
    assert driver.rows(b"a", b"") == [[b"a", 6, 6, 1, 0, b"again"]], "a new life begins with version 1"
    driver.check()


def test_ranges_limits_order_counts_and_older_revisions() -> None:
    driver = Driver()
    for key in (b"c", b"a", b"b", b"d"):
        driver.put(key, key)
    driver.do(DELETE, b"b", b"", 0)
    driver.put(b"a", b"new")
    keys = [row[0] for row in driver.rows(b"a", b"d")]
    assert keys == [b"a", b"c"]
    assert [row[0] for row in driver.rows(b"b", b"\0")] == [b"c", b"d"]
    assert driver.ask(RANGE, b"\0", b"\0", 0, 2)[2:] == [driver.rows()[:2], True, 3]
    assert driver.ask(RANGE, b"\0", b"\0", 0, 0, COUNT_ONLY)[2:] == [[], False, 3]
    assert driver.ask(RANGE, b"\0", b"\0", 5, 0, COUNT_ONLY)[4] == 4
    assert [row[0] for row in driver.ask(RANGE, b"\0", b"\0", 0, 0, 0, BY_MOD, DESCENDING)[2]] == [b"a", b"d", b"c"]
    assert [row[0] for row in driver.ask(RANGE, b"\0", b"\0", 0, 1, 0, 0, DESCENDING)[2]] == [b"d"]
    assert driver.rows(b"a", b"d", 5) == [[b"a", 3, 3, 1, 0, b"a"], [b"b", 4, 4, 1, 0, b"b"], [b"c", 2, 2, 1, 0, b"c"]]
    assert driver.rows(b"\0", b"\0", 2) == [[b"c", 2, 2, 1, 0, b"c"]]
    assert driver.ask(RANGE, b"a", b"", 0, 0, KEYS_ONLY)[2] == [[b"a", 3, 7, 2, 0, b""]]
    assert driver.ask(RANGE, b"\0", b"\0", 0, 0, 0, 0, 0, 0, [6, 0, 0, 0])[2] == [[b"a", 3, 7, 2, 0, b"new"]]
    assert driver.ask(RANGE, b"\0", b"\0", 0, 0, 0, 0, 0, 0, [0, 0, 3, 4])[4] == 1
    assert driver.ask(RANGE, b"a", b"", 99)[:2] == [1, "future_revision"]


@pytest.mark.parametrize("order", [0, DESCENDING])
def test_a_page_that_needs_no_count_looks_at_little_more_than_it_shows(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    driver = Driver()
    for number in range(100):
        driver.put(b"k%02d" % number, b"v")
    revision = driver.machine.state.revision
    for number in range(0, 100, 2):
        driver.do(DELETE, b"k%02d" % number, b"", 0)
    at, looked = State.at, [0]

    def look(self: State, *asked: Any) -> Any:
        looked[0] += 1
        return at(self, *asked)

    monkeypatch.setattr(State, "at", look)
    asked = (RANGE, b"k", b"l", revision, 7)
    counted = driver.ask(*asked, 0, 0, order)
    assert counted[3:] == [True, 100] and looked == [100]
    assert driver.ask(*asked, UNCOUNTED, 0, order)[:4] == counted[:4] and looked[0] <= 100 + 7 + 1
    assert driver.do(*asked, UNCOUNTED, 0, order) == counted, (
        "what is applied is the same at each member of any version"
    )


def test_an_answer_is_bounded_by_bytes_with_at_least_one_row() -> None:
    driver = Driver()
    for number in range(5):
        driver.put(b"k%d" % number, b"x" * 1000)
    _, _, rows, more, count = driver.ask(RANGE, b"k", b"l", 0, 0, 0, 0, 0, 2500)
    assert (len(rows), more, count) == (2, True, 5)
    _, _, rows, more, _ = driver.ask(RANGE, b"k", b"l", 0, 0, 0, 0, 0, 1)
    assert (len(rows), more) == (1, True)


def test_transactions_are_atomic_and_see_their_own_writes() -> None:
    driver = Driver()
    driver.put(b"a", b"1")
    reply = driver.do(
        TXN,
        [[b"a", b"", OF_VALUE, EQUAL, b"1"], [b"new", b"", OF_VERSION, EQUAL, 0]],
        [[PUT, b"new", b"n", 0, 0], [DELETE, b"a", b"", PREVIOUS], [RANGE, b"\0", b"\0"]],
        [[PUT, b"never", b"", 0, 0]],
    )
    assert reply == [
        0, 3, True,
        [[PUT, None], [DELETE, 1, [[b"a", 2, 2, 1, 0, b"1"]]], [RANGE, [[b"new", 3, 3, 1, 0, b"n"]], False, 1]],
    ]  # fmt: skip
    refused = driver.do(TXN, [], [[PUT, b"x", b"", 0, 0], [PUT, b"y", b"", 99, 0]], [])
    assert refused[:2] == [1, "lease_not_found"]
    assert driver.rows(b"x", b"z") == [] and driver.machine.state.revision == 3, "nothing of it happened"
    assert driver.do(TXN, [], [[PUT, b"x", b"", 0, 0], [PUT, b"x", b"", 0, 0]], [])[1] == "duplicate_key"
    assert driver.do(TXN, [], [[PUT, b"x", b"", 0, 0], [DELETE, b"a", b"z", 0]], [])[1] == "duplicate_key"
    nested = driver.do(
        TXN, [], [[TXN, [[b"new", b"", OF_CREATE, EQUAL, 3]], [[PUT, b"in", b"", 0, 0]], []], [RANGE, b"in", b""]], []
    )
    assert nested == [0, 4, True, [[TXN, True, [[PUT, None]]], [RANGE, [[b"in", 4, 4, 1, 0, b""]], False, 1]]]


@pytest.mark.parametrize(
    ("compare", "true"),
    [
        ([b"a", b"", OF_VERSION, EQUAL, 2], True),
        ([b"a", b"", OF_VERSION, GREATER, 2], False),
        ([b"a", b"", OF_MOD, LESS, 4], True),
        ([b"a", b"", OF_CREATE, DIFFERENT, 2], False),
        ([b"a", b"", OF_LEASE, EQUAL, 0], True),
        ([b"a", b"", OF_VALUE, GREATER, b"1"], True),
        ([b"a", b"", OF_VALUE, EQUAL, b""], False),
        ([b"none", b"", OF_VALUE, EQUAL, b""], False),
        ([b"none", b"", OF_MOD, EQUAL, 0], True),
        ([b"a", b"c", OF_VERSION, GREATER, 0], True),
        ([b"a", b"c", OF_VERSION, GREATER, 1], False),
        ([b"x", b"z", OF_VERSION, GREATER, 0], False),
    ],
)
def test_compares(compare: list[object], true: bool) -> None:
    driver = Driver()
    driver.put(b"a", b"1")
    driver.put(b"a", b"2")
    driver.put(b"b", b"2")
    assert driver.do(TXN, [compare], [], [])[2] is true


def test_large_values_are_payloads_that_die_when_nobody_can_read_them() -> None:
    driver = Driver()
    first = driver.put_payload(b"a", b"x" * 5000)
    assert driver.live == {(1, 0)} and first == [0, 2, None]
    driver.put_payload(b"a", b"y" * 5000)
    driver.put_payload(b"b", b"z")
    assert driver.rows() == [[b"a", 2, 3, 2, 0, [2, 0, 5000]], [b"b", 4, 4, 1, 0, [3, 0, 1]]]
    assert driver.rows(revision=2) == [[b"a", 2, 2, 1, 0, [1, 0, 5000]]]
    driver.do(DELETE, b"b", b"", 0)
    assert driver.live == {(1, 0), (2, 0), (3, 0)}, "the history can still read them"
    driver.do(COMPACT, 4)
    assert driver.live == {(2, 0), (3, 0)}
    driver.do(COMPACT, 5)
    assert driver.live == {(2, 0)}
    driver.check()
    assert driver.do(TXN, [[b"a", b"", OF_VALUE, EQUAL, b"y" * 5000]], [], [])[2] is True
    assert driver.do(TXN, [[b"a", b"", OF_VALUE, EQUAL, [5000, digest(b"y" * 5000)]]], [], [])[2] is True
    assert driver.do(TXN, [[b"a", b"", OF_VALUE, DIFFERENT, b"y"]], [], [])[2] is True
    assert driver.do(TXN, [[b"a", b"", OF_VALUE, LESS, b"y"]], [], [])[1] == "value_is_payload"


def test_a_read_as_of_the_revision_before_a_transaction_sees_none_of_its_writes() -> None:
    driver = Driver()
    driver.put(b"a", b"old")
    driver.put(b"c", b"same")
    reads = [
        [RANGE, b"a", b"", 3, 0, 0],
        [RANGE, b"a", b"\0", 3, 0, COUNT_ONLY],
        [RANGE, b"a", b"\0", 0, 0, COUNT_ONLY],
    ]
    writes = [[PUT, b"a", b"new", 0, 0], [PUT, b"b", b"new", 0, 0], [DELETE, b"c", b"", 0]]
    _, revision, _, results = driver.do(TXN, [], [*reads, *writes, *reads], [])
    before, count, _, _, _, _, after, count_after, now = [fields for _, *fields in results]
    assert revision == 4 and before == after == [[[b"a", 2, 2, 1, 0, b"old"]], False, 1]
    assert count == count_after == [[], False, 2] == now
    assert [row[0] for row in driver.rows()] == [b"a", b"b"]


def test_payloads_of_what_is_refused_or_not_chosen_are_released_with_their_entry() -> None:
    driver = Driver()
    sent = [0, 3, digest(b"abc")]
    driver.do(TXN, [[b"k", b"", OF_VERSION, GREATER, 0]], [[PUT, b"k", sent, 0, 0]], [[PUT, b"l", b"in", 0, 0]])
    assert driver.live == set()
    assert driver.do(PUT, b"k", sent, 77, 0)[1] == "lease_not_found"
    assert driver.do(PUT, b"k", [1, 3, digest(b"abc")], 0, 0)[1] == "bad_request", "there is no second record"
    twice = driver.do(TXN, [], [[PUT, b"k", sent, 0, 0], [PUT, b"l", sent, 0, 0]], [])
    assert twice[1] == "bad_request" and driver.live == set()
    driver.do(TXN, [], [[PUT, b"k", [2, 3, digest(b"abc")], 0, 0], [PUT, b"l", sent, 0, 0]], [], records=4)
    assert driver.live == {(driver.index, 0), (driver.index, 2)}
    driver.check()


def test_a_transaction_that_is_refused_by_a_read_behind_its_writes_has_changed_nothing() -> None:
    driver = Driver()
    driver.do(GRANT, 60_000, 7)
    driver.put(b"leased", b"1", lease=7)
    driver.put(b"gone", b"1")
    driver.do(DELETE, b"gone", b"", 0)
    driver.put_payload(b"large", b"x" * 2000)
    before, machine = driver.machine.snapshot(), KV()
    machine.restore(before)
    writes = [
        [PUT, b"new", b"1", 7, 0], [PUT, b"gone", b"2", 0, 0], [PUT, b"leased", b"2", 0, 0],
        [PUT, b"own", [0, 3, digest(b"own")], 0, 0], [DELETE, b"large", b"", 0],
    ]  # fmt: skip
    reply = driver.do(TXN, [], [*writes, [RANGE, b"\0", b"\0", 0, 0, 0, BY_VALUE, 0, 0, [0, 0, 0, 0]]], [])
    assert reply[:2] == [1, "value_is_payload"] and driver.machine.snapshot() == before
    driver.check()
    other = Driver(machine)
    other.live, other.index = set(driver.live), driver.index
    for one in (driver, other):
        one.put(b"next", b"1")
        one.do(COMPACT, one.machine.state.revision)
        one.check()
    assert driver.machine.snapshot() == other.machine.snapshot()


EVERYTHING = [RANGE, b"\0", b"\0"]


def test_an_answer_that_is_too_large_is_refused_and_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ANSWER_BYTES_MAX", 12_000)
    driver = Driver()
    for number in range(10):
        driver.put(b"k%d" % number, b"x" * 1000)
    driver.put_payload(b"large", b"x" * 50_000)
    before = driver.machine.snapshot()
    writes = [[PUT, b"new", b"1", 0, 0], [DELETE, b"k1", b"", 0]]
    for operations in (
        [*writes, EVERYTHING, EVERYTHING],
        [*writes, EVERYTHING, [DELETE, b"k2", b"l", PREVIOUS]],
        [*writes, EVERYTHING, *[[PUT, b"k%d" % number, b"", 0, PREVIOUS] for number in range(2, 6)]],
        [*writes, [TXN, [], [EVERYTHING, EVERYTHING], []]],
    ):
        assert driver.do(TXN, [], operations, [])[:2] == [1, "too_large"]
        assert driver.machine.snapshot() == before
        driver.check()
    monkeypatch.setattr(budget, "ANSWER_BYTES_MAX", 5000)
    assert driver.do(*EVERYTHING)[:2] == driver.do(DELETE, b"k", b"l", PREVIOUS)[:2] == [1, "too_large"]
    assert driver.machine.snapshot() == before
    assert driver.do(TXN, [], [*writes, [DELETE, b"k2", b"l", 0], EVERYTHING], [])[:3] == [0, 13, True]
    driver.check()


def test_answers_that_travel_together_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ANSWER_BYTES_MAX", 2000)
    driver = Driver()
    driver.put(b"k", b"x" * 1000)
    read, write = (msgpack.packb(EVERYTHING), 1), (msgpack.packb([PUT, b"other", b"", 0, 0]), 1)
    before = driver.machine.snapshot()
    frames = driver.entry([read, write, read, read], *[[read]] * (2 * budget.ENTRY_FRAMES))
    assert [[reply[:2] for reply in frame] for frame in frames[:2]] == [
        [[0, 2], [0, 3], [1, "too_large"], [1, "too_large"]], [[0, 3]],
    ]  # fmt: skip
    assert [frame[0][0] for frame in frames].index(1) <= 2 * budget.ENTRY_FRAMES, "all of an entry are, too"
    _, context, shown = driver.entries[-1]
    again = KV()
    again.restore(before)
    replies = again.apply_batch(context, shown).replies
    again.restore(before)
    assert again.apply_batch(context, shown).replies == replies, "a replay pays nothing for what was before it"
    assert driver.do(*EVERYTHING)[0] == 0


def test_the_answer_to_a_question_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.put(b"k", b"x" * 1000)
    monkeypatch.setattr(budget, "QUESTION_BYTES_MAX", 1000)
    assert driver.ask(*EVERYTHING, 0, 0, 0, BY_MOD)[:2] == [1, "too_large"]
    assert driver.ask(*EVERYTHING, 0, 0, KEYS_ONLY, BY_MOD)[0] == 0


HOLDS = [b"k", b"l", OF_VERSION, GREATER, 0]
"""A compare of all keys, which is true."""


@pytest.mark.parametrize(
    "compares, operations, fits",
    [
        ([HOLDS] * 4, [], True),
        ([HOLDS] * 5, [], False),
        ([[b"none", b"", OF_VERSION, GREATER, 0], *[HOLDS] * 100], [], True),
        ([HOLDS], [[TXN, [HOLDS] * 4, [], []]], False),
        ([HOLDS] * 2, [[DELETE, b"k", b"l", 0], [RANGE, b"\0", b"\0"]], True),
        ([HOLDS] * 3, [[DELETE, b"k", b"l", 0], [PUT, b"a", b"", 0, 0], [RANGE, b"\0", b"\0"]], False),
        ([], [[RANGE, b"\0", b"\0", 0, 1, 0, BY_MOD]] * 3, True),
        ([], [[RANGE, b"\0", b"\0", 0, 1, 0, BY_MOD]] * 4, False),
        ([], [[RANGE, b"k1", b"", 2]] * 20, True),
        ([], [[RANGE, b"k1", b"", 2]] * 21, False),
        ([], [[RANGE, b"k0", b"", 2]] * 4, False),
        ([[b"k", b"l", OF_VALUE, EQUAL, [3, b"d" * 16]]] * 2, [], True),
        ([[b"k", b"l", OF_VALUE, DIFFERENT, [3, b"d" * 16]]] * 3, [], False),
    ],
)
def test_what_a_transaction_looks_at_is_bounded(
    compares: list[object], operations: list[object], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are ten keys, of which one changed ten times; it may look at forty."""
    monkeypatch.setattr(budget, "STEPS_MAX", 20)
    driver = Driver()
    for number in [*range(10), *[0] * 10]:
        driver.put(b"k%d" % number, b"v" * 300)
    before = driver.machine.snapshot()
    reply = driver.do(TXN, compares, operations, [])
    assert reply[:2] == ([0, driver.machine.state.revision] if fits else [1, "too_many_operations"])
    assert fits or driver.machine.snapshot() == before
    driver.check()
    assert driver.do(TXN, [HOLDS] if driver.rows() else [], [], [])[:3] == [0, driver.machine.state.revision, True]


def test_what_is_undone_was_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "STEPS_MAX", 20)
    monkeypatch.setattr(budget, "ANSWER_BYTES_MAX", 600)
    driver = Driver()
    for number in range(10):
        driver.put(b"k%d" % number, b"v" * 50)
    read = [RANGE, b"k0", b"k3"]
    refused = (msgpack.packb([TXN, [], [read, [DELETE, b"k6", b"l", 0], read], []]), 1)
    ((first, second, third),) = driver.entry([refused, refused, (msgpack.packb([TXN, [HOLDS], [], []]), 1)])
    assert first[:2] == [1, "too_large"] and second[:2] == third[:2] == [1, "too_many_operations"]
    assert len(driver.rows()) == 10
    driver.check()


def test_many_puts_beside_many_deletions_are_looked_at_in_order() -> None:
    driver, many = Driver(), 12_000
    puts = [[PUT, b"p%06d" % number, b"", 0, 0] for number in range(many)]
    deletions: list[object] = [[DELETE, b"d%06d" % number, b"d%06d/" % number, 0] for number in range(many)]
    began = time.process_time()
    assert driver.do(TXN, [], [*puts, *deletions], [])[:2] == [0, 2]
    assert time.process_time() - began < 5, "not each with each"


@pytest.mark.parametrize(
    "deletion, refused",
    [
        ((b"a", b""), False), ((b"b", b""), True), ((b"bb", b""), False), ((b"d", b""), True), ((b"e", b""), False),
        ((b"a", b"b"), False), ((b"a", b"b\0"), True), ((b"b", b"c"), True), ((b"bb", b"d"), False),
        ((b"bb", b"\0"), True), ((b"d\0", b"\0"), False), ((b"\0", b"\0"), True), ((b"z", b"a"), False),
        ((b"c", b"a"), False),
    ],
)  # fmt: skip
def test_no_key_is_put_and_deleted(deletion: tuple[bytes, bytes], refused: bool) -> None:
    reply = Driver().do(TXN, [], [[PUT, b"d", b"", 0, 0], [DELETE, *deletion, 0], [PUT, b"b", b"", 0, 0]], [])
    assert (reply[:2] == [1, "duplicate_key"]) == refused and (reply[0] == 0) != refused


def test_a_value_that_is_kept_keeps_its_payload() -> None:
    driver = Driver(KV(history=0))
    driver.put_payload(b"a", b"large")
    driver.do(PUT, b"a", None, 0, 0)
    driver.do(PUT, b"a", None, 0, 0)
    assert driver.live == {(1, 0)} and driver.rows() == [[b"a", 2, 4, 3, 0, [1, 0, 5]]]
    driver.check()
    driver.put(b"a", b"small")
    assert driver.live == set()
    assert driver.do(PUT, b"none", None, 0, 0)[1] == "key_not_found"


def test_a_frame_of_many_operations_is_answered_in_order() -> None:
    driver = Driver(KV(history=0))
    ops = [msgpack.packb([PUT, b"k%d" % number, b"v", 0, 0]) for number in range(3)]
    large = msgpack.packb([TXN, [], [[PUT, b"l", [2, 1, digest(b"l")], 0, 0]], []])
    same = msgpack.packb([PUT, b"l", [0, 1, digest(b"m")], 0, 0])
    one, two = driver.entry([(ops[0], 1), (large, 3), (ops[1], 1)], [(ops[2], 1), (same, 1)])
    assert one == [[0, 2, None], [0, 3, True, [[PUT, None]]], [0, 4, None]] and two == [[0, 5, None], [0, 6, None]]
    assert driver.live == {(1, 6)}, "what one entry writes and overwrites is released once"
    driver.check()


def test_compaction_refuses_what_it_dropped_and_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_module, "PURGE_REVISIONS", 7)
    monkeypatch.setattr(kv_module, "PURGE_FACTOR", 0)
    driver = Driver()
    for number in range(50):
        driver.put_payload(b"k%d" % (number % 5), b"%d" % number)
    assert driver.do(COMPACT, 41) == [0, 51]
    assert driver.machine.state.history.first == 42 and not driver.machine.state.purgeable
    assert len(driver.live) == 15
    driver.check()
    reply = driver.ask(RANGE, b"k0", b"", 40)
    assert reply[:2] == [1, "compacted"] and reply[3] == {"compacted": 41}
    assert [row[5][0] for row in driver.rows(revision=41)] == [36, 37, 38, 39, 40]
    assert driver.do(COMPACT, 41)[1] == "compacted" and driver.do(COMPACT, 52)[1] == "future_revision"


def test_history_is_bounded_by_revisions_and_by_bytes() -> None:
    by_count = Driver(KV(history=10))
    by_bytes = Driver(KV(history_bytes=100_000))
    for number in range(40):
        by_count.put_payload(b"a", b"%d" % number)
        by_bytes.put_payload(b"a", b"%d" % number * 6000)
    assert by_count.machine.state.compacted == 31 and len(by_count.live) == 11
    assert by_bytes.machine.state.history.size <= 100_000 and len(by_bytes.live) < 12
    for driver in (by_count, by_bytes):
        driver.check()
        assert driver.ask(RANGE, b"a", b"", 3)[:2] == [1, "compacted"]


def test_leases_take_their_keys_along_and_are_kept_alive() -> None:
    driver = Driver()
    assert driver.do(GRANT, 5000, 0) == [0, 1, 1, 5000]
    assert driver.do(GRANT, 9000, 42) == [0, 1, 42, 9000]
    assert driver.do(GRANT, 9000, 42)[1] == "lease_exists"
    driver.put(b"a", b"", lease=1)
    driver.put_payload(b"b", b"body", lease=1)
    driver.put(b"c", b"", lease=42)
    assert driver.ask(TIME_TO_LIVE, 1, True)[2:] == [5000, 5000, [b"a", b"b"]]
    driver.put(b"a", b"moved", lease=42)
    driver.put(b"c", b"stays", flags=KEEP_LEASE)
    driver.pass_time(4000)
    assert driver.do(KEEP, 1) == [0, 6, 5000]
    driver.pass_time(4000)
    assert len(driver.rows()) == 3
    driver.pass_time(1001)
    assert [row[0] for row in driver.rows()] == [], "42 ended after 9 s, 1 after 4 + 5"
    assert driver.machine.state.revision == 8, "each lease's end is one revision"
    assert driver.do(KEEP, 1)[1] == "lease_not_found"
    assert driver.do(GRANT, 1000, 0)[2] == 43, "a number is not used twice"
    driver.put(b"d", b"", lease=43)
    assert driver.do(REVOKE, 43) == [0, 10, 1] and driver.rows() == [] and not driver.timers
    driver.do(COMPACT, 10)
    driver.check()
    assert driver.live == set()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_lease_that_was_granted_anew_under_its_number_ends_once(at_once: bool) -> None:
    driver = Driver()
    driver.do(GRANT, 500, 1)
    orders = [(GRANT, 1000, 5), (REVOKE, 5), (GRANT, 1000, 5), (PUT, b"a", b"", 5, 0)]
    if at_once:
        driver.entry([(msgpack.packb(order), 1) for order in orders])
    else:
        for order in orders:
            driver.do(*order)
    driver.pass_time(1000)
    assert driver.rows() == [] and not driver.machine.state.leases.rows
    assert driver.machine.state.revision == 3 and not driver.timers


def test_leases_that_are_revoked_long_before_their_time_leave_nothing_behind() -> None:
    driver = Driver()
    driver.do(GRANT, 1000, 1)
    for _ in range(1000):
        _, _, lease, _ = driver.do(GRANT, 86_400_000, 0)
        driver.do(REVOKE, lease)
    assert len(driver.machine.state.leases._heap) <= 2 + STALE_MAX + 1
    driver.pass_time(1000)
    assert not driver.timers


def test_a_new_leader_gives_every_lease_all_of_its_time() -> None:
    driver = Driver()
    driver.do(GRANT, 5000, 1)
    driver.put(b"a", b"", lease=1)
    driver.now += 4900
    driver.term = 2
    driver.pass_time(200)
    assert [row[0] for row in driver.rows()] == [b"a"]
    driver.pass_time(4700)
    assert [row[0] for row in driver.rows()] == [b"a"]
    driver.pass_time(300)
    assert driver.rows() == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x00", msgpack.packb([]), msgpack.packb([99]), msgpack.packb([PUT, b"k", b"v", 0]),
        msgpack.packb([PUT, "k", b"v", 0, 0]), msgpack.packb([PUT, b"", b"v", 0, 0]),
        msgpack.packb([PUT, b"k", b"v", -1, 0]), msgpack.packb([PUT, b"k", 1.5, 0, 0]),
        msgpack.packb([PUT, b"k", [True, 1, bytes(16)], 0, 0]), msgpack.packb([PUT, b"k", b"v" * 70_000, 0, 0]),
        msgpack.packb([DELETE, b"k", None, 0]), msgpack.packb([TXN, [], [[COMPACT, 1]], []]),
        msgpack.packb([TXN, [[b"k", b"", 9, 0, 0]], [], []]),
        msgpack.packb([TXN, [[b"k", b"", OF_VALUE, 0, 7]], [], []]),
        msgpack.packb([GRANT, 1]), msgpack.packb([KEEP, "x"]), b"\x91" * 2000, msgpack.packb({1: 2}),
    ],
)  # fmt: skip
def test_what_is_no_command_is_refused_and_changes_nothing(data: bytes) -> None:
    driver = Driver()
    driver.put(b"a", b"")
    ((reply,),) = driver.entry([(data, 1)])
    assert reply[:2] == [1, "bad_request"]
    assert driver.machine.state.revision == 2 and driver.live == set()


SCRIPT = """
import hashlib, json, sys
sys.path.insert(0, {root!r})
from tests.machines.kv.driver import Driver
from tests.machines.kv.test_machine import story
driver = story(Driver())
sections = driver.machine.snapshot()
print(json.dumps([sorted(driver.live), {{name: hashlib.sha256(data).hexdigest() for name, data in sections.items()}},
                  driver.timers]))
"""


def story(driver: Driver) -> Driver:
    """A bit of everything."""
    for number in range(30):
        driver.do(GRANT, 1000 + 100 * number, 0)
        for key in (b"x%d", b"y%d", b"z%d"):
            driver.put_payload(key % number, b"%d" % number, lease=1 + number)
            driver.put(key % (number % 7), b"%d" % number)
    driver.pass_time(2500)
    driver.do(COMPACT, 60)
    return driver


def test_processes_with_other_hash_seeds_come_to_the_same() -> None:
    root = str(Path(__file__).parents[2])
    found = []
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(root=root)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(json.loads(ran.stdout))
    assert found[0] == found[1] and found[0][0]


def test_a_captured_state_does_not_change() -> None:
    driver = story(Driver())
    frozen = driver.machine.freeze()
    before = driver.machine.snapshot()
    driver.put(b"later", b"")
    driver.do(DELETE, b"x", b"z", 0)
    driver.do(COMPACT, driver.machine.state.revision)
    driver.pass_time(5000)
    assert frozen.sections() == before
    assert driver.machine.snapshot() != before


def test_a_restored_state_writes_the_sections_that_the_one_before_writes() -> None:
    driver = Driver()
    for number in range(1500):
        driver.put(b"k%d" % (number % 7), b"v%d" % number)
    driver.do(COMPACT, 700)
    sections = driver.machine.snapshot()
    assert [name for name in sections if name.startswith("kv.log")] == [f"kv.log/{at:020}" for at in (701, 1026)]
    # As programs before this one wrote them, once they were restored: parts that begin anywhere.
    rows = [row for name in sorted(sections) if name.startswith("kv.log") for row in msgpack.unpackb(sections[name])]
    others = {name: data for name, data in sections.items() if not name.startswith("kv.log")}
    old = others | {f"kv.log/{701 + at:020}": msgpack.packb(rows[at : at + 300]) for at in range(0, len(rows), 300)}
    for written in (sections, old):
        machine = KV()
        machine.restore(written)
        again = Driver(machine)
        again.index, again.now = driver.index, driver.now
        assert again.machine.snapshot() == sections
    for number in range(1200):
        for one in (driver, again):
            one.put(b"k%d" % (number % 7), b"w%d" % number)
        if number in (300, 800):
            for one in (driver, again):
                one.do(COMPACT, 1025 if number == 300 else 2050)
    assert again.machine.snapshot() == driver.machine.snapshot()


def test_an_entry_without_frames_is_applied() -> None:
    """The session rule refused all of it: its log time counts, nothing else."""
    driver = Driver()
    driver.put_payload(b"a", b"1")
    before = driver.machine.snapshot()
    context = Context(7, driver.index + 1, 1, driver.now, 1, 2, ((0, 1), (1, 1)))
    assert driver.machine.apply_batch(context, []) == Batch([], [])
    assert driver.machine.snapshot() == before
    driver.machine.apply_batch(context._replace(index=driver.index + 2, term=2), [])
    assert driver.machine.term == 2, "a new leader is one, whatever its first entry holds"


def test_the_same_entries_give_the_states_of_the_first_release() -> None:
    draw, driver = random.Random(1), Driver()
    for number in range(400):
        key = b"k%d" % draw.randrange(20)
        what = draw.randrange(8)
        if what < 3:
            driver.put(key, b"v%d" % number)
        elif what < 5:
            driver.put_payload(key, b"p%d" % number)
        elif what == 5:
            driver.do(DELETE, key, b"", 0)
        elif what == 6:
            driver.do(GRANT, number + 1, draw.randrange(1, 50))
        else:
            driver.pass_time(draw.randrange(1, 5000))
        if draw.random() < 0.05:
            driver.term += 1
    state = msgpack.packb(sorted(driver.machine.snapshot().items()))
    assert hashlib.sha256(state).hexdigest() == "afc703c2bdfffee770c612ce023f88ad4a1ade1b71fb00e667964ad8cb581868"


def test_a_question_for_one_key_is_answered_as_a_range_of_it_is() -> None:
    driver = Driver()
    driver.put(b"here", b"1")
    driver.put(b"gone", b"2")
    driver.do(DELETE, b"gone", b"", 0)
    machine = driver.machine
    for key in (b"here", b"gone", b"never", b"", 7, None):
        for end in (b"", b"z", 0):
            for revision in (0, 2, 99, False, -1):
                short = msgpack.packb((RANGE, key, end, revision))
                # With a limit it is no question for one key as it is now any more.
                long = msgpack.packb((RANGE, key, end, revision, 0))
                one, other = (msgpack.unpackb(machine.fetch(asked, 0).answer) for asked in (short, long))
                assert one == other or one[0] == other[0] == 1, (key, end, revision)


def test_a_plain_put_does_what_one_within_a_transaction_does() -> None:
    alone, within = Driver(), Driver()
    for driver in (alone, within):
        driver.do(GRANT, 3, 60_000)
    steps: list[tuple[object, ...]] = [
        (PUT, key, value, lease, flags)
        for key in (b"a", b"b", b"", b"k" * 16_384, b"k" * 16_385, "a", 7)
        for value in (b"", b"1", b"v" * 65_536, b"v" * 65_537, None, "1", [1])
        for lease in (0, 3, 0, 9, -1, False, 0.0)
        for flags in (0, PREVIOUS, KEEP_LEASE, False, "")
    ]
    random.Random(5).shuffle(steps)
    for number, step in enumerate(steps[:1500]):
        reply, other = alone.do(*step), within.do(TXN, [], [list(step)], [])
        if other[0] == 0:
            other = [0, other[1], other[3][0][1]]
        assert reply == other, step
        if number % 7 == 0:
            assert alone.do(DELETE, b"a", b"", 0) == within.do(DELETE, b"a", b"", 0)
    assert alone.machine.snapshot() == within.machine.snapshot()
    alone.check()


def test_a_payload_in_pieces_is_refused_so_that_the_engine_lets_it_go() -> None:
    """It was acknowledged, read back as nothing, and its pieces never died."""
    pieces = tuple(PayloadRef(7, index, 0, 1, 1 << 20, bytes(16)) for index in (3, 4))
    data = msgpack.packb([PUT, b"k", [0, 2 << 20, bytes(16)], 0, 0])
    long = Frame(1, 0, 1, len(data), 0, 0, 0, 0, data)._replace(pieces=pieces)
    plain = long._replace(commands=msgpack.packb([PUT, b"p", b"v", 0, 0]), pieces=(), first=1)
    kv = KV()
    context = Context(7, 5, 1, 1000, 1, 2)
    found = kv.apply_batch(context, (long, plain))
    refused, put = found.replies
    assert isinstance(refused, Reject) and refused.code == "bad_request" and isinstance(put, bytes)
    # What is refused the engine releases; of the other one nothing is kept.
    assert found.effects == [Release(Position(5, 1), Position(5, 2))]
    with pytest.raises(Reject, match="in one piece"):
        kv.apply(context, data, (PayloadRef(7, 5, 0, 1, 0, bytes(16)), *pieces))
    assert list(kv.state.keys) == [b"p"] and not list(kv.live_refs())
