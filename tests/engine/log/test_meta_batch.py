"""One commit at a time to the meta store, alone: what travels together, and what a failed commit owes the next one."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.identity import Acquaintances, Origin
from logyard.engine.log import checkpoint_rows as rows
from logyard.engine.log import meta_batch, meta_rows
from logyard.engine.log.location import SealedFile
from logyard.engine.log.meta_batch import MetaBatch
from logyard.engine.log.meta_rows import FileRow, StateRow
from logyard.engine.replica.member import Member
from logyard.engine.snapshot.format import Encoded, Snapshot
from logyard.protocol.errors import LogyardError, NoSpace, WalFailed

from ..quiesce.doubles import member_of

Rows = dict[bytes, bytes | None]
UID = 9


class Meta:
    """A meta store of one copy; `gate`, while it is not set, keeps a commit waiting in its thread."""

    def __init__(self) -> None:
        self.commits: list[Rows] = []
        self.thrice: set[int] = set()
        self.rows: dict[bytes, bytes] = {}
        self.error: LogyardError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def commit(self, puts: Sequence[rows.Put], thrice: Collection[int] = ()) -> None:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.commits.append(dict(puts))
        self.thrice = set(thrice)
        self.rows.update({key: value for key, value in puts if value is not None})

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)


class Bench:
    """A node's books over doubles; `changes` is what the payload store has to say, once."""

    def __init__(self) -> None:
        self.meta = Meta()
        self.members: dict[int, Member] = {}
        self.changed: list[tuple[bytes, bytes | None]] = []
        self.met = Acquaintances()
        self.failures: list[LogyardError] = []
        self.tasks: list[Callable[[], Awaitable[None]]] = []
        self.beside: list[rows.Put] = []
        self.books = MetaBatch(
            self.members, cast(Any, self.meta), cast(Any, self), cast(Any, self), self.met, self.failures.append,
            self.tasks.append, lambda member, index, encoded, anew: self.beside,
        )  # fmt: skip

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        found, self.changed = self.changed, []
        return found

    async def out_of_reserve(self, what: str, job: Callable[[], Awaitable[Any]]) -> Any:
        return await job()

    def member(self, uid: int = UID, release: int = 0) -> Member:
        """A member whose newest release is not covered by its floor."""
        member = self.members[uid] = member_of(set(), uid)
        member.last_release = release
        return member

    async def refused(self, error: LogyardError, commit: Callable[[], Awaitable[Any]]) -> None:
        """A commit that the disk does not take."""
        self.meta.error = error
        with pytest.raises(type(error)):
            await commit()
        self.meta.error = None

    def floor(self, uid: int = UID) -> int | None:
        """The floor that the newest commit stored of a group."""
        value = self.meta.commits[-1].get(meta_rows.state_key(uid))
        return None if value is None else StateRow.unpack(meta_rows.state_key(uid), value).floor


def stored(uid: int, value: bytes = b"row") -> tuple[bytes, bytes]:
    """A row of the payload store about a group."""
    return b"h" + meta_rows.KEY.pack(uid), value


def snapshot(index: int, uid: int = UID) -> tuple[Snapshot, Encoded]:
    one = Snapshot(uid, index, 2, b"", 1, 0, 0, {}, b"")
    return one, Encoded(b"manifest %d" % index, {b"chunk": memoryview(b"x")}, (b"chunk",), 100)


async def test_rows_are_built_when_the_commit_before_is_durable() -> None:
    bench = Bench()
    order: list[str] = []

    def one() -> list[rows.Put]:
        order.append("first built")
        return [(b"a", b"1")]

    def two() -> list[rows.Put]:
        order.append("second built")
        return [(b"a", b"2")]

    bench.meta.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.books.commit(one, then=lambda: order.append("first durable")))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(lambda: bench.books.commit(two, then=lambda: order.append("second durable")))
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["first built"]
        bench.meta.gate.set()
    assert order == ["first built", "first durable", "second built", "second durable"]
    assert bench.meta.commits == [{b"a": b"1"}, {b"a": b"2"}]


