"""One family of errors: whoever raises one, the caller's class of its code catches it, with all that it says."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

import logyard
from logyard.client import errors as of_clients
from logyard.client import sync, sync_link
from logyard.client.network import TIMEOUT_S
from logyard.engine import errors as of_engine
from logyard.engine.types import Buffer
from logyard.pipeline.errors import OptionError
from logyard.protocol import errors
from logyard.protocol.errors import (
    Busy,
    Corrupt,
    GenerationFailed,
    Gone,
    JobStale,
    LogyardError,
    NoSpace,
    NotLeader,
    Outdated,
    PayloadCorrupt,
    PayloadError,
    PayloadMissing,
    StoreFull,
    StoreShort,
    WrongKind,
    classes,
    decode_error,
    encode_error,
    error_of,
    error_value,
)
from logyard.protocol.queue import NotHeld
from logyard.service.embedded import open_system
from logyard.service.log.verbs import LogVerbs
from tests.client.fake_system import FakeSystem, fake_cluster

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
RETRIES = {
    "error": "never", "corrupt": "never", "busy": "same_session", "not_leader": "elsewhere", "unknown": "same_session",
    "session_expired": "never", "no_space": "same_session", "job_poisoned": "never", "job_failed": "never",
    "gone": "never", "out_of_range": "never", "unknown_group": "elsewhere", "group_exists": "never",
    "group_stopped": "elsewhere", "bad_request": "never", "wrong_kind": "never", "refused": "never",
    "directory_in_use": "never", "wrong_identity": "never", "outdated": "never", "wal_failed": "elsewhere",
}  # fmt: skip
"""What travels and never changes."""

PARTICULAR: dict[type[LogyardError], Callable[[], LogyardError]] = {
    Busy: lambda: Busy("a budget", 0.5),
    Corrupt: lambda: Corrupt("f", 3, "a", "b"),
    NotLeader: lambda: NotLeader(2),
    Outdated: lambda: Outdated(2, "restored"),
    WrongKind: lambda: WrongKind("orders", "kv", "log"),
}


def each() -> Iterator[LogyardError]:
    """One of every class that travels."""
    for kind in classes().values():
        make = PARTICULAR.get(kind, partial(kind, "what happened", offset=7))
        yield make()


def of_store() -> list[tuple[PayloadError, type[LogyardError]]]:
    """What only the payload store raises, and what its callers know it as."""
    return [
        (PayloadMissing(7, 3, 1), Gone), (StoreFull("no room"), NoSpace), (StoreShort("gen-1: no descriptors"), Busy),
        (PayloadCorrupt("gen-1", "unit 2", "aa", "bb", 7, 3), Corrupt),
        (GenerationFailed("gen-1", "why"), LogyardError), (JobStale("stale"), LogyardError),
    ]  # fmt: skip


def said(error: LogyardError) -> dict[str, object]:
    return {**error_value(error), "kind": type(error)}


def test_the_codes_and_their_retries_stay() -> None:
    assert {code: kind.retry for code, kind in classes().items()} == RETRIES


def test_every_code_and_its_retry_are_in_the_page() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(), flags=re.M)) == RETRIES


def test_an_error_travels_with_code_retry_and_plain_details() -> None:
    assert msgpack.unpackb(encode_error(LogyardError("no", of=[1], at=2, retry="elsewhere"))) == {
        "code": "error", "message": "no", "retry": "elsewhere", "details": {"at": 2},
    }  # fmt: skip


def test_every_path_names_the_same_classes() -> None:
    for kind in classes().values():
        for home in (logyard, of_clients, of_engine):
            assert getattr(home, kind.__name__) is kind


def test_one_comes_back_from_the_wire_as_itself() -> None:
    for error in each():
        assert said(decode_error(encode_error(error))) == said(error)
        assert said(error_of(msgpack.unpackb(msgpack.packb(error_value(error))))) == said(error)


def test_an_unknown_code_keeps_its_name() -> None:
    error = error_of({"code": "too_old", "message": "no", "retry": "nonsense", "details": 3})
    assert (error.code, error.retry, str(error), error.details) == ("too_old", "never", "no", {})
    assert error_of(None).code == "error"
    assert error.again().code == "too_old"


def test_copies_say_the_same() -> None:
    for error in [*each(), *(one for one, _ in of_store()), OptionError("path: none", option="path")]:
        error.retry = "elsewhere"
        for other in (error.again(), copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert other is not error and said(other) == said(error) and vars(other) == vars(error)


def test_what_is_read_from_an_error_is_in_its_details() -> None:
    busy, short, led = Busy("a budget", 0.5), StoreShort("gen-1"), NotLeader(2)
    assert (busy.cause, busy.retry_after) == ("a budget", 0.5) == tuple(busy.details.values())
    assert (short.retry_after, short.reason) == (errors.SHORT_RETRY_S, "gen-1") and errors.SHORTAGE in str(short)
    assert (led.leader, NotLeader.told("none").leader, NoSpace("full").retry_after) == (2, 0, 1.0)
    held = NotHeld("two are gone", settled=1, missed=2)
    assert (held.settled, held.missed, held.message) == (1, 2, "two are gone")


def test_an_error_of_the_payload_store_is_the_one_that_callers_know() -> None:
    for error, kind in of_store():
        assert isinstance(error, kind) and (error.code, error.retry) == (kind.code, kind.retry)
        assert type(error_of(error_value(error))) is kind


def test_a_machines_own_kind_of_group_is_told_the_way_in() -> None:
    assert "use the verbs of a kv," in str(WrongKind("orders", "kv", "log"))
    assert "(open_session)" in str(WrongKind("orders", "counter", "log"))


def meets(raised: list[LogyardError]) -> Iterator[LogyardError]:
    """Each error, while it is the one that is raised."""
    for error in each():
        raised[:] = [error]
        yield error


def caught(error: LogyardError) -> type[LogyardError]:
    """The facade's class of its code."""
    kind: type[LogyardError] = getattr(logyard, type(error).__name__)
    return kind


