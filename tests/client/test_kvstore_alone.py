"""Watches of `kvstore`'s drivers, alone: what they missed is made good, also where that can't be read at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from logyard.client import kvstore, kvstore_etcd
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
        return GetResult(8, (row(b"old", 8),), False, 1)


def test_a_watch_that_was_compacted_goes_on_when_its_group_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "RETRY_S", 0.0)
    driver, group = NativeDriver.__new__(NativeDriver), Group()
    driver._kv = group  # type: ignore[assignment]
    changes = driver._walk(b"", True, 3, threading.Event())
    assert [next(changes) for _ in range(3)] == [None, (b"old", b"v"), (b"k", b"v")]
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
        return {"header": {"revision": "8"}, "kvs": [{"key": "b2xk", "value": "dg=="}]}

    monkeypatch.setattr(EtcdDriver, "_messages", staticmethod(messages))
    monkeypatch.setattr(EtcdDriver, "_call", staticmethod(call))
    changes = driver._walk(b"", True, 3, threading.Event())
    assert [next(changes) for _ in range(3)] == [None, (b"old", b"v"), (b"k", b"v")]
    assert group.asked == [3, 9]