async def test_what_is_decided_goes_with_the_first_commit_that_succeeds() -> None:
    bench = Bench()
    done: list[str] = []
    await bench.books.settle()
    bench.books.decide(lambda: [(b"gone", None), (b"place", None)], lambda: done.append("one"))
    bench.books.decide(lambda: [(b"other", b"1")])
    bench.changed = [stored(UID)]
    await bench.refused(NoSpace("full"), bench.books.settle)
    assert not bench.meta.commits and not done
    # What was asked for before it was decided counts less; the payload store's rows travel with it.
    await bench.books.commit(lambda: [(b"place", b"row")], then=lambda: done.append("then"))
    assert bench.meta.commits == [
        {b"gone": None, b"other": b"1", b"place": None, meta_rows.STORE + stored(UID)[0]: b"row"}
    ]
    assert done == ["one", "then"]
    await bench.books.settle()
    assert len(bench.meta.commits) == 1, "once"
    # What is decided while a commit is under way goes with the one behind it.
    bench.meta.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.books.commit, lambda: [(b"a", b"1")])
        await trio.testing.wait_all_tasks_blocked()
        bench.books.decide(lambda: [(b"late", None)])
        bench.meta.gate.set()
    await bench.books.settle()
    assert bench.meta.commits[1:] == [{b"a": b"1"}, {b"late": None}]


async def test_what_is_decided_goes_in_parts_where_all_of_it_is_too_much() -> None:
    bench = Bench()
    done: list[int] = []
    for number in range(10):
        bench.books.decide(lambda number=number: [(b"%d" % number, None)], lambda number=number: done.append(number))  # type: ignore[misc]
    commit = bench.meta.commit

    def small(puts: Sequence[rows.Put], thrice: Collection[int] = ()) -> None:
        if len(puts) > 4:
            raise NoSpace("too much")
        commit(puts, thrice)

    bench.meta.commit = small  # type: ignore[method-assign]
    await bench.books.commit(lambda: [(b"a", b"1"), (b"b", b"1")])
    assert done == list(range(10)) and bench.meta.commits[-1] == {b"a": b"1", b"b": b"1"}
    assert [len(one) for one in bench.meta.commits] == [3, 3, 3, 1, 2]
    # One that is too large by itself fails who comes with it, and stays.
    bench.books.decide(lambda: [(b"%d" % number, None) for number in range(5)])
    with pytest.raises(NoSpace):
        await bench.books.commit(lambda: [(b"c", b"1")])
    bench.meta.commit = commit  # type: ignore[method-assign]
    await bench.books.settle()
    assert len(bench.meta.commits[-1]) == 5


async def test_nothing_to_store_is_no_commit_and_still_done() -> None:
    bench = Bench()
    done: list[bool] = []
    await bench.books.commit(tuple, then=lambda: done.append(True))
    assert done == [True] and not bench.meta.commits


async def test_a_floor_is_raised_once_and_goes_with_the_next_commit() -> None:
    bench = Bench()
    member = bench.member(release=20)
    bench.member(8, release=5)  # At or below its snapshot a floor means nothing any more.
    bench.members[8].covered(7, 1, 0)
    for _ in range(2):
        bench.books.raise_floors([UID, 8, 1234])
    await bench.books.commit(lambda: [(b"a", b"1")])
    assert bench.floor() == member.floor == 20 and bench.floor(8) is None
    await bench.books.commit(lambda: [(b"a", b"2")])
    assert list(bench.meta.commits[1]) == [b"a"]


@pytest.mark.parametrize("how", ["deleted", "another", "damaged", "forgotten"])
async def test_no_floor_is_stored_of_who_is_gone(how: str) -> None:
    bench = Bench()
    member = bench.member(release=20)
    bench.books.raise_floors([UID])
    if how == "deleted":
        member.is_to_go()
    elif how == "another":
        bench.member()
    elif how == "damaged":
        member.quarantine("a test")
    else:
        bench.books.forget(member)
    await bench.books.commit(lambda: [(b"a", b"1")])
    assert bench.floor() is None and bench.meta.commits == [{b"a": b"1"}]


