"""A short storm, and the judges by themselves: each must see what it is there for. `python -m tests.chaos` goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgpack
import pytest

from logyard.client.sync import Yard
from logyard.engine.machine import Context, PayloadRef, Position, Release
from logyard.protocol.errors import Busy
from logyard.protocol.kv import Changes, Event, KeyValue, Put
from logyard.protocol.kv import encode as encode_operation
from logyard.protocol.queue import Message
from logyard.service.local_cluster import free_ports

from . import redelivery
from .hashed import HASH, HashedKV, HashedQueue
from .judge import Verdict, false_alarms, linearizable, until
from .kv_load import Revisions
from .load import Journal, body, number_of
from .proxy import Proxy
from .queue_load import Told
from .redelivery import Held, Holder, Redeliveries
from .register import CAS, DIFFERENT, OK, WRITE, Registers, encode
from .run import Result, run

KINDS = ("kill9", "partition_one_way", "pause", "reset")


def test_a_short_storm(tmp_path: Path) -> None:
    found = run(tmp_path, 0.06, 5, KINDS)
    assert (found.lost, found.violations, found.undecided) == ([], [], 0)
    assert found.acknowledged > 100 and found.faults.total() > 0
    assert found.histories["kv"] and found.watched and found.queues["q0"]["acknowledged"]
    row = found.row()
    assert {"operations", "faults", "lost", "undecided", "violations"} <= row.keys() and json.dumps(row)


def test_a_run_fails_for_silence_losses_and_slowness() -> None:
    found = Result(1)
    found.healthy, found.healthy_s = 1000, 5
    found.faults["kill9"] += 1
    assert found.passed
    found.missed["reset"] += 1
    assert not found.passed, "a kind that never hit anything"
    found.faults["reset"] += 1
    assert found.passed
    found.healthy = 400
    assert not found.passed, "80 operations a second"


def test_a_scrub_that_calls_a_sound_disk_damaged_is_noticed() -> None:
    def row(damaged: int, error: str = "") -> dict[str, object]:
        return {"last": {"wal": {"found": damaged}, "segments": {"found": 0}}, "error": error, "findings": ["this"]}

    assert false_alarms({1: row(0), 2: row(3)}, rotten=2) == []
    assert false_alarms({1: row(2), 2: row(0)}, rotten=2) == ["a scrub of node 1: 2 damaged, ['this']"]
    assert false_alarms({1: row(0, "OSError: x")}, rotten=2) == ["a scrub of node 1: 0 damaged, OSError: x"]


def judged(journal: Journal, start: int, found: dict[int, int | None]) -> Verdict:
    verdict = Verdict(cast(Yard, None), journal, {})
    verdict.judge_log("l0", start, found)
    return verdict


def test_the_judge_of_a_log() -> None:
    journal = Journal()
    for offset, number in enumerate((11, 12, 13)):
        journal.appended("l0", offset, number)
    journal.refused.add(99)
    good = judged(journal, 1, {1: 12, 2: 13, 3: 14})
    assert not good.lost and not good.violations
    assert "13 was acknowledged" in judged(journal, 0, {0: 11, 1: 12}).lost[0]
    assert judged(journal, 0, {0: 11, 1: 13, 2: 12}).lost
    assert "99 was refused" in judged(journal, 0, {0: 11, 1: 12, 2: 13, 3: 99}).violations[0]
    assert "is at" in judged(journal, 0, {0: 11, 1: 12, 2: 13, 3: 11}).violations[0]
    assert "wrong bytes" in judged(journal, 0, {0: 11, 1: 12, 2: 13, 3: None}).violations[0]
    journal.saw("l0", 1, 77)
    assert "both seen" in journal.violations[0]


def test_a_payload_is_known_by_its_bytes() -> None:
    found = bytearray(body(5))
    assert number_of(bytes(found)) == 5
    assert number_of(bytes(found) + b"x") is None and number_of(b"") is None


def test_the_registers_history_is_judged(tmp_path: Path) -> None:
    journal = Journal()
    journal.row(1, "invoke", "write", "r0/1", 5)
    journal.row(1, "ok", "write", "r0/1", 5)
    journal.row(2, "invoke", "read", "r0/1", None)
    journal.row(2, "ok", "read", "r0/1", 5)
    assert linearizable(journal, "register", tmp_path / "history").valid is True and journal.done == 2
    journal.row(2, "invoke", "read", "r0/1", None)
    journal.row(2, "ok", "read", "r0/1", None)
    outcome = linearizable(journal, "register", tmp_path / "history")
    assert outcome.valid is False and len((tmp_path / "history").read_text().splitlines()) == 6


def message(number: int, id: int, reason: str = "") -> Message:
    return Message(1, id, number.to_bytes(8, "big"), body(number), 0, 0, reason)


def test_the_judge_of_a_queue() -> None:
    def told() -> Told:
        one = Told("q", Journal())
        one.publish(1, [11, 12])
        one.settle(message(11, 1), one.deliver(message(11, 1), False))
        return one

    counts = dict.fromkeys(("dropped", "expired", "purged", "cancelled"), 0)
    whole = told()
    whole.settle(message(12, 2), whole.deliver(message(12, 2, "rejected"), True))
    whole.stats = {**counts, "published": 2, "acknowledged": 2}
    assert whole.judge() == [] and whole.journal.violations == [] and whole.ahead == 0
    whole.stats = {**counts, "published": 3, "acknowledged": 2}
    assert whole.judge() == [] and len(whole.journal.violations) == 2
    lost = told()
    lost.stats = {**counts, "published": 2, "acknowledged": 1}
    assert "message 2 was confirmed and never came" in lost.judge()[0]

    def complaint(act: Callable[[Told], object]) -> str:
        one = told()
        act(one)
        return "; ".join(one.journal.violations)

    def unwanted(one: Told, number: int) -> None:
        one.refused.add(13)
        one.cancelled.add(2)
        one.deliver(message(number, number - 10), False)

    assert "came again" in complaint(lambda one: one.settle(message(11, 1), one.deliver(message(11, 1), False)))
    assert complaint(lambda one: one.deliver(message(11, 1), False)) == "", "delivered twice only"
    assert "was refused" in complaint(lambda one: unwanted(one, 13))
    assert "was cancelled" in complaint(lambda one: unwanted(one, 12))
    assert "wrong bytes" in complaint(lambda one: one.deliver(Message(1, 2, b"", b"x" * 20, 0, 0, ""), False))
    assert "11 is message 1 and message 9" in complaint(lambda one: one.deliver(message(11, 9), False))
    assert "is not 14" in complaint(lambda one: one.deliver(message(14, 2), False))
    assert "reason" in complaint(lambda one: one.deliver(message(12, 2, "expired"), True))


def test_every_redelivery_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(redelivery, "time", SimpleNamespace(monotonic=lambda: now))

    def causes(act: Callable[[Held], object], passed: float = 1.0) -> dict[str, int]:
        nonlocal now
        now = 0.0
        one, first, other = Redeliveries(10.0), Holder("first"), Holder("other")
        act(one.came(7, 0, first))
        now += passed
        one.came(7, 1, other)
        one.came(7, 0, other)
        found, unexplained = one.judge()
        assert len(unexplained) == found.get("unexplained", 0)
        return found

    assert causes(lambda held: None) == causes(lambda held: setattr(held, "settled", True), 20) == {"unexplained": 1}
    assert causes(lambda held: setattr(held, "given_back", True)) == {"returned": 1}
    assert causes(lambda held: setattr(held.holder, "left", 0.5)) == {"returned": 1}
    assert causes(lambda held: setattr(held.holder, "left", 1.5)) == {"unexplained": 1}
    assert causes(lambda held: setattr(held.holder, "failed", "session_expired")) == {"session": 1}
    assert causes(lambda held: setattr(held.holder, "failed", "not_held")) == {"unexplained": 1}
    assert causes(lambda held: None, 9.5) == {"lease": 1}


def test_the_judge_of_revisions() -> None:
    def change(revision: int, key: bytes, number: int | None) -> Changes:
        kv = None if number is None else KeyValue(key, body(number), 2, revision, 1, 0)
        return Changes(revision, (Event(key, kv),))

    def complaint(act: Callable[[Revisions], object]) -> str:
        seen = Revisions("k", Journal())
        seen.tell(2, "a", 5)
        assert seen.watched(change(2, b"a", 5), 2) == 3 and seen.watched(change(3, b"a", None), 3) == 4
        act(seen)
        return "; ".join(seen.journal.violations)

    def missed(seen: Revisions) -> None:
        seen.tell(4, "b", 9)
        seen.watched(change(4, b"c", 9), 4)

    assert complaint(lambda seen: seen.tell(3, "a", None)) == ""
    assert "watchers saw no such change" in complaint(lambda seen: seen.tell(3, "a", 7))
    assert "waited for revision 4 and got 5" in complaint(lambda seen: seen.watched(change(5, b"b", 8), 4))
    assert "different revisions 2" in complaint(lambda seen: seen.watched(change(2, b"a", 6), 2))
    assert "did not see it" in complaint(missed)
    wrong = KeyValue(b"b", b"\0" * 8, 2, 4, 1, 0)
    assert "wrong bytes" in complaint(lambda seen: seen.served(wrong))
    seen = Revisions("k", Journal())
    for revision, key, number in ((2, b"a", 5), (3, b"b", 6), (4, b"a", None), (5, b"b", 7)):
        seen.watched(change(revision, key, number), revision)
    assert seen.replayed() == {"b": (7, 5)}
    del seen.whole[3]
    assert seen.replayed() is None


def test_the_keys_history_is_judged(tmp_path: Path) -> None:
    journal = Journal()
    for kind, f, value in (("invoke", "cas", [None, 4]), ("ok", "cas", [None, 4]), ("invoke", "get", None)):
        journal.row(1, kind, f, "k0/1", value, "kv")
    journal.row(1, "ok", "get", "k0/1", 4, "kv")
    assert linearizable(journal, "kv", tmp_path / "history").valid is True
    for kind in ("invoke", "ok"):
        journal.row(1, kind, "delete", "k0/1", None, "kv")
    journal.row(2, "invoke", "get", "k0/1", None, "kv")
    journal.row(2, "ok", "get", "k0/1", 4, "kv")
    assert linearizable(journal, "kv", tmp_path / "history").valid is False


def test_a_stale_leaders_answer_to_a_compare_and_set_is_judged(tmp_path: Path) -> None:
    """It found another value where that one was: as wrong as a stale read, of one key or of several."""
    journal = Journal()
    for kind, f, value in (("invoke", "put", 4), ("ok", "put", 4), ("invoke", "cas", [4, 5]), ("ok", "cas", False)):
        journal.row(1, kind, f, "k0/1", value, "kv")
    found = linearizable(journal, "kv", tmp_path / "history")
    assert found.valid is False and "cas" in found.reason
    swap = [[["a", 4]], [["put", "b", 5]], [["get", "a"]]]
    rows: list[tuple[str, object]] = [("invoke", [[], [["put", "a", 4]], []]), ("ok", [True, []]), ("invoke", swap)]
    for kind, row in rows:
        journal.row(1, kind, "txn", "k0/t1", row, "txn")
    journal.row(1, "ok", "txn", "k0/t1", [False, [None]], "txn")
    assert linearizable(journal, "txn", tmp_path / "history").valid is False


async def test_the_machines_say_a_hash_of_their_state() -> None:
    def context(index: int) -> Context:
        return Context(7, index, 1, 0, 1)

    one, other = HashedKV(), HashedKV()
    assert one.query(HASH) == other.query(HASH)
    one.apply(context(1), encode_operation(Put(b"a", b"1"))[0], ())
    before = one.query(HASH)
    assert before != other.query(HASH)
    other.restore(one.snapshot())
    assert other.query(HASH) == before
    queue = HashedQueue(delivery_limit=3)
    assert queue.options.delivery_limit == 3 and len(queue.query(HASH)) == 32


def test_waiting_tells_the_last_complaint() -> None:
    said = iter(["no", "not yet", ""])
    assert until(lambda: next(said)) == ""
    assert until(lambda: "never", 0) == "never"

    def refused() -> str:
        raise Busy("full", 1.0)

    assert until(refused, 0).startswith("busy")


def test_the_register_machine() -> None:
    def context(index: int) -> Context:
        return Context(7, index, 1, 0, 1)

    def ref(index: int) -> tuple[PayloadRef]:
        return (PayloadRef(7, index, 0, 1, 5, b""),)

    machine = Registers()
    assert machine.apply(context(1), encode(WRITE, "a", 1), ref(1)).reply == OK
    assert machine.apply(context(2), encode(CAS, "a", 1, 2), ref(2)) == (OK, [Release(Position(1, 0), Position(1, 1))])
    assert machine.apply(context(3), encode(CAS, "a", 1, 3), ref(3)) == (
        DIFFERENT,
        [Release(Position(3, 0), Position(3, 1))],
    )
    assert msgpack.unpackb(machine.query(b"a")) == 2 and msgpack.unpackb(machine.query(b"b")) is None
    assert list(machine.live_refs()) == [(Position(2, 0), Position(2, 1))]
    other = Registers()
    assert other.query(b"") != machine.query(b"")
    other.restore(machine.snapshot())
    assert other.query(b"") == machine.query(b"")


def test_wires_are_held_spoilt_and_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (port,) = free_ports(1)
        proxy = Proxy([(1, 2, port, server.getsockname()[1])])
        try:
            client = socket.create_connection(("127.0.0.1", port), 10)
            far, _ = server.accept()
            for end in (client, far):
                end.settimeout(10)
            client.sendall(b"one")
            assert far.recv(10) == b"one"
            proxy.order(held=[(1, 2)])
            client.sendall(b"two")
            far.sendall(b"back")
            assert client.recv(10) == b"back"
            far.settimeout(0.2)
            with pytest.raises(TimeoutError):
                far.recv(10)
            far.settimeout(10)
            assert proxy.order(held=[])["held"] == 1
            assert far.recv(10) == b"two"
            proxy.order(flip=[(1, 2)])
            client.sendall(bytes(8))
            assert sum(byte.bit_count() for byte in far.recv(10)) == 1
            proxy.order(reset=[(2, 1)])
            with pytest.raises(ConnectionResetError):
                client.recv(10)
            assert proxy.order()["reset"] >= 1
            client.close()
            far.close()
        finally:
            proxy.close()
