"""The queue's table of semantics (docs/machines/queue.md), row by row; each bench also compares with the model and with
a machine restored before every entry."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from itertools import pairwise
from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Append, Context, Deliver, End, Frame, Reject, Release, Timer
from logyard.machines.queue import Queue
from logyard.machines.queue import command as qc
from logyard.machines.queue.options import QueueOptions, queue_options
from logyard.machines.queue.runs import Run, Shelf
from logyard.machines.registry import create_machine
from logyard.protocol import frame as client_frame
from logyard.protocol import queue as queue_wire
from logyard.protocol.errors import BadRequest
from logyard.protocol.frame import FRAME, FRAME_BYTES

from .model import Bench, attach, cancel, credit, detach, extend, frame_of, publish, purge, resend, settle

A, B, C = (1, 1), (2, 1), (3, 1)


def held(bench: Bench, key: tuple[int, int]) -> list[int]:
    """Ids that a consumer holds, by tag."""
    reader = bench.model.readers[key]
    return [letter.id for _, (letter, _) in sorted(reader.held.items())]


def ids(bench: Bench, where: str) -> list[int]:
    return [one.id for one in bench.model.at(where)]


def bench(**options: Any) -> Bench:
    return Bench(QueueOptions(**options))


def test_first_in_first_out_and_gone_when_acknowledged() -> None:
    b = bench()
    assert b.apply(publish([5, 6]), publish([7])) == [qc.PUBLISH_REPLY.pack(1, 2), qc.PUBLISH_REPLY.pack(3, 1)]
    b.apply(attach(A, credit=2))
    assert held(b, A) == [1, 2]
    assert b.apply(settle(A, qc.ACK, (1, 1)), settle(A, qc.ACK, (1, 1))) == [qc.COUNT_REPLY.pack(n, 0) for n in (1, 0)]
    assert held(b, A) == [2, 3]
    b.apply(settle(A, qc.ACK, (1, 99)))
    assert not b.model.letters and tuple(b.live.released_before) == (b.index + 1, 0)


def test_what_comes_back_is_first_again_in_its_order() -> None:
    b = bench()
    b.apply(publish([1] * 6), attach(A, credit=4))
    b.apply(settle(A, qc.REQUEUE, (3, 3)), detach(A))
    b.apply(attach(B, credit=6))
    assert held(b, B) == [1, 2, 3, 4, 5, 6]
    assert [letter.deliveries for letter, _ in b.model.readers[B].held.values()] == [0, 0, 1, 0, 0, 0], (
        "who leaves gives back what did not fail"
    )
    b.end_session(2)
    b.apply(attach(A))
    assert [letter.deliveries for letter, _ in b.model.readers[A].held.values()] == [1, 1, 2, 1, 1, 1]


def test_a_delivery_limit_makes_dead_letters() -> None:
    b = bench(delivery_limit=3)
    b.apply(publish([1, 1]), attach(A))
    for tag in (1, 3, 4):
        assert not ids(b, "dead")
        b.apply(settle(A, qc.REQUEUE, (tag, tag)))
    assert ids(b, "dead") == [1] and held(b, A) == [2]
    b.apply(settle(A, qc.REJECT, (2, 2)))
    b.apply(attach(B, dead=True))
    assert held(b, B) == [1, 2] and [one.reason for one, _ in b.model.readers[B].held.values()] == [
        "delivery_limit", "rejected"
    ]  # fmt: skip
    b.apply(settle(B, qc.REQUEUE, (1, 1)))
    assert held(b, B) == [2, 1], "dead letters have no limit"
    b.apply(settle(B, qc.REJECT, (2, 3)))
    assert not b.model.letters


def test_who_waits_for_dead_letters_gets_what_the_length_drops_at_once() -> None:
    b = bench(max_length=2)
    b.apply(attach(A, dead=True, credit=2))
    b.apply(publish([1] * 5))
    assert held(b, A) == [1, 2] and ids(b, "dead") == [3] and ids(b, "ready") == [4, 5]
    b.apply(settle(A, qc.ACK, (1, 2)))
    assert held(b, A) == [3]


def test_no_dead_letters_means_gone() -> None:
    b = bench(dead_letters=False, ttl_ms=100)
    b.apply(publish([1, 1, 1]), attach(A, credit=1))
    b.apply(settle(A, qc.REJECT, (1, 1)))
    b.now += 200
    b.ring()
    assert held(b, A) == [2] and not ids(b, "ready")
    b.apply(settle(A, qc.REQUEUE, (2, 2)))
    assert not b.model.letters


def test_a_lease_ends_by_log_time_and_can_be_renewed() -> None:
    b = bench(lease_ms=1000)
    b.apply(publish([1] * 3), attach(A, credit=3), attach(B, priority=-1))
    b.now += 900
    b.apply(extend(A, (2, 2)))
    b.now += 200
    b.ring()
    assert held(b, B) == [] and held(b, A) == [2, 1, 3], "it has the higher priority, and room again"
    b.apply(credit(A, 0))
    b.now += 2000
    b.ring()
    assert held(b, A) == [] and held(b, B) == [1, 2, 3]
    assert b.apply(settle(A, qc.ACK, (1, 9))) == [qc.COUNT_REPLY.pack(0, 0)], "too late"


def test_a_time_to_live_counts_where_it_waits_and_when_it_comes_back() -> None:
    b = bench()
    b.apply(publish([1], ttl=100), publish([1, 1]), publish([1, 1], ttl=300))
    b.now += 150
    b.ring()
    assert ids(b, "ready") == [2, 3, 4, 5] and ids(b, "dead") == [1]
    b.apply(attach(A, credit=4))
    b.now += 300
    b.ring()
    assert held(b, A) == [2, 3, 4, 5], "who holds it may finish"
    b.apply(settle(A, qc.REQUEUE, (3, 4)), credit(A, 0))
    assert ids(b, "dead") == [1, 4, 5]


def test_the_shorter_time_to_live_counts() -> None:
    b = bench(ttl_ms=200)
    b.apply(publish([1]), publish([1], ttl=100), publish([1], ttl=900))
    b.now += 120
    b.ring()
    assert ids(b, "dead") == [2]
    b.now += 100
    b.apply()
    assert ids(b, "dead") == [2, 1, 3], "also when no timer rang"


def test_a_full_queue_drops_the_oldest_of_normal_priority() -> None:
    b = bench(max_length=3)
    b.apply(publish([1, 1], priority=1), publish([1, 1]))
    assert ids(b, "dead") == [3] and set(ids(b, "ready")) == {1, 2, 4}
    b.apply(publish([1, 1, 1], priority=1))
    assert set(ids(b, "ready")) == {5, 6, 7}
    small = bench(max_bytes=100)
    small.apply(publish([60, 30, 30]))
    assert ids(small, "ready") == [2, 3]
    small.apply(publish([500]))
    assert ids(small, "ready") == [] and len(ids(small, "dead")) == 4, "what is larger than the bound goes at once"


def test_a_full_queue_refuses() -> None:
    b = bench(max_length=3, overflow="reject")
    b.apply(publish([1, 1]))
    assert b.apply(publish([1, 1])) == ["queue_full"]
    b.apply(attach(A, credit=1))
    b.apply(publish([1, 1]))
    b.apply(credit(A, 2))
    # A frame before it in the same entry went to a consumer: there is room.
    machine = Queue(QueueOptions(max_length=1, overflow="reject"))
    frames = [attach(A), publish([1])._replace(first=1), publish([1])._replace(first=2)]
    batch = machine.apply_batch(Context(1, 1, 1, 5, 1, 3), frames)
    assert not any(isinstance(reply, Reject) for reply in batch.replies)


def test_two_priorities_share_two_to_one() -> None:
    b = bench()
    b.apply(publish([1] * 6), publish([1] * 6, priority=1))
    b.apply(attach(A, credit=1))
    order = []
    for tag in range(1, 13):
        order += [held(b, A)[0] > 6]
        b.apply(settle(A, qc.ACK, (tag, tag)))
    assert sum(order[:9]) == 6 and order[9:] == [False] * 3
    many = bench()
    many.apply(publish([1] * 9), publish([1] * 9, priority=1), attach(B, credit=9))
    assert sum(one > 9 for one in held(many, B)) == 6


def test_who_has_no_room_takes_no_turn_of_a_priority() -> None:
    """Those that were asked in vain took the turns of the messages of normal priority."""
    b = bench()
    b.apply(attach(B, credit=5, size=1, auto=False), attach(C, credit=5, size=1, auto=False), publish([1, 1]))
    b.apply(publish([1] * 6), publish([1] * 6, priority=1), attach(A, credit=1))
    normal = 0
    for tag in range(1, 31):
        was_normal = {one.id: one.priority == 0 for one in b.model.letters.values()}[held(b, A)[0]]
        normal += was_normal
        b.apply(settle(A, qc.ACK, (tag, tag)), publish([1], priority=int(not was_normal)))
    assert normal == 10


def test_consumers_share_and_higher_priority_goes_first() -> None:
    b = bench()
    b.apply(attach(A, credit=4), attach(B, credit=4), attach(C, credit=2, priority=5))
    b.apply(publish([1] * 8))
    assert (held(b, C), held(b, A), held(b, B)) == ([1, 2], [3, 4, 5], [6, 7, 8])
    b.apply(settle(A, qc.ACK, (1, 9)), settle(B, qc.ACK, (1, 9)))
    for _ in range(4):
        b.apply(publish([1]))
    assert (held(b, A), held(b, B)) == ([9, 11], [10, 12]), "in turn"


def test_credit_in_messages_and_bytes() -> None:
    b = bench()
    b.apply(publish([40] * 5), attach(A, credit=10, size=100))
    assert held(b, A) == [1, 2]
    b.apply(publish([500]), settle(A, qc.ACK, (1, 2)))
    b.apply(settle(A, qc.ACK, (3, 4)))
    assert held(b, A) == [5]
    b.apply(settle(A, qc.ACK, (5, 5)))
    assert held(b, A) == [6], "one alone may be larger"
    exact = bench()
    exact.apply(publish([1] * 5), attach(A, credit=2, auto=False))
    exact.apply(settle(A, qc.ACK, (1, 2)))
    assert held(exact, A) == []
    exact.apply(credit(A, 1))
    assert held(exact, A) == [3]


def test_a_single_active_consumer() -> None:
    b = bench(single_active=True)
    b.apply(attach(A, credit=2), attach(B), publish([1] * 4))
    assert (held(b, A), held(b, B)) == ([1, 2], [])
    b.apply(attach(C, priority=1))
    b.apply(settle(A, qc.ACK, (1, 1)))
    assert (held(b, A), held(b, C)) == ([2], []), "it finishes what it holds, and gets nothing more"
    b.apply(settle(A, qc.ACK, (2, 2)))
    assert (held(b, A), held(b, C)) == ([], [3, 4])
    b.end_session(3)
    assert (held(b, A), held(b, B)) == ([3, 4], []), "the first of those that wait"
    rows = msgpack.unpackb(b.machine.query(msgpack.packb(["consumers"])))
    assert [(row[0], row[-1]) for row in rows] == [(1, True), (2, False)]


def test_delayed_messages_come_in_time_and_can_be_cancelled() -> None:
    b = bench(delayed_max=4)
    b.apply(publish([1], delay=500), publish([1, 1], delay=200), publish([1]), publish([1], delay=b.now + 300, at=True))
    assert b.apply(publish([1], delay=9)) == ["queue_full"]
    assert ids(b, "ready") == [4]
    assert b.apply(cancel(3, 4, 99)) == [qc.COUNT_REPLY.pack(1, 0)], "what is ready can't be cancelled"
    b.now += 1000
    b.ring()
    assert ids(b, "ready") == [4, 2, 5, 1], "by the time they were due"
    b.apply(publish([1], delay=b.now - 5, at=True))
    assert ids(b, "ready")[-1] > 5, "in the past is now"


def test_a_delayed_message_lives_from_when_it_is_due_whenever_that_is_noticed() -> None:
    for late, where in ((0, "ready"), (99, "ready"), (100, "dead")):
        b = bench()
        b.apply(publish([1], delay=500, ttl=100), publish([1], delay=b.now + 500, at=True, ttl=100))
        b.now += 500 + late
        b.ring()
        assert ids(b, where) == [1, 2], f"{late} ms late"


def test_a_publisher_repeats_itself_in_vain() -> None:
    b = bench(max_length=4, overflow="reject")
    b.apply(publish([1, 1, 1], publisher=9, sequence=1))
    assert b.apply(publish([1, 1, 1], publisher=9, sequence=1)) == [qc.PUBLISH_REPLY.pack(0, 0)], "also when it is full"
    assert b.apply(publish([1, 1], publisher=9, sequence=3)) == [qc.PUBLISH_REPLY.pack(4, 1)]
    assert b.apply(publish([1], publisher=9, sequence=9)) == ["queue_full"]
    b.apply(attach(A))
    b.apply(publish([7, 8], publisher=9, sequence=8))
    b.apply(publish([7, 8], publisher=8, sequence=1))
    assert [one.size for one in b.model.at("held")] == [1, 1, 1, 1, 7, 8, 7, 8]


def test_purge_takes_what_waits_and_not_what_is_held() -> None:
    b = bench()
    b.apply(publish([1] * 4), attach(A, credit=1), publish([1], delay=50))
    b.apply(settle(A, qc.REJECT, (1, 1)))
    assert b.apply(purge(qc.READY)) == [qc.COUNT_REPLY.pack(2, 0)]
    assert b.apply(purge(qc.DELAYED | qc.DEAD_LETTERS)) == [qc.COUNT_REPLY.pack(2, 0)]
    assert list(b.model.letters.values()) == b.model.at("held")


def test_a_purge_between_publications_of_one_entry_takes_the_first_only() -> None:
    b = bench()
    b.apply(publish([1, 1]), purge(qc.READY), publish([1, 2, 3]))
    assert ids(b, "ready") == [3, 4, 5]
    b.apply(purge(qc.READY), publish([1]), purge(qc.READY))
    assert not b.model.letters


def test_lost_deliveries_are_made_again() -> None:
    b = bench()
    b.apply(publish([1] * 4), attach(A, credit=4))
    b.apply(settle(A, qc.ACK, (2, 2)))
    batch = b.machine.apply_batch(Context(1, 50, 1, b.now, 1, 1), [resend(A, 2)])
    tags = [msgpack.unpackb(one.tag) for one in batch.effects if isinstance(one, Deliver)]
    assert [(first, end, [row[0] for row in rows]) for _, first, end, rows in tags] == [(2, 5, [3])]
    again = [one for one in b.machine.on_listen(1) if isinstance(one, Deliver)]
    assert [row[:2] for one in again for row in msgpack.unpackb(one.tag)[3]] == [[1, 1], [3, 2]]
    assert b.machine.on_listen(2) == []


def test_large_deliveries_come_in_parts() -> None:
    machine = Queue()
    machine.apply_batch(Context(1, 1, 1, 5, 1, 1), [attach(A, size=8 << 20)])
    sizes = [700_000, 700_000, 100, 100, 2_000_000, 5]
    for frame in (publish(sizes), publish([600_000] * 4)):
        batch = machine.apply_batch(Context(1, 2, 1, 5, 1, frame.records), [frame])
        parts = [msgpack.unpackb(one.tag) for one in batch.effects if isinstance(one, Deliver)]
        ends = [(first, end) for _, first, end, _ in parts]
        assert len(parts) == 4 and all(one[1] == two[0] for one, two in pairwise(ends))
        assert ends[-1][1] - ends[0][0] == frame.records


def test_an_unused_queue_ends() -> None:
    options = QueueOptions(expires_ms=1000)
    machine = Queue(options)
    assert machine.on_role("leader") == (Append(qc.TOUCH_COMMAND),) and machine.on_role("follower") == ()
    touched = machine.apply(Context(1, 2, 1, 5000, 1, 1), qc.TOUCH_COMMAND, ())
    assert touched.effects == [Timer("due", 6000)] and machine.on_role("leader") == ()
    machine.apply_batch(Context(1, 3, 1, 5500, 1, 2), [attach(A), publish([1])._replace(first=1)])
    assert End() not in machine.on_timer(Context(1, 4, 1, 6000, 1, 1), "due").effects, "it is used"
    machine.on_session_end(Context(1, 5, 1, 7000, 1, 1), 1)
    copy = Queue(options)
    copy.restore(machine.snapshot())
    for one in (machine, copy):
        effects = one.on_timer(Context(1, 6, 1, 8000, 1, 1), "due").effects
        assert End() in effects and any(isinstance(effect, Release) for effect in effects)
        assert not list(one.live_refs()) and one.on_role("leader") == (End(),)
        (reply,) = one.apply_batch(Context(1, 7, 1, 8001, 1, 1), [publish([1])]).replies
        assert isinstance(reply, Reject) and reply.code == "queue_expired"


MALFORMED = [
    frame_of(b""),
    frame_of(b"\x01"),
    frame_of(bytes((qc.PUBLISH,))),
    publish([5])._replace(pack_bytes=3),
    publish([5, 6])._replace(records=3),
    frame_of(publish([5]).commands[:-1], 1, 5),
    frame_of(qc.PUBLISH_COMMAND.pack(qc.PUBLISH, 2, 0, 0, 0, 0, 0, 0) + bytes(4)),
    frame_of(qc.PUBLISH_COMMAND.pack(qc.PUBLISH, 0, 8, 0, 0, 0, 0, 0) + bytes(4)),
    frame_of(qc.PUBLISH_COMMAND.pack(qc.PUBLISH, 0, 0, 0, 1 << 63, 0, 0, 0) + bytes(4)),
    publish([5])._replace(flags=0),
    attach((0, 1)),
    frame_of(attach(A).commands + b"x", session=1),
    frame_of(qc.ATTACH_COMMAND.pack(qc.ATTACH, 1, 9, 0, 1, 1, 0), session=1),
    frame_of(bytes((qc.SETTLE,)), session=1),
    settle(A, 0),
    settle(A, 7, (1, 1)),
    settle(A, 0, (2, 1)),
    settle(A, 0, (1, 2), (2, 3)),
    settle(A, 0, (0, 1)),
    settle((1, 99), 0, (1, 1)),
    extend(A),
    frame_of(bytes((qc.EXTEND,)), session=1),
    frame_of(bytes((qc.CANCEL,))),
    frame_of(bytes((qc.CANCEL, 1))),
    purge(0),
    purge(8),
    frame_of(bytes((qc.CREDIT,)), session=1),
]


@pytest.mark.parametrize("frame", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_commands_are_refused_and_change_nothing(frame: Frame) -> None:
    machine = Queue()
    machine.apply_batch(Context(1, 1, 1, 5, 1, 2), [attach(A), publish([1])._replace(first=1)])
    before = msgpack.unpackb(machine.snapshot()["queue"])[:-1]
    (reply,) = machine.apply_batch(Context(1, 2, 1, 5, 1, frame.records), [frame]).replies
    assert isinstance(reply, Reject) and reply.code in ("bad_request", "no_consumer")
    assert msgpack.unpackb(machine.snapshot()["queue"])[:-1] == before


def test_what_is_alike_is_one_run() -> None:
    machine = Queue()
    frames = [publish([9] * 100)._replace(first=100 * number) for number in range(5)]
    machine.apply_batch(Context(1, 1, 1, 5, 1, 500), frames)
    assert len(machine.snapshot()["queue"]) < 500 and machine.state.ready == 500
    assert [tuple(one) for one in machine.live_refs()] == [((1, 0), (1, 500))]


def test_requeuing_a_message_that_expires_one_day_keeps_no_history() -> None:
    machine = Queue(QueueOptions(delivery_limit=0))
    machine.apply_batch(Context(1, 1, 1, 5, 1, 2), [attach(A), publish([1], ttl=1 << 40)._replace(first=1)])
    for turn in range(1000):
        machine.apply_batch(Context(1, 2 + turn, 1, 5, 1, 1), [settle(A, qc.REQUEUE, (turn + 1, turn + 1))])
    assert machine.state.ready == 0 and len(machine.state._expiries) < 200


def test_behind_a_message_that_is_larger_than_the_room_comes_nothing() -> None:
    shelf = Shelf()
    shelf.put(Run(1, 1, 1, 1, 0, 50))
    shelf.put(Run(2, 2, 3, 2, 0, 5))
    assert [run.number for run in shelf.take(9, 10, True)] == [1] and (shelf.messages, shelf.bytes) == (3, 15)
    b = bench(max_bytes=40)
    b.apply(publish([100]), publish([30] * 3))
    assert ids(b, "ready") == [4]


def test_runs_emptied_in_the_middle_of_a_shelf_do_not_pile_up() -> None:
    shelf = Shelf()
    shelf.put(Run(1, 1, 1, 1, 0, 5))
    for number in range(2, 1000):
        run = Run(number, number, 1, number, 0, 5)
        shelf.put(run)
        shelf.empty(run)
    assert shelf.messages == 1 and shelf.bytes == 5 and shelf.runs < 200
    assert [run.number for run in shelf.take(9, 100, True)] == [1] and shelf.take(9, 100, True) == []


def test_only_so_many_publishers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.machines.queue.state.PUBLISHERS_MAX", 3)
    machine = Queue()
    for index, publisher in enumerate((1, 2, 3, 1, 4), 1):
        machine.apply_batch(Context(1, index, 1, 5, 1, 1), [publish([1], publisher=publisher, sequence=index)])
    assert list(machine.state.publishers) == [3, 1, 4]


def test_options_are_checked() -> None:
    machine = create_machine("queue", {"max_length": 5, "overflow": "reject", "single_active": True})
    assert isinstance(machine, Queue) and machine.options == QueueOptions(5, 0, "reject", single_active=True)
    for arguments in (
        {"size": 1}, {"max_length": -1}, {"max_length": "5"}, {"overflow": "explode"}, {"single_active": 1},
        {"lease_ms": 0}, {"ttl_ms": True}, {"ttl_ms": 1 << 60},
    ):  # fmt: skip
        with pytest.raises(BadRequest):
            queue_options(arguments)


def test_queries_say_numbers() -> None:
    machine = Queue()
    machine.apply_batch(Context(1, 1, 1, 5, 1, 2), [publish([3, 4])])
    stats = msgpack.unpackb(machine.query(msgpack.packb(["stats"])))
    assert stats == machine.overview() and (stats["ready"], stats["ready_bytes"], stats["published"]) == (2, 7, 2)
    for odd in (b"", b"\xc1", msgpack.packb(["other"])):
        with pytest.raises(Reject):
            machine.query(odd)


def test_client_and_machine_speak_alike() -> None:
    pairs = {
        "PUBLISH_COMMAND": "PUBLISH", "ATTACH_COMMAND": "ATTACH", "DETACH_COMMAND": "DETACH",
        "CREDIT_COMMAND": "CREDIT", "SETTLE_HEAD": "SETTLE", "EXTEND_HEAD": "EXTEND",
        "RESEND_COMMAND": "RESEND", "PURGE_COMMAND": "PURGE", "RANGE": "RANGE", "COUNT_REPLY": "COUNT",
    }  # fmt: skip
    for ours, theirs in pairs.items():
        assert getattr(qc, ours).format == getattr(queue_wire, theirs).format
    for name in ("AT", "AUTO", "DEAD", "ACK", "REQUEUE", "REJECT", "READY", "DELAYED", "DEAD_LETTERS", "CREDIT_MAX"):
        assert getattr(qc, name) == getattr(queue_wire, name)
    for name in ("CREDIT_BYTES_MAX", "RANGES_MAX"):
        assert getattr(qc, name) == getattr(queue_wire, name)
    assert (client_frame.SIZED, client_frame.EACH) == (qc.PUBLISH, qc.EACH)
    frame = client_frame.Frame(None, queue_wire.publish_command("high", 2.0, 0.5))
    frame.put_many([(b"head", b"body"), (b"", None)])
    encoded = bytes(frame.encode()[0])
    region = encoded[FRAME_BYTES : FRAME_BYTES + FRAME.unpack_from(encoded)[4]]
    assert qc.parse_publish(region, 2, 8) == qc.Publish(1, 2000, 500, False, 0, 0, 0, struct.pack("<II", 8, 0))
    settle, meant = next(queue_wire.settle_commands(0, [(5, 6), (1, 2), (3, 3)]))
    assert (qc.parse_ranges(settle, qc.SETTLE_HEAD.size), meant) == ([(1, 3), (5, 6)], 5)
    assert queue_wire.attach_command(1, 2, 3, 4.0, True, False) == attach((1, 1), credit=1, size=2, priority=3,
        lease=4000, auto=False, dead=True).commands  # fmt: skip


HASHED = """
import hashlib, json, random
from logyard.machines.queue.options import QueueOptions
from logyard.machines.queue import command as qc
from tests.machines.queue.model import *
random.seed(5)
b = Bench(QueueOptions(max_length=20, delivery_limit=3, lease_ms=300, single_active=False))
seen = hashlib.sha256()
for turn in range(300):
    b.now += random.choice((1, 100))
    b.ring()
    key = (random.randint(1, 9), 1)
    b.apply(random.choice((
        publish([random.randint(0, 9) for _ in "abc"], priority=turn % 2, ttl=turn, publisher=turn % 3, sequence=turn),
        attach(key, credit=3), settle(key, turn % 3, (1, turn)), detach(key), publish([4], delay=50))))
    seen.update(b.machine.snapshot()["queue"])
    seen.update(repr([list(map(tuple, b.machine.live_refs()))]).encode())
print(json.dumps(seen.hexdigest()))
"""


def test_two_hash_seeds_come_to_the_same_state() -> None:
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", HASHED], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(json.loads(done.stdout))
    assert len(found) == 1
