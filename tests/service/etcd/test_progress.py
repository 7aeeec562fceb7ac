"""What the gateway says of how far a stream's watches are: never further than what was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.protocol.errors import BadRequest, LogyardError, NotLeader
from logyard.protocol.kv import Changes, Event, KeyValue
from logyard.service.etcd import watching
from logyard.service.etcd.gateway import Limits
from logyard.service.etcd.words import Header


class Told:
    """A watch whose changes a test gives."""

    def __init__(self) -> None:
        self.give, self._given = trio.open_memory_channel[Changes | LogyardError](10)

    async def created(self) -> int:
        return 5

    def __aiter__(self) -> Told:
        return self

    async def __anext__(self) -> Changes:
        given = await self._given.receive()
        if isinstance(given, LogyardError):
            raise given
        return given


class Rig:
    """A stream over a group at revision 5, and what it has sent; no node answers without a `quorum`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.told = [Told() for _ in range(count)]
        self.quorum = True
        self.gate = trio.Event()
        self.gate.set()
        self.held = ""
        self.sent: list[dict[str, Any]] = []
        self._waiting = iter(self.told)
        self._gateway: Any = SimpleNamespace(
            kv=SimpleNamespace(watch=self._watch), header=Header(1, 1, 1), limits=Limits(), watches=0,
            encoded=(None, False, b""), count_watches=lambda count: None, share=lambda *shared: None,
            reach=self._reach, run=self._reach,
        )  # fmt: skip
        monkeypatch.setattr(watching, "revision_of", self._revision_of)

    @asynccontextmanager
    async def _watch(self, *_: Any, **__: Any) -> AsyncIterator[Told]:
        yield next(self._waiting)

    async def _reach(self, *_: Any, **__: Any) -> tuple[str, None]:
        if not self.quorum:
            raise NotLeader(0)
        return "linearizable", None

    async def _revision_of(self, *_: Any) -> int:
        await self._reach()
        return 5

    async def _chunk(self, data: bytes) -> None:
        result = json.loads(data)["result"]
        if result.get("events") and result["header"]["revision"] == "5" and result.get("watch_id") == self.held:
            await self.gate.wait()
        self.sent.append(result)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """Open it."""
        async with trio.open_nursery() as nursery:
            self._stream = watching.Watching(self._gateway, self._chunk, nursery)
            yield
            nursery.cancel_scope.cancel()

    async def say(self, **message: Any) -> None:
        await self._stream.take(watching.REQUEST.read(message))
        await trio.testing.wait_all_tasks_blocked()

    async def give(self, number: int, given: Changes | LogyardError) -> None:
        await self.told[number].give.send(given)
        await trio.testing.wait_all_tasks_blocked()

    def progress(self) -> list[str]:
        return [one["header"]["revision"] for one in self.sent if one.get("watch_id") == "-1"]


def change(revision: int) -> Changes:
    return Changes(revision, (Event(b"k", KeyValue(b"k", b"v", revision, revision, 1, 0)),))


async def test_progress_claims_no_revision_whose_events_were_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 2)
    rig.held, rig.gate = "1", trio.Event()
    async with rig.stream():
        for _ in rig.told:
            await rig.say(create_request={"key": "aw=="})
        assert [one.get("created") for one in rig.sent] == [True, True]
        await rig.say(progress_request={})
        assert rig.progress() == [], "5 is what both see next"
        await rig.give(0, change(5))
        assert rig.progress() == [], "the second one is at 4"
        await rig.give(1, change(5))
        assert rig.progress() == [], "its events are not sent yet"
        # Asked again, while they still wait: it may not be told either.
        await rig.say(progress_request={})
        assert rig.progress() == []
        rig.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert rig.progress() == ["5"] and rig.sent[-1]["watch_id"] == "-1" and rig.sent[-2]["events"]
        await rig.say(progress_request={})
        assert rig.progress() == ["5", "5"], "all are there: at once"


@pytest.mark.parametrize(
    "message",
    [
        {"create_request": {"key": "bw==", "start_revision": "3"}},
        {"create_request": {"key": "bw==", "start_revision": "-1"}},
        {"create_request": {"key": "bw==", "range_end": "bw=="}},
        {"progress_request": {}},
        {"cancel_request": {"watch_id": 1}},
    ],
)
async def test_what_is_asked_without_a_quorum_ends_no_watch(
    monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    rig = Rig(monkeypatch, 3)
    async with rig.stream():
        for _ in range(2):
            await rig.say(create_request={"key": "aw=="})
        rig.quorum = False
        await rig.say(**message)
        if "progress_request" not in message:
            assert rig.sent[-1]["header"]["revision"] == "4", "as of what it was told before"
        await rig.give(0, change(5))
        assert any(one.get("events") for one in rig.sent)


async def test_a_watch_that_ends_without_a_quorum_ends_no_other_and_holds_up_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 2)
    async with rig.stream():
        for _ in rig.told:
            await rig.say(create_request={"key": "aw=="})
        await rig.say(progress_request={})
        await rig.give(0, change(5))
        rig.quorum = False
        await rig.give(1, BadRequest("this one is over"))
        ended, progress = rig.sent[-2:]
        assert ended["canceled"] and ended["watch_id"] == "1" and progress["watch_id"] == "-1"
        await rig.give(0, change(6))
        assert rig.sent[-1]["header"]["revision"] == "6"