async def test_what_the_store_says_is_dead_has_its_floor_in_the_same_commit() -> None:
    bench = Bench()
    bench.member(release=20)
    bench.changed = [stored(UID)]
    await bench.books.commit_store()
    (commit,) = bench.meta.commits
    assert commit[meta_rows.STORE + stored(UID)[0]] == b"row" and bench.floor() == 20


async def test_the_stores_rows_go_only_with_who_asks_for_them() -> None:
    bench = Bench()
    bench.changed = [stored(UID)]
    await bench.books.commit(lambda: [(b"a", b"1")])
    assert bench.meta.commits == [{b"a": b"1"}] and bench.changed
    bench.books.owe_store()
    await bench.books.commit(lambda: [(b"a", b"2")])
    assert len(bench.meta.commits[1]) == 2 and not bench.changed
    await bench.books.commit_store()
    assert len(bench.meta.commits) == 2, "once"


@pytest.mark.parametrize("where", ["on the disk", "while it is built"])
async def test_a_failed_commit_leaves_everything_to_the_next(where: str) -> None:
    """What a builder raised took the floors with it, and with the next commit the bytes that they cover were let go."""
    bench = Bench()
    bench.member(release=20)
    bench.books.raise_floors([UID])
    bench.met.meet(2, Origin(5, 1, 1, 0))
    bench.changed = [stored(UID, b"old"), stored(8)]

    def no_snapshot() -> list[rows.Put]:
        raise LogyardError("there is no snapshot")

    if where == "on the disk":
        await bench.refused(NoSpace("full"), bench.books.commit_store)
    else:
        with pytest.raises(LogyardError):
            await bench.books.commit(no_snapshot, store=True)
    assert not bench.meta.commits and not bench.failures
    bench.changed = [stored(UID, b"new")]
    await bench.books.commit(lambda: [(b"a", b"1")])
    (commit,) = bench.meta.commits
    assert bench.floor() == 20 and commit[b"a"] == b"1"
    assert meta_rows.peer_key(2) in commit
    assert commit[meta_rows.STORE + stored(UID)[0]] == b"new" and commit[meta_rows.STORE + stored(8)[0]] == b"row"


async def test_a_cut_commit_is_owed_as_well() -> None:
    bench = Bench()
    bench.member(release=20)
    bench.books.raise_floors([UID])
    with trio.CancelScope() as scope:

        def build() -> list[rows.Put]:
            scope.cancel()
            return [(b"a", b"1")]

        await bench.books.commit(build)
    assert scope.cancelled_caught
    await bench.books.commit(lambda: [(b"a", b"2")])
    assert bench.floor() == 20


async def test_a_disk_that_fails_is_told_of_and_a_full_one_is_not() -> None:
    bench = Bench()
    await bench.refused(NoSpace("full"), lambda: bench.books.commit(lambda: [(b"a", b"1")]))
    assert not bench.failures
    error = WalFailed("the disk")
    await bench.refused(error, lambda: bench.books.commit(lambda: [(b"a", b"1")]))
    assert bench.failures == [error]


async def test_checkpoints_and_files_go_together() -> None:
    bench = Bench()
    good, damaged, gone = bench.member(1), bench.member(2), bench.member(3)
    damaged.quarantine("a test")
    gone.is_to_go()
    bench.changed = [stored(1)]
    files = [SealedFile(8, 100), SealedFile(6, 200)]
    await bench.books.commit_members([good, damaged, gone], sealed_files=files, gone_files=[4])
    (commit,) = bench.meta.commits
    keys = {meta_rows.state_key(1), meta_rows.STORE + stored(1)[0]}
    keys |= {meta_rows.file_key("wal", number) for number in (4, 6, 8)} | {meta_rows.file_key("flushed", 0)}
    assert set(commit) == keys and commit[meta_rows.file_key("wal", 4)] is None
    flushed = FileRow.unpack(meta_rows.file_key("flushed", 0), commit[meta_rows.file_key("flushed", 0)] or b"")
    assert flushed.fields == {"file": 8}, "up to the newest of them"
    await bench.books.commit_members([], gone_files=[6])
    assert set(bench.meta.commits[1]) == {meta_rows.file_key("wal", 6)}


