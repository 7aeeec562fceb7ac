"""The storage floor, composed alone: what it says to the floors above, on doubles of what lies below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.identity import Acquaintances
from logyard.engine.jobs import Jobs
from logyard.engine.log.compose import Storage, compose_storage
from logyard.engine.log.wal import Gap, Rolled
from logyard.engine.replica.ground import Ground
from logyard.protocol.errors import NoSpace


class Bench:
    """The floor of a node that has one member; `said` is what went up."""

    def __init__(self, path: Path) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.member: Any = SimpleNamespace(uid=7)
        wal = SimpleNamespace(stock=SimpleNamespace(short=False))
        store = SimpleNamespace(jobs=Jobs(lambda: 0.0), delete_group=self.says("payloads go"))
        loop = SimpleNamespace(persisted=None, persist_alone=None)
        self.ground = cast(
            Any,
            Ground(
                1, path, SystemConfig(), Disk(), cast(Any, store), cast(Any, wal), cast(Any, None),
                cast(Any, {7: self.member}), {1}, set(), {}, cast(Any, None), cast(Any, None), cast(Any, loop),
                cast(Any, None), self.says("spawn"),
            ),
        )  # fmt: skip
        self.storage: Storage = compose_storage(
            self.ground, cast(Any, None), Acquaintances(), None, self.says("refused")
        )

    def says(self, what: str) -> Any:
        return lambda *arguments: self.said.append((what, *arguments))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)


def test_a_gap_in_the_log_stops_its_member_and_no_other(bench: Bench) -> None:
    bench.storage.above.stopped.bind(bench.says("stop"))
    trio.run(_rolled, bench, [Gap(7, 12), Gap(8, 1)])
    ((_, member, reason),) = bench.said
    assert member is bench.member and reason == "the write-ahead log expected entry 12 of this group next"


async def _rolled(bench: Bench, gaps: list[Gap]) -> None:
    bench.storage.group_commit.rolled(Rolled([], gaps))


def test_a_full_disk_that_group_commit_meets_is_known_to_space(bench: Bench) -> None:
    assert not bench.storage.space.full
    bench.storage.group_commit.no_space("a file of the log")
    assert bench.storage.space.full and bench.storage.space.reason == "a file of the log"


def test_no_promise_holds_up_space(bench: Bench) -> None:
    bench.storage.above.no_room.bind(bench.says("give up"))
    bench.storage.location.pin(("wal", 3))
    bench.storage.janitor._no_room()
    assert bench.said == [("give up",)] and bench.storage.location.expired == 1


def test_whoever_forgets_a_group_tells_who_keeps_something_for_it(bench: Bench) -> None:
    bench.storage.above.forgotten.bind(bench.says("chunks"))
    bench.storage.group_logs._forgotten(7)
    assert bench.said == [("chunks", 7), ("payloads go", 7)]


def test_nothing_is_heard_before_it_is_bound(bench: Bench) -> None:
    assert "failed" in bench.storage.above.unbound() and len(bench.storage.above.unbound()) == 14
    with pytest.raises(AssertionError):
        bench.storage.group_commit.failed(NoSpace("nobody hears"))