@asynccontextmanager
async def faulty_cluster(monkeypatch: pytest.MonkeyPatch, raised: list[LogyardError]) -> AsyncIterator[list[str]]:
    """A real door before a node that raises what stands in `raised`."""

    async def truncate(self: FakeSystem, name: str, before: int) -> int:
        raise raised[0]

    monkeypatch.setattr(FakeSystem, "truncate", truncate)
    async with fake_cluster(1) as cluster:
        cluster.create("orders", [1], 1)
        yield list(cluster.addresses.values())


async def test_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[LogyardError] = []

    async def read_body(self: LogVerbs, *_: object, **__: object) -> Buffer:
        raise raised[0]

    monkeypatch.setattr(LogVerbs, "read_body", read_body)
    async with open_system(tmp_path, timeout=1.0) as system:
        log = await system.start_group("orders", logyard.AppendLog())
        for error in meets(raised):
            with pytest.raises(caught(error)) as found:
                await log.read_body(0, 0, 1)
            assert said(found.value) == said(error)
        with pytest.raises(logyard.UnknownGroup):
            await system.delete_group("none")


async def test_the_network(monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock) -> None:
    """In virtual time: an answer is never late, and what is tried again is so until its time is over."""
    mock_clock.autojump_threshold = 0.02
    raised: list[LogyardError] = []
    async with faulty_cluster(monkeypatch, raised) as servers, logyard.connect(servers, timeout=0.1) as yard:
        with trio.fail_after(20):
            for error in meets(raised):
                with pytest.raises(caught(error)) as found:
                    await yard.log("orders").truncate(0)
                assert said(found.value) == said(error)


class Passing:
    """Stands for the modules `time` and `threading` in the blocking client: a back-off is over at once.

    A socket's timeout is the system's, in real time: a short one would be over before a busy machine has answered.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def Event(self) -> Passing:
        return self

    def wait(self, delay: float) -> None:
        self.now += delay

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


async def test_the_blocking_client(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[LogyardError] = []
    passing = Passing()
    for module, name in ((sync, "time"), (sync, "threading"), (sync_link, "time")):
        monkeypatch.setattr(module, name, passing)

    def blocking(servers: list[str]) -> None:
        with logyard.connect_sync(servers) as yard:
            for error in meets(raised):
                with pytest.raises(caught(error)) as found:
                    yard.log("orders").truncate(0)
                assert said(found.value) == said(error)

    async with faulty_cluster(monkeypatch, raised) as servers:
        await trio.to_thread.run_sync(blocking, servers)
    assert passing.now > TIMEOUT_S, "what is tried again was so until its time was over"
