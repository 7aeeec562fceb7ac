"""The KV machine against a plain dictionary, and against itself restored at every index."""

from __future__ import annotations

import copy
from typing import Any

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from logyard.engine.machine import Applied, Batch
from logyard.machines.kv import KV
from logyard.machines.kv.command import (
    BY_KEY,
    BY_MOD,
    BY_VALUE,
    COMPACT,
    COUNT_ONLY,
    DELETE,
    DESCENDING,
    EQUAL,
    GRANT,
    KEEP,
    KEYS_ONLY,
    OF_VERSION,
    PREVIOUS,
    PUT,
    RANGE,
    REVOKE,
    TXN,
    UNCOUNTED,
)
from logyard.machines.kv.digest import digest

from .driver import Driver

KEYS = st.sampled_from([b"a", b"b", b"ba", b"c"])
ENDS = st.sampled_from([b"", b"b", b"c", b"\0"])
BODIES = st.binary(max_size=3)
SEEDS = st.integers(0, 3)

Row = tuple[int, int, int, int, bytes]
"""create, mod, version, lease, value"""


def value_of(sent: dict[tuple[int, int], bytes], value: Any) -> bytes:
    """A value's bytes, wherever they lie."""
    return value if isinstance(value, bytes) else sent[value[0], value[1]]


