"""What the gateway says of how far a stream's watches are: never further than what was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from logyard.protocol.kv import Changes, Event, KeyValue
from logyard.service.etcd import watching
from logyard.service.etcd.gateway import Limits
from logyard.service.etcd.words import Header


class Told:
    """A watch whose changes a test gives."""

    def __init__(self) -> None:
        self.give, self._given = trio.open_memory_channel[Changes](10)

    async def created(self) -> int:
        return 5

    def __aiter__(self) -> Told:
        return self

    async def __anext__(self) -> Changes:
        return await self._given.receive()


def change(revision: int) -> Changes:
    return Changes(revision, (Event(b"k", KeyValue(b"k", b"v", revision, revision, 1, 0)),))


async def test_progress_claims_no_revision_whose_events_were_not_sent(monkeypatch: Any) -> None:
    told = [Told(), Told()]
    waiting = iter(told)

    @asynccontextmanager
    async def watch(*_: Any, **__: Any) -> AsyncIterator[Told]:
        yield next(waiting)

    async def revision_of(_: Any) -> int:
        return 5

    monkeypatch.setattr(watching, "revision_of", revision_of)
    gateway: Any = SimpleNamespace(
        kv=SimpleNamespace(watch=watch), header=Header(1, 1, 1), limits=Limits(), watches=0, encoded=(None, False, b""),
        count_watches=lambda count: None, share=lambda *shared: None,
    )  # fmt: skip
    sent: list[dict[str, Any]] = []
    gate = trio.Event()

    async def chunk(data: bytes) -> None:
        result = json.loads(data)["result"]
        if result.get("events") and result["header"]["revision"] == "5" and result.get("watch_id") == "1":
            await gate.wait()
        sent.append(result)

    def progress() -> list[str]:
        return [one["header"]["revision"] for one in sent if one.get("watch_id") == "-1"]

    async with trio.open_nursery() as nursery:
        stream = watching.Watching(gateway, chunk, nursery)
        for _ in told:
            await stream.take(watching.REQUEST.read({"create_request": {"key": "aw=="}}))
        assert [one.get("created") for one in sent] == [True, True]
        await stream.take(watching.REQUEST.read({"progress_request": {}}))
        await trio.testing.wait_all_tasks_blocked()
        assert progress() == [], "5 is what both see next"
        await told[0].give.send(change(5))
        await trio.testing.wait_all_tasks_blocked()
        assert progress() == [], "the second one is at 4"
        await told[1].give.send(change(5))
        await trio.testing.wait_all_tasks_blocked()
        assert progress() == [], "its events are not sent yet"
        # Asked again, while they still wait: it may not be told either.
        await stream.take(watching.REQUEST.read({"progress_request": {}}))
        await trio.testing.wait_all_tasks_blocked()
        assert progress() == []
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert progress() == ["5"] and sent[-1]["watch_id"] == "-1" and sent[-2]["events"]
        await stream.take(watching.REQUEST.read({"progress_request": {}}))
        assert progress() == ["5", "5"], "all are there: at once"
        nursery.cancel_scope.cancel()
