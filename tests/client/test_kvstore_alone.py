"""Watches of `kvstore`'s drivers, alone: what they missed is made good, also where that can't be read at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from logyard.client import kvstore, kvstore_etcd
from logyard.client.kv_requests import anew
from logyard.client.kvstore import NativeDriver
from logyard.client.kvstore_etcd import EtcdDriver, EtcdError
from logyard.protocol.errors import Unknown
from logyard.protocol.kv import Changes, Compacted, Event, GetResult, KeyValue


def row(key: bytes, revision: int) -> KeyValue:
    return KeyValue(key, b"v", revision, revision, 1, 0)


class Group:
    """A KV group whose watch is compacted first, and that can't be read the first time."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.failures = 1

    def watch(self, key: bytes, start: int, **how: Any) -> Iterator[Changes]:
        self.asked.append(start)
        if start < 9:
            raise Compacted("a test", compacted=8)
        yield Changes(start, (Event(b"k", row(b"k", start)),))

    def range(self, key: bytes, prefix: bool) -> GetResult:
        if self.failures:
            self.failures -= 1
            raise Unknown("a test")
        return GetResult(8, (row(b"old", 8), row(b"seen", 2)), False, 2)


def test_a_watch_that_was_compacted_goes_on_when_its_group_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "RETRY_S", 0.0)
    driver, group = NativeDriver.__new__(NativeDriver), Group()
    driver._kv = group  # type: ignore[assignment]
    changes = driver._walk(b"", True, 3, threading.Event())
    assert [next(changes) for _ in range(3)] == [None, (b"old", b"v"), (b"k", b"v")], "what was seen did not change"
    assert group.asked == [3, 9]


def test_an_etcd_watch_that_was_compacted_goes_on_when_the_server_can_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvstore_etcd, "RETRY_S", 0.0)
    driver, group = EtcdDriver.__new__(EtcdDriver), Group()

    def messages(asked: Any, start: int) -> Iterator[Any]:
        group.asked.append(start)
        if start < 9:
            raise kvstore_etcd.Compacted
        yield start, [(b"k", b"v")]

    def call(path: str, asked: Any) -> Any:
        if group.failures:
            group.failures -= 1
            raise EtcdError("503: etcdserver: no leader")
        rows = [{"key": "b2xk", "value": "dg==", "mod_revision": "8"}, {"key": "c2Vlbg==", "mod_revision": "2"}]
        return {"header": {"revision": "8"}, "kvs": rows}

    monkeypatch.setattr(EtcdDriver, "_messages", staticmethod(messages))
    monkeypatch.setattr(EtcdDriver, "_call", staticmethod(call))
    changes = driver._walk(b"", True, 3, threading.Event())
    assert [next(changes) for _ in range(3)] == [None, (b"old", b"v"), (b"k", b"v")], "what was seen did not change"
    assert group.asked == [3, 9]


def test_a_watch_whose_group_was_made_anew_tells_what_there_is_in_it() -> None:
    driver, asked = NativeDriver.__new__(NativeDriver), list[int]()

    class Anew:
        def watch(self, key: bytes, start: int, **how: Any) -> Iterator[Changes]:
            asked.append(start)
            yield Changes(start, (Event(b"of the first", row(b"of the first", start)),))
            raise anew("kv")

        def range(self, key: bytes, prefix: bool) -> GetResult:
            return GetResult(3, (row(b"of the next", 2),), False, 1)

    driver._kv = Anew()  # type: ignore[assignment]
    changes = driver._walk(b"", True, 30, threading.Event())
    assert [next(changes) for _ in range(4)] == [
        (b"of the first", b"v"), None, (b"of the first", None), (b"of the next", b"v"),
    ]  # fmt: skip
    next(changes)
    assert asked == [30, 4]
