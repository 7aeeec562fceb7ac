"""What the log keeps of one group, without a system: parts that write down what they were told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.engine.log import group_logs
from logyard.engine.log.group_logs import GroupLogs
from logyard.protocol.errors import NoSpace, WalFailed


class Bench:
    """A node's log with one member, 7, in segments 2 and 3, and what each part was told in order."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.errors: list[Exception] = []
        self.busy = False
        self.decided: list[Callable[[], None] | None] = []
        self.member: Any = SimpleNamespace(
            uid=7, segments=[SimpleNamespace(segment=2), SimpleNamespace(segment=3)], flushed=4, compactable=9,
            raft=SimpleNamespace(stopped=False), spec=SimpleNamespace(is_system=False),
            chunks=(b"one", b"two"),
        )  # fmt: skip
        self.members = {7: self.member}
        self.wal: Any = SimpleNamespace(
            forget=self.note("wal forgets"), restart=self.note("wal restarts"), keep_only=self.note("wal keeps"),
            next_batch=31, current=5, current_entries=[(7, "e7"), (8, "e8")],
        )  # fmt: skip
        group_commit: Any = SimpleNamespace(wal=self.wal, exclusive=self.exclusive, let_go=self.let_go)
        self.group_commit = group_commit
        group_commit.leave_out = self.leave_out
        books: Any = SimpleNamespace(
            decide=self.decide, commit_store=self.commit_store, forget=self.note("books forget")
        )
        self.waiting = [SimpleNamespace(file=4, entries=[(7, "older")])]
        group_commit.put_back = lambda pairs, entries: entries.extend(pairs)
        flush: Any = SimpleNamespace(
            forget=self.note("flush forgets"), unflushed=SimpleNamespace(files=lambda: self.waiting)
        )  # fmt: skip
        segments: Any = SimpleNamespace(
            leave=lambda member, number: self.did.append(("leave", number)), forget=self.note("segments forget"),
            spoil=lambda files: self.did.append(("spoil", sorted(files))),
            take_over=lambda old, new: self.did.append(("take over", old.uid, new.uid)),
            stored_through=lambda member: member.flushed,
        )  # fmt: skip
        homes: Any = SimpleNamespace(forget=self.note("homes forget"), recount=self.note("recount"))
        janitor: Any = SimpleNamespace(lock=trio.Lock(), make_room=self.note("make room"), try_roll=self.roll)
        self.logs = GroupLogs(
            cast("Any", self.members),
            group_commit,
            books,
            flush,
            segments,
            cast("Any", SimpleNamespace(remove=self.note("ring removed"))),
            homes,
            janitor,
            self.note("forgotten"),
            lambda uid, names: self.did.append(("chunks", uid, names)),
        )

    def note(self, what: str) -> Callable[..., None]:
        return lambda *_: self.did.append(what)

    def leave_out(self, uid: int, files: Any) -> None:
        self.did.append(("leave out", uid, [list(one) for one in files]))
        for entries in files:
            entries[:] = [pair for pair in entries if pair[0] != uid]

    def let_go(self, pairs: Any) -> None:
        self.did.append(("let go", list(pairs)))

    async def exclusive(self, call: Callable[[], Any]) -> Any:
        self.did.append("exclusive")
        return call()

    def decide(self, build: Callable[[], Any], then: Callable[[], None] | None) -> None:
        self.did.append(("decide", list(build())))
        self.decided.append(then)

    async def commit_store(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.did.append("commit")
        for then in self.decided:
            if then is not None:
                then()

    async def roll(self) -> None:
        assert self.logs.janitor_lock.locked()
        self.did.append("roll")


async def test_a_replica_leaves_its_segments_when_the_rows_say_that_it_is_gone() -> None:
    bench = Bench()
    await bench.logs.forget([bench.member], {7: lambda: [(b"row", None)], 8: lambda: [(b"other", None)]})
    assert bench.did == [
        "flush forgets", "forgotten", "wal forgets", "homes forget", ("decide", [(b"row", None)]),
        ("decide", [(b"other", None)]), "commit", ("leave", 2), ("leave", 3), ("chunks", 7, (b"one", b"two")),
    ]  # fmt: skip


async def test_what_is_decided_waits_for_room_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_logs, "RETRY_S", 0.0)
    bench = Bench()
    bench.errors = [NoSpace("full"), NoSpace("full")]
    await bench.logs.forget([bench.member], {7: tuple})
    assert bench.did.count("make room") == 2 and bench.did[-4:-1] == ["commit", ("leave", 2), ("leave", 3)]
    assert bench.did.count(("decide", [])) == 1, "whatever is stored first brings it along"
    bench = Bench()
    bench.errors = [WalFailed("the disk")]
    with pytest.raises(WalFailed):
        await bench.logs.forget([bench.member], {7: tuple})
    assert not any(one[0] in ("leave", "chunks") for one in bench.did)


def test_the_log_lets_go_of_sleepers_when_they_are_a_good_part_of_it() -> None:
    bench = Bench()
    bench.wal.current_entries = [(8, "e8")] * 32 + [(7, "e7")]
    bench.group_commit.busy = False
    bench.logs.forget_slept(2)
    assert not bench.did, "33 entries, and 2 groups went"
    bench.group_commit.busy = True
    bench.logs.forget_slept(3)
    assert not bench.did, "a write is under way"
    bench.group_commit.busy = False
    bench.logs.forget_slept(3)
    assert bench.did == [("let go", [(8, "e8")] * 32), "wal keeps"]


async def test_a_void_log_is_left_out_of_every_file_without_a_segment() -> None:
    bench = Bench()
    through, take_back = await bench.logs.void(7)
    assert through == 30 and bench.did == [
        "exclusive", "wal restarts", ("leave out", 7, [[(7, "older")], [(7, "e7"), (8, "e8")]]), ("spoil", [4, 5]),
    ]  # fmt: skip
    assert bench.logs.restart(7) == 30
    # The WAL's thread sealed the current file, of which the loop has not heard.
    older, current = bench.waiting[0].entries, bench.wal.current_entries
    bench.wal.current, bench.wal.current_entries = 6, []
    assert (older, current) == ([], [(8, "e8")])
    take_back()
    assert (older, current) == ([(7, "older")], [(8, "e8"), (7, "e7")]) and not bench.wal.current_entries


async def test_a_file_is_rolled_for_a_log_that_could_go_further_than_its_segments() -> None:
    bench = Bench()
    await bench.logs.roll_out(bench.member)
    assert bench.did == ["roll"] and not bench.logs.janitor_lock.locked()
    bench.member.flushed = 9
    await bench.logs.roll_out(bench.member)
    bench.member.flushed, bench.member.raft.stopped = 4, True
    await bench.logs.roll_out(bench.member)
    assert bench.did == ["roll"]


def test_who_sleeps_and_who_is_made_anew_leave_nothing_to_store() -> None:
    bench = Bench()
    bench.logs.slept(bench.member)
    assert bench.did == ["flush forgets", "books forget", "segments forget", "wal forgets"]
    bench.did.clear()
    new: Any = SimpleNamespace(uid=70)
    bench.logs.take_over(bench.member, new)
    assert bench.did == ["flush forgets", "books forget", ("take over", 7, 70), "recount"]
