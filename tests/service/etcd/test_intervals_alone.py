"""Which transactions the gateway refuses because a key is put twice, or put and deleted, alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from logyard.service.etcd.store import REQUESTS, Interval, check_intervals
from logyard.service.etcd.words import GatewayError, Message


def put(key: bytes) -> Message:
    return Message({"request_put": Message({"key": key})})


def deletion(key: bytes, end: bytes = b"") -> Message:
    return Message({"request_delete_range": Message({"key": key, "range_end": end})})


def txn(success: list[Message], failure: list[Message]) -> Message:
    return Message({"request_txn": Message({"success": success, "failure": failure})})


def each_with_each(requests: Sequence[Message]) -> tuple[set[bytes], list[Interval]]:
    """What etcd does, in the order in which it does it."""

    def check(keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in puts or any(first <= key < end for first, end in deleted):
                raise ValueError

    inner: list[tuple[str, Any]] = [
        (name, request.fields[name]) for request in requests for name in [request.which(REQUESTS)]
    ]
    deleted = [
        (one.data("key"), one.data("range_end") or one.data("key") + b"\0")
        for name, one in inner
        if name == "request_delete_range"
    ]
    puts: set[bytes] = set()
    for name, one in inner:
        if name == "request_txn":
            (then, then_deleted), (other, other_deleted) = (each_with_each(one.rows(path)) for path in PATHS)
            check(then | other)
            puts |= then | other
            deleted += then_deleted + other_deleted
    for name, one in inner:
        if name == "request_put":
            check([one.data("key")])
            puts.add(one.data("key"))
    return puts, deleted


PATHS = ("success", "failure")


def drawn(draw: random.Random, depth: int) -> list[Message]:
    found = []
    for _ in range(draw.randrange(4)):
        what = draw.random()
        key, end = (bytes([draw.randrange(97, 123), draw.randrange(97, 100)]) for _ in range(2))
        if what < 0.4:
            found.append(put(key))
        elif what < 0.7 or not depth:
            found.append(deletion(key, draw.choice([b"", b"", end, key + b"\0", b"\0"])))
        else:
            found.append(txn(drawn(draw, depth - 1), drawn(draw, depth - 1)))
    return found


def test_it_refuses_what_etcd_does() -> None:
    draw, refused = random.Random(7), 0
    for _ in range(5000):
        requests = drawn(draw, 3)
        try:
            wanted = each_with_each(requests)
        except ValueError:
            wanted = None
            refused += 1
        try:
            found = check_intervals(requests)
        except GatewayError:
            assert wanted is None
        else:
            assert wanted is not None and found[0] == wanted[0] and sorted(found[1]) == sorted(wanted[1])
    assert 200 < refused < 4800


def test_many_puts_beside_many_deletions_are_looked_at_in_order() -> None:
    many = 12_000
    puts = [put(b"p%06d" % number) for number in range(many)]
    ranges = [deletion(b"d%06d" % number, b"p") for number in range(many)]
    began = time.process_time()
    assert len(check_intervals([txn(puts, []), *ranges])[0]) == many
    assert time.process_time() - began < 5, "not each with each"