async def test_a_snapshot_is_stored_with_what_belongs_to_it_and_never_after_a_newer_one() -> None:
    bench = Bench()
    member = bench.member()
    bench.beside = [(b"chunk", b"x")]
    captured = rows.Captured(member, *snapshot(7))
    bench.changed = [stored(8)]
    assert await bench.books.commit_snapshots([captured]) == [captured]
    keys = {meta_rows.snapshot_key(UID), meta_rows.state_key(UID), b"chunk", meta_rows.STORE + stored(8)[0]}
    assert set(bench.meta.commits[0]) == keys, "with what is dead below it: a restart does not mark that again"
    assert (member.snapshot_stored, member.chunks) == (7, (b"chunk",))
    assert bench.books.has_snapshot(UID) and bench.books.snapshot(UID).data == b"manifest 7"
    for index in (7, 6):
        assert await bench.books.commit_snapshots([rows.Captured(member, *snapshot(index))]) == []
    assert len(bench.meta.commits) == 1 and member.snapshot_stored == 7


@pytest.mark.parametrize("how", ["deleted", "another", "damaged"])
async def test_no_snapshot_is_stored_of_who_is_gone(how: str) -> None:
    bench = Bench()
    member = bench.member()
    if how == "deleted":
        member.is_to_go()
    elif how == "another":
        bench.member()
    else:
        member.quarantine("a test")
    assert await bench.books.commit_snapshots([rows.Captured(member, *snapshot(7))]) == []
    assert not bench.meta.commits and not bench.books.has_snapshot(UID)
    with pytest.raises(LogyardError, match="no snapshot"):
        bench.books.snapshot(UID)


async def test_snapshots_of_system_groups_alone_are_stored_thrice() -> None:
    bench = Bench()
    names = {UID: "_catalog", 8: "log"}
    members = [member_of(set(), uid, name) for uid, name in names.items()]
    bench.members.update({one.uid: one for one in members})
    captured = [rows.Captured(one, *snapshot(7, one.uid)) for one in members]
    assert await bench.books.commit_snapshots(captured) == captured and bench.meta.thrice == {UID}
    assert await bench.books.commit_snapshots(captured) == [] and len(bench.meta.commits) == 1


async def test_a_snapshot_whose_commit_failed_is_not_stored() -> None:
    bench = Bench()
    member = bench.member()
    captured = rows.Captured(member, *snapshot(7))
    await bench.refused(NoSpace("full"), lambda: bench.books.commit_snapshots([captured]))
    assert member.snapshot_stored == 0 and member.chunks == ()
    assert await bench.books.commit_snapshots([captured]) == [captured]


def peers_of(commits: Iterable[Rows]) -> list[int]:
    return [key[-1] for commit in commits for key in commit if key.startswith(meta_rows.PEER)]


async def test_what_is_new_of_the_others_is_stored_within_a_look_and_their_counts_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    now = 1000.0
    monkeypatch.setattr(meta_batch, "time", SimpleNamespace(monotonic=lambda: now))
    bench.books.look()
    assert not bench.tasks, "there is nothing new"
    bench.met.meet(2, Origin(5, 1, 1, 0))
    bench.books.look()
    bench.books.look()
    (task,) = bench.tasks
    await task()
    assert peers_of(bench.meta.commits) == [2]
    bench.met.heard(2, 40)
    bench.books.look()
    assert len(bench.tasks) == 1, "a count alone is in no hurry"
    now += meta_batch.PEERS_SECONDS
    bench.books.look()
    await bench.tasks[1]()
    assert peers_of(bench.meta.commits) == [2, 2] and not bench.met.stale


async def test_what_could_not_be_stored_of_the_others_is_stored_another_time() -> None:
    bench = Bench()
    bench.met.meet(2, Origin(5, 1, 1, 0))
    bench.books.look()
    bench.meta.error = NoSpace("full")
    await bench.tasks[0]()
    bench.meta.error = None
    bench.books.look()
    await bench.tasks[1]()
    assert peers_of(bench.meta.commits) == [2]
