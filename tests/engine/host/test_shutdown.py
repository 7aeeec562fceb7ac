"""A node's end, alone: what it still says, what it leaves behind, and that it waits for nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from logyard.engine.disk.door import Disk
from logyard.engine.host.shutdown import FAREWELL_SECONDS, MARK_SECONDS, FailStop, note_commits
from logyard.engine.log import meta_rows
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.recovery.incarnation import MARK
from logyard.protocol.errors import LogyardError, NoSpace, Outdated, WalFailed


class Bench:
    """An end, and all who hear of it."""

    def __init__(self, path: Path) -> None:
        self.told: list[Any] = []
        self.rows: list[Any] = []
        self.talking = False
        self.members: dict[int, Any] = {}
        self.end = FailStop(
            Disk(), path, self.members, self, self.says("over"), self.says("sent"), lambda: self.talking
        )

    def says(self, what: str) -> Any:
        return lambda *_: self.told.append(what)

    async def commit(self, build: Any) -> None:
        self.rows += build()

    def member(self, uid: int, role: int = FOLLOWER) -> Any:
        proposals = SimpleNamespace(fail=self.says(f"failed {uid}"), fail_proposed=self.says(f"unknown {uid}"))
        log = SimpleNamespace(stable=10)
        raft = SimpleNamespace(role=role, stopped=False, commit=12, term=3, vote=1, log=log)
        self.members[uid] = SimpleNamespace(
            uid=uid, raft=raft, proposals=proposals, damaged=False, snapshot_stored=5
        )  # fmt: skip
        return self.members[uid]


async def test_the_first_reason_stays_and_whoever_waits_hears_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.member(7)
    bench.end.begin(NoSpace("full"))
    bench.end.begin(WalFailed("and broken"))
    assert bench.told == ["over", "failed 7", "unknown 7"], "nothing is promised before anybody is told"
    error = await bench.end.finish()
    assert isinstance(error, WalFailed) and "full" in str(error)
    assert "full" in (tmp_path / MARK).read_text(), "the next start reads everything anew from the disk"
    assert not bench.rows


async def test_who_is_outdated_hands_nothing_over_and_its_directory_says_why(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.member(7, LEADER)
    bench.end.begin(Outdated(1, "a newer life is known"))
    assert "sent" not in bench.told
    assert isinstance(await bench.end.finish(), Outdated)
    assert bench.rows == [(meta_rows.OUTDATED, b"a newer life is known")] and not (tmp_path / MARK).exists()


async def test_no_disk_or_network_that_does_not_answer_holds_up_the_end(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(tmp_path)
    bench.talking = True

    async def hangs(build: Any) -> None:
        await trio.sleep_forever()

    bench.commit = hangs  # type: ignore[method-assign]
    bench.end.begin(Outdated(1, "a newer life is known"))
    began = trio.current_time()
    await bench.end.finish()
    assert MARK_SECONDS + FAREWELL_SECONDS <= trio.current_time() - began <= MARK_SECONDS + 2 * FAREWELL_SECONDS


async def test_a_mark_that_can_not_be_left_is_no_other_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "gone")
    bench.end.begin(WalFailed("the disk"))
    assert isinstance(await bench.end.finish(), WalFailed)


def test_the_last_word_says_how_far_each_group_was_committed() -> None:
    bench = Bench(Path())
    written: list[Any] = []
    wal: Any = SimpleNamespace(write=written.extend)
    bench.member(7)
    bench.member(8).damaged = True
    bench.member(9).snapshot_stored = 10
    note_commits(bench.members.values(), wal)
    assert [(one.uid, one.hard_state) for one in written] == [(7, (3, 1, 10))], "of what is durable here, and no more"

    def fails(items: Any) -> None:
        raise LogyardError("the disk")

    wal.write = fails
    note_commits(bench.members.values(), wal)
