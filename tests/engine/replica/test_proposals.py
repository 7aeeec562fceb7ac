"""The proposal queue of one group, alone: what becomes an entry, who is answered when, and what the books hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from logyard.engine.entry import Entry, encode_system, frames_of
from logyard.engine.machine import Reject
from logyard.engine.replica.proposals import LOW_BATCH, LOW_TURNS, PLACE, ProposalQueue, Shape
from logyard.engine.replica.sessions import Sessions
from logyard.protocol.errors import Busy, NotLeader
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import OK, Sink

from .doubles import Admission, Client, Core

SESSION = 4242
CLIENT = 77


class Rig:
    def __init__(self) -> None:
        self.core, self.books, self.client = Core(), Admission(), Client()
        self.core.applied = self.core.lead_index
        self.queue = ProposalQueue(cast(Any, self.core), self.books)
        self.kept: list[Entry] = []
        self.refused: list[str] = []
        self.seen: list[int] = []
        self.shape = Shape(1000, 100, self.kept.append, self.refused.append)

    def add(
        self, request: int, body: bytes = b"x", session: int = 0, sequence: int = 0, *, sink: Sink | None = None,
        records: int = 1, reserved: bool = False, early: bool = False, low: bool = False,
    ) -> None:  # fmt: skip
        many = [(b"", body)] * records
        frame = memoryview(b"".join(encode_frame(many, command=b"c", session=session, sequence=sequence)))
        self.queue.add(frame, sink or self.client, request, records, session, reserved, early, low)

    def turn(self, table: Sessions | None = None) -> None:
        """What the ready loop does with a leader's queue."""
        if self.queue.own:
            self.queue.propose_own(5)
        if self.queue.low:
            self.queue.let_low()
        if self.queue.queue and (not self.queue.guarded or self.queue.sort(table, self.seen.append)):
            self.queue.propose(5, self.shape)

    def apply(self, index: int, *replies: bytes | Reject) -> None:
        owed = self.queue.settle(index)
        assert owed is not None and owed.term == self.core.term
        for pending, reply in zip(owed.frames, replies, strict=True):
            pending.answer(reply)

    def check_settled(self) -> None:
        assert self.queue.is_idle and self.queue.bytes == 0
        assert self.books.queued == self.books.inflight == 0


def told(rig: Rig) -> dict[int, bytes | str]:
    return rig.client.once()


def test_frames_that_wait_share_an_entry_up_to_its_limits() -> None:
    rig = Rig()
    for number in range(3):
        rig.add(number, b"a" * 400)
    rig.add(3, b"b" * 5000)
    rig.add(4, records=60)
    rig.add(5, records=60)
    rig.turn()
    sizes = [len(frames_of(entry.data)) for entry, _ in rig.core.proposed]
    assert sizes == [2, 1, 1, 1, 1], "too many bytes, one frame above the limit alone, too many records"
    assert rig.kept == [entry for entry, _ in rig.core.proposed] and rig.books.queued == 0 < rig.books.inflight
    for index, count in enumerate(sizes, 1):
        rig.apply(index, *[b"%d" % index] * count)
    assert told(rig) == {0: b"1", 1: b"1", 2: b"2", 3: b"3", 4: b"4", 5: b"5"}
    rig.check_settled()


def test_what_the_books_refuse_is_not_queued_but_for_what_frees_space() -> None:
    rig = Rig()
    rig.books.full = True
    with pytest.raises(Busy):
        rig.add(1, session=SESSION, sequence=1, early=True, low=True)
    rig.check_settled()
    rig.add(2, reserved=True)
    rig.turn()
    assert [reserved for _, reserved in rig.core.proposed] == [True] and not rig.queue.urgent


def test_what_the_core_refuses_is_answered_and_counted() -> None:
    rig = Rig()
    rig.core.refusal = Busy("the window", 0.1)
    rig.add(1)
    rig.queue.add_own(encode_system("timer", "t", 1), rig.client, 2)
    rig.turn()
    assert told(rig) == {2: "busy", 1: "busy"} and rig.refused == ["the window"] and not rig.kept
    rig.check_settled()


def test_commands_of_the_engine_go_first_in_an_entry_of_their_own_and_cost_no_budget() -> None:
    rig = Rig()
    rig.add(1)
    rig.queue.add_own(encode_system("upgrade", 2), rig.client, 2)
    rig.turn()
    assert [reserved for _, reserved in rig.core.proposed] == [True, False] and rig.kept == [rig.core.proposed[1][0]]
    held = rig.books.inflight
    rig.apply(1, b"own")
    assert rig.books.inflight == held
    rig.apply(2, Reject("no", "never"))
    assert told(rig) == {2: b"own", 1: "no"}
    rig.check_settled()