class Model(RuleBasedStateMachine):
    """`states` holds a whole dictionary for each revision."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.states: list[dict[bytes, Row]] = [{}, {}]
        self.sent: dict[tuple[int, int], bytes] = {}
        self.leases: dict[int, tuple[int, int]] = {}
        self.compacted = 0

    # What the model does.

    @property
    def now(self) -> dict[bytes, Row]:
        return self.states[-1]

    def put(self, into: dict[bytes, Row], key: bytes, value: bytes, lease: int) -> None:
        revision = len(self.states)
        before = into.get(key)
        create, number = (before[0], before[2]) if before else (revision, 0)
        into[key] = (create, revision, number + 1, lease, value)

    def changed(self, new: dict[bytes, Row]) -> None:
        if new != self.now:
            self.states.append(new)

    def matching(self, state: dict[bytes, Row], key: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [key] if key in state else []
        return sorted(one for one in state if one >= key and (end == b"\0" or one < end))

    def row(self, key: bytes, row: Row) -> list[Any]:
        create, mod, number, lease, value = row
        return [key, create, mod, number, lease, value]

    def shown(self, rows: list[Any]) -> list[Any]:
        return [[*row[:5], value_of(self.sent, row[5])] for row in rows]

    # What both do.

    @rule(key=KEYS, value=BODIES, payload=st.booleans(), lease=SEEDS, previous=st.booleans())
    def put_one(self, key: bytes, value: bytes, payload: bool, lease: int, previous: bool) -> None:
        flags = PREVIOUS if previous else 0
        given: Any = [0, len(value), digest(value)] if payload else value
        reply = self.driver.do(PUT, key, given, lease, flags)
        if lease and lease not in self.leases:
            assert reply[:2] == [1, "lease_not_found"]
            return
        self.sent[self.driver.index, 0] = value
        before = self.now.get(key)
        new = dict(self.now)
        self.put(new, key, value, lease)
        self.changed(new)
        assert reply[:2] == [0, len(self.states) - 1]
        assert (self.shown([reply[2]])[0] if reply[2] else None) == (
            self.row(key, before) if before and previous else None
        )

    @rule(key=KEYS, end=ENDS)
    def delete(self, key: bytes, end: bytes) -> None:
        reply = self.driver.do(DELETE, key, end, PREVIOUS)
        gone = self.matching(self.now, key, end)
        rows = [self.row(one, self.now[one]) for one in gone]
        self.changed({one: row for one, row in self.now.items() if one not in gone})
        assert reply[:3] == [0, len(self.states) - 1, len(gone)] and self.shown(reply[3]) == rows

    @rule(key=KEYS, other=KEYS, value=BODIES, expected=st.integers(0, 2))
    def transact(self, key: bytes, other: bytes, value: bytes, expected: int) -> None:
        reply = self.driver.do(
            TXN,
            [[key, b"", OF_VERSION, EQUAL, expected]],
            [[PUT, key, [1, len(value), digest(value)], 0, 0], [DELETE, other, b"", 0], [RANGE, b"\0", b"\0"]],
            [[PUT, other, value, 0, 0], [RANGE, key, b""]],
            records=2,
        )
        holds = (self.now[key][2] if key in self.now else 0) == expected
        if holds and key == other:
            assert reply[:2] == [1, "duplicate_key"]
            return
        new = dict(self.now)
        if holds:
            self.sent[self.driver.index, 1] = value
            self.put(new, key, value, 0)
            new.pop(other, None)
            asked = self.matching(new, b"\0", b"\0")
        else:
            self.put(new, other, value, 0)
            asked = self.matching(new, key, b"")
        self.changed(new)
        assert reply[:3] == [0, len(self.states) - 1, holds]
        assert self.shown(reply[3][-1][1]) == [self.row(one, new[one]) for one in asked]

    @rule(key=KEYS, other=KEYS, value=BODIES, payload=st.booleans(), lease=SEEDS)
    def transact_and_sort(self, key: bytes, other: bytes, value: bytes, payload: bool, lease: int) -> None:
        """What only a read behind the writes refuses has changed nothing."""
        given: Any = [0, len(value), digest(value)] if payload else value
        read = [RANGE, b"\0", b"\0", 0, 0, 0, BY_VALUE, 0, 0, [0, 0, 0, 0]]
        writes = [[PUT, key, given, lease, 0], *([[DELETE, other, b"", 0]] if other != key else [])]
        reply = self.driver.do(TXN, [], [*writes, read], [])
        if reply[0]:
            assert reply[1] == ("lease_not_found" if lease and lease not in self.leases else "value_is_payload")
            return
        new = dict(self.now)
        self.put(new, key, value, lease)
        if other != key:
            new.pop(other, None)
        self.changed(new)
        assert reply[3][-1][1] == [self.row(one, new[one]) for one in sorted(new, key=lambda one: (new[one][4], one))]

    @rule(back=st.integers(0, 6), key=KEYS, end=ENDS, limit=st.integers(0, 3))
    def read_back(self, back: int, key: bytes, end: bytes, limit: int) -> None:
        revision = max(1, len(self.states) - 1 - back)
        reply = self.driver.ask(RANGE, key, end, revision, limit)
        if revision < self.compacted:
            assert reply[:2] == [1, "compacted"]
            return
        state = self.states[revision]
        keys = self.matching(state, key, end)
        taken = keys[:limit] if limit else keys
        assert self.shown(reply[2]) == [self.row(one, state[one]) for one in taken]
        assert reply[3:] == [len(taken) < len(keys), len(keys)]

    @rule(
        back=st.integers(0, 6), key=KEYS, end=ENDS, limit=st.integers(0, 3), order=st.sampled_from([0, DESCENDING]),
        flags=st.sampled_from([0, KEYS_ONLY, COUNT_ONLY]), sort=st.sampled_from([BY_KEY, BY_MOD]),
        size=st.integers(0, 200), least=st.integers(0, 9),
    )  # fmt: skip
    def read_without_a_count(
        self, back: int, key: bytes, end: bytes, limit: int, order: int, flags: int, sort: int, size: int, least: int
    ) -> None:
        revision = max(1, len(self.states) - 1 - back)
        for bounds in ([0, 0, 0, 0], [least, least + 3, 0, 0]):
            counted, other = [
                self.driver.ask(RANGE, key, end, revision, limit, flags | more, sort, order, size, bounds)
                for more in (0, UNCOUNTED)
            ]
            assert other[:4] == counted[:4]

    @rule(back=st.integers(0, 6))
    def compact(self, back: int) -> None:
        revision = max(1, len(self.states) - 1 - back)
        reply = self.driver.do(COMPACT, revision)
        assert (reply[0] == 0) == (revision > self.compacted)
        self.compacted = max(self.compacted, revision)

    @rule(lease=st.integers(1, 3), ttl=st.integers(100, 3000))
    def grant(self, lease: int, ttl: int) -> None:
        reply = self.driver.do(GRANT, ttl, lease)
        assert (reply[0] == 0) == (lease not in self.leases)
        self.leases.setdefault(lease, (ttl, self.driver.now + ttl))

    @rule(lease=st.integers(1, 3))
    def keep(self, lease: int) -> None:
        reply = self.driver.do(KEEP, lease)
        assert (reply[0] == 0) == (lease in self.leases)
        if lease in self.leases:
            ttl = self.leases[lease][0]
            self.leases[lease] = ttl, self.driver.now + ttl

    @rule(lease=st.integers(1, 3))
    def revoke(self, lease: int) -> None:
        reply = self.driver.do(REVOKE, lease)
        assert (reply[0] == 0) == (lease in self.leases)
        if lease in self.leases:
            self.end(lease)

    def end(self, lease: int) -> None:
        del self.leases[lease]
        self.changed({key: row for key, row in self.now.items() if row[3] != lease})

    @rule(milliseconds=st.integers(1, 2000))
    def pass_time(self, milliseconds: int) -> None:
        self.driver.pass_time(milliseconds)
        for deadline, lease in sorted((deadline, lease) for lease, (_, deadline) in self.leases.items()):
            if deadline <= self.driver.now:
                self.end(lease)

    @rule()
    def restore(self) -> None:
        machine = KV()
        sections = self.driver.machine.snapshot()
        machine.restore(sections)
        assert machine.snapshot() == sections
        self.driver.machine = machine

    @invariant()
    def agree(self) -> None:
        assert self.shown(self.driver.rows()) == [self.row(key, self.now[key]) for key in sorted(self.now)]
        assert self.driver.machine.state.revision == len(self.states) - 1
        self.driver.check()

    @invariant()
    def events_lead_from_state_to_state(self) -> None:
        history = self.driver.machine.state.history
        for revision in range(history.first, history.end):
            state = dict(self.states[revision - 1])
            for version, before in history.at(revision):
                key, mod, _, create, number, lease, value = version
                was = None if before is None or before[6] is None else before
                assert mod == revision and (was is not None) == (key in state)
                if was is not None:
                    assert (was[3], was[1], was[4], was[5], value_of(self.sent, was[6])) == state[key]
                if value is None:
                    del state[key]
                else:
                    state[key] = (create, mod, number, lease, value_of(self.sent, value))
            assert state == self.states[revision]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def replay(machine: KV, entry: Any) -> Batch | Applied:
    """One recorded step."""
    kind, context, what = entry
    if kind == "entry":
        return machine.apply_batch(context, what)
    return machine.apply(context, what, ()) if kind == "append" else machine.on_timer(context, what)


def test_a_machine_restored_at_any_index_goes_on_as_the_one_that_was_not() -> None:
    driver = Driver(KV(history=12))
    for number in range(12):
        driver.do(GRANT, 900 + 150 * number, 0)
        driver.put_payload(b"p%d" % (number % 4), b"%d" % number, lease=1 + number)
        driver.entry(
            [(msgpack.packb([PUT, b"k%d" % (number % 5), b"v", 0, 0]), 1), (msgpack.packb([KEEP, 1 + number]), 1)],
            [(msgpack.packb([DELETE, b"k%d" % (number % 3), b"", 0]), 1)],
        )
        driver.pass_time(300)
    driver.do(COMPACT, driver.machine.state.revision - 3)
    driver.term = 2
    driver.pass_time(4000)
    steps = driver.entries
    plain = KV(history=12)
    views, outcomes = [plain.snapshot()], []
    for step in steps:
        outcomes.append(copy.deepcopy(replay(plain, step)))
        views.append(plain.snapshot())
    for at in range(len(steps)):
        machine = KV(history=12)
        machine.restore(views[at])
        for number in range(at, min(at + 12, len(steps))):
            assert replay(machine, steps[number]) == outcomes[number], (at, number)
            assert machine.snapshot() == views[number + 1]