def test_a_storm_of_copies_under_way_has_one_outcome() -> None:
    rig = Rig()
    rig.add(0, session=SESSION, sequence=1)
    rig.turn()
    for request in range(1, 20):
        rig.add(request, session=SESSION, sequence=1)
        if request % 3 == 0:
            rig.turn()
    rig.turn()
    assert len(rig.core.proposed) == 1 and not rig.client.told
    assert rig.books.queued == 0 and rig.books.inflight == rig.queue.inflight_bytes, "copies cost nothing any more"
    rig.apply(1, b"once")
    assert told(rig) == {request: b"once" for request in range(20)}
    rig.check_settled()


def test_a_duplicate_of_an_applied_frame_is_answered_at_once_and_shows_that_its_client_lives() -> None:
    rig, table = Rig(), Sessions()
    table.register(SESSION, CLIENT, 60_000)
    assert table.take(SESSION, 1) is None
    table.keep(SESSION, 1, b"first")
    rig.add(1, session=SESSION, sequence=1)
    rig.add(2, session=SESSION, sequence=2)
    rig.turn(table)
    assert told(rig) == {1: b"first"} and rig.seen == [CLIENT, CLIENT] and len(rig.core.proposed) == 1


def test_a_new_leader_holds_frames_of_sessions_back_until_it_knows_what_was_applied() -> None:
    rig = Rig()
    rig.core.lead_index = 7
    rig.add(1, session=SESSION, sequence=1)
    rig.add(2)
    rig.turn()
    assert not rig.core.proposed and rig.queue.guarded
    rig.core.applied = 7
    rig.turn()
    assert len(rig.core.proposed) == 1 and not rig.queue.guarded


@pytest.mark.parametrize("quorum_first", [False, True])
def test_an_early_frame_is_answered_with_its_place_once(quorum_first: bool) -> None:
    rig = Rig()
    rig.add(1, session=SESSION, sequence=1, early=True)
    rig.add(2, session=SESSION, sequence=1, early=True)
    rig.add(3, early=True)
    rig.add(4)
    rig.turn()
    rig.queue.durable()
    assert not rig.client.told, "it is not on the disk yet"

    def stable() -> None:
        rig.core.log.stable = 1
        rig.queue.durable()

    steps: list[Callable[[], None]] = [stable, lambda: rig.apply(1, b"a", b"b", b"c")]
    for step in reversed(steps) if quorum_first else steps:
        step()
    place = PLACE.pack(1, 3)
    assert told(rig) == {1: place, 2: b"a", 3: place, 4: b"c"}, "a copy gets what came of the first one"
    rig.check_settled()


def test_an_early_frame_whose_entry_another_leader_replaced_is_told_so() -> None:
    rig = Rig()
    rig.add(1, early=True)
    rig.turn()
    rig.queue.fail_proposed(NotLeader(2), 1)
    rig.core.log.terms[1] = 4
    rig.core.log.stable = 1
    rig.queue.durable()
    assert told(rig) == {1: "not_leader"}
    rig.check_settled()


def test_low_priority_waits_for_the_others_but_not_for_ever() -> None:
    rig = Rig()
    for request in range(LOW_BATCH + 1):
        rig.add(request, low=True)
    rig.add(100)
    rig.turn()
    assert len(rig.core.proposed) == 1 and len(frames_of(rig.core.proposed[0][0].data)) == 1
    rig.turn()
    assert len(frames_of(rig.core.proposed[1][0].data)) == LOW_BATCH
    rig.add(101)
    for _ in range(LOW_TURNS - 1):
        assert not rig.queue.let_low()
    assert rig.queue.low is not None
    rig.queue.let_low()
    assert rig.queue.low is None and rig.queue.queue is not None and len(rig.queue.queue) == 2


def test_all_that_is_queued_fails_with_its_leader() -> None:
    rig = Rig()
    rig.add(1)
    rig.turn()
    rig.add(2, low=True)
    rig.add(3, session=SESSION, sequence=1, reserved=True)
    rig.queue.add_own(encode_system("delete"), rig.client, 4)
    rig.queue.fail(NotLeader(2))
    assert told(rig) == {2: "not_leader", 3: "not_leader", 4: "not_leader"}, "what is proposed is not known yet"
    rig.apply(1, b"done")
    assert told(rig)[1] == b"done"
    rig.check_settled()


def test_only_what_was_replaced_fails() -> None:
    rig = Rig()
    for request in range(3):
        rig.add(request)
        rig.turn()
    rig.queue.fail_proposed(NotLeader(2), 2)
    assert told(rig) == {1: "not_leader", 2: "not_leader"}
    rig.apply(1, b"kept")
    assert told(rig)[0] == b"kept" and OK == 0
    rig.check_settled()
