"""Watches over real engines: in order, without a gap, none twice, whatever happens to leaders and slow readers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from logyard.client import kv_watch as client_watch
from logyard.client.kv import KV
from logyard.client.runtime_trio import TrioRuntime
from logyard.machines.kv.history import Version
from logyard.protocol.errors import BadRequest, NotLeader, UnknownGroup
from logyard.protocol.kv import Changes, Compacted, Compare, Delete, Event, KeyValue, Put
from logyard.service.door import answers
from logyard.service.kv import reads as kv_reads
from logyard.service.kv import tracks as kv_tracks
from logyard.service.kv import watch as kv_watch
from logyard.service.kv.tracks import NO_DELETE, PARTS, PREVIOUS, Found, Track, Tracks, Watch, collect, prefix_end
from tests.engine.host.cluster import until

from .test_verbs import machine, served


async def following(watch: client_watch.Watch, count: int, seconds: float = 20) -> list[Changes]:
    found: list[Changes] = []
    with trio.fail_after(seconds):
        async for changes in watch:
            found.append(changes)
            if len(found) == count:
                break
    return found


def seen(some: list[Changes]) -> list[tuple[int, list[tuple[bytes, bytes | None]]]]:
    return [
        (one.revision, [(event.key, None if event.kv is None else event.kv.value) for event in one.events])
        for one in some
    ]


async def test_a_watch_may_begin_with_the_revision_of_an_empty_group(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"a", start=1) as early:
            await kv.put(b"a", b"one")
            assert seen(await following(early, 1)) == [(2, [(b"a", b"one")])]
        async with kv.watch(b"a", start=1) as late:
            assert seen(await following(late, 1)) == [(2, [(b"a", b"one")])]


@pytest.mark.parametrize("key, start", [(b"", 0), (b"k" * 17_000, 0), (b"k", -1), (b"k", 1 << 63)])
async def test_a_watch_that_can_not_be_ends_no_other(tmp_path: Path, key: bytes, start: int) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"a") as sound:
            await sound.created()
            with pytest.raises(BadRequest), trio.fail_after(10):
                async with kv.watch(key, start=start) as watch:
                    await watch.created()
            await kv.put(b"a", b"one")
            assert seen(await following(sound, 1)) == [(2, [(b"a", b"one")])]


async def test_a_watch_of_what_nobody_writes_knows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"quiet", progress=True) as watch, trio.open_nursery() as nursery:
            start = await watch.created()
            # Never silent for as long as it takes to be told in a pause.
            monkeypatch.setattr(kv_watch, "ALIVE_S", 0.2)

            async def write() -> None:
                while True:
                    await kv.put(b"busy", b"")

            nursery.start_soon(write)
            with trio.fail_after(20):
                async for changes in watch:
                    assert not changes.events
                    if changes.revision > start:
                        break
            nursery.cancel_scope.cancel()


async def test_watches_of_one_key_see_what_each_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        await kv.put(b"a", b"one")
        async with (
            kv.watch(b"a", previous=True) as more, kv.watch(b"a") as plain, kv.watch(b"a", values=False) as less
        ):  # fmt: skip
            for watch in (more, plain, less):
                await watch.created()
            await kv.put(b"a", b"two")
            found = [(await following(watch, 1))[0].events[0] for watch in (more, plain, less)]
        assert [None if one.previous is None else one.previous.value for one in found] == [b"one", None, None]
        assert [one.kv.value for one in found if one.kv] == [b"two", b"two", b""]


async def test_a_watch_sees_whole_revisions_from_where_it_begins(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        large = b"L" * 70_000
        await kv.put(b"a/1", b"one")
        await kv.put(b"b", b"other")
        await kv.txn([], [Put(b"a/2", large), Put(b"c", b""), Put(b"a/3", b"three")])
        async with kv.watch(b"a/", prefix=True, start=2, previous=True) as past, kv.watch(b"a/1") as now:
            assert await now.created() == 5
            assert seen(await following(past, 2)) == [
                (2, [(b"a/1", b"one")]), (4, [(b"a/2", large), (b"a/3", b"three")])
            ]  # fmt: skip
            await kv.delete(b"a/", prefix=True)
            await kv.put(b"a/1", b"again")
            deleted, again = await following(past, 2)
            assert seen([deleted, again]) == [
                (5, [(b"a/1", None), (b"a/2", None), (b"a/3", None)]), (6, [(b"a/1", b"again")])
            ]  # fmt: skip
            assert [event.previous.value for event in deleted.events if event.previous] == [b"one", large, b"three"]
            assert again.events[0].previous is None
            assert seen(await following(now, 2)) == [(5, [(b"a/1", None)]), (6, [(b"a/1", b"again")])]


async def test_filters_keys_and_progress(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with (
            kv.watch(b"k", deletes=False, values=False) as puts,
            kv.watch(b"k", puts=False) as deletes,
            kv.watch(b"elsewhere", progress=True) as quiet,
        ):
            for watch in (puts, deletes, quiet):
                await watch.created()
            await kv.put(b"k", b"v" * 5000)
            await kv.delete(b"k")
            assert seen(await following(puts, 1)) == [(2, [(b"k", b"")])]
            assert seen(await following(deletes, 1)) == [(3, [(b"k", None)])]
            with trio.fail_after(20):
                while (await anext(quiet)).revision < 3:
                    pass


async def test_a_compacted_start_says_from_where_on_there_is_history(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        for number in range(6):
            await kv.put(b"k", b"%d" % number)
        await kv.compact(4)
        async with kv.watch(b"k", start=3) as late:
            with trio.fail_after(20), pytest.raises(Compacted) as gone:
                await anext(late)
            assert gone.value.revision == 4
        async with kv.watch(b"k", start=gone.value.revision + 1) as enough:
            assert [one.revision for one in await following(enough, 3)] == [5, 6, 7]


async def test_a_watch_does_not_go_on_in_a_group_made_anew_under_its_name(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"k", start=2) as watch:
            await kv.put(b"k", b"of the group before")
            assert [one.revision for one in await following(watch, 1)] == [2]
            # Nobody sees it go: there is no connection meanwhile.
            await doors.close(1)
            await run.nodes[1].delete_group("kv")
            await run.create("kv", machine="kv")
            await doors.open(1)
            for number in range(3):
                await kv.put(b"k", b"%d" % number)
            with trio.fail_after(20), pytest.raises(UnknownGroup, match="made anew"):
                await anext(watch)
            async with kv.watch(b"k", start=2) as other:
                assert [one.revision for one in await following(other, 3)] == [2, 3, 4]


async def test_many_watches_go_on_at_the_next_leader_without_a_gap(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, doors, yard):
        kv = yard.kv("kv")
        keys = [b"k%03d" % number for number in range(300)]
        found: dict[int, list[Changes]] = {}
        ready = 0

        async def watch(number: int, key: bytes, prefix: bool) -> None:
            nonlocal ready
            async with kv.watch(key, prefix=prefix) as changes:
                await changes.created()
                ready += 1
                # Elections and a crash are in between.
                found[number] = await following(changes, 6 if not prefix else 60, 100)

        async def write(some: int) -> None:
            async with trio.open_nursery() as nursery:
                for key in keys:
                    nursery.start_soon(kv.put, key, b"%d" % some * (2000 if some % 2 else 1))

        async with trio.open_nursery() as nursery:
            for number in range(900):
                nursery.start_soon(watch, number, keys[number % 300], False)
            for number in range(900, 1000):
                nursery.start_soon(watch, number, b"k%02d" % (number % 30), True)
            await until(lambda: ready == 1000, "all watches are there")
            await write(0)
            first = await run.leader("kv")
            await run.lead(1 + first % 3, "kv")
            await write(1)
            await write(2)
            second = await run.leader("kv")
            await doors.crash(second)
            await write(3)
            await write(4)
            await doors.start(second)
            await write(5)
        values = [b"%d" % some * (2000 if some % 2 else 1) for some in range(6)]
        for number, some in found.items():
            events = [event for changes in some for event in changes.events]
            revisions = [changes.revision for changes in some]
            assert revisions == sorted(set(revisions)), "in order, none twice"
            for key in {event.key for event in events}:
                assert [event.kv.value for event in events if event.key == key and event.kv] == values, number


async def test_a_slow_reader_keeps_little_and_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_watch, "BUFFER_BYTES", 20_000)
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"k") as slow, kv.watch(b"k") as quick:
            await slow.created()
            await quick.created()
            for number in range(50):
                await kv.put(b"k", b"%d" % number * 3000)
                assert [one.revision for one in await following(quick, 1)] == [2 + number]
            assert slow.paused
            assert [one.revision for one in await following(slow, 50)] == list(range(2, 52))


@pytest.mark.parametrize("part_bytes", [200, kv_tracks.PART_BYTES])
async def test_one_revision_that_is_too_much_for_a_push_is_asked_for(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_watch, "PAYLOAD_BYTES_MAX", 10_000)
    monkeypatch.setattr(kv_tracks, "PART_BYTES", part_bytes)
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"", prefix=True) as changes:
            await changes.created()
            await kv.txn([], [Put(b"k%d" % number, b"%d" % number * 6000) for number in range(9)])
            await kv.put(b"next", b"small")
            whole, after = await following(changes, 2)
            assert seen([whole]) == [(2, [(b"k%d" % number, b"%d" % number * 6000) for number in range(9)])]
            assert seen([after]) == [(3, [(b"next", b"small")])]


@pytest.mark.parametrize("cut", [False, True])
async def test_a_revision_that_comes_in_parts_is_one_for_its_reader(
    cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tracks, "PART_BYTES", 1000)
    pushed, lost, parts = client_watch.Stream._pushed, [0], [0]

    def push(self: client_watch.Stream, number: int, header: Any, data: memoryview) -> None:
        if number == lost[0]:
            return
        pushed(self, number, header, data)
        parts[0] += "rest" in header
        if cut and "rest" in header and not lost[0]:
            # What comes behind the first part is lost with the connection.
            lost[0] = number

    monkeypatch.setattr(client_watch.Stream, "_pushed", push)
    async with served(tmp_path) as (_, doors, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"k", prefix=True, previous=True) as changes:
            await changes.created()
            await kv.txn([], [Put(b"k%02d" % number, b"v" * 60) for number in range(40)])
            await kv.delete(b"k", prefix=True)
            await kv.put(b"k", b"next")
            if cut:
                await until(lambda: lost[0] != 0, "a part came")
                await doors.cut(1)
            found = await following(changes, 3)
    assert [(one.revision, len(one.events)) for one in found] == [(2, 40), (3, 40), (4, 1)] and parts[0] > 4
    assert [event.key for event in found[1].events] == [b"k%02d" % number for number in range(40)]
    assert {event.previous and event.previous.value for event in found[1].events} == {b"v" * 60}


async def test_a_watch_of_large_values_goes_on_however_many_there_were(tmp_path: Path) -> None:
    """What a push took of the room for answers is given back when it was sent, not when the watch ends."""
    revisions = 2 * answers.CONNECTION_BYTES // kv_reads.ABOUT_BYTES
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"k") as changes:
            await changes.created()
            for number in range(revisions):
                await kv.put(b"k", b"%1024d" % number)
                with trio.fail_after(30):
                    told = await anext(changes)
                assert told.events[0].kv is not None and told.events[0].kv.value == b"%1024d" % number


async def test_a_stream_ends_with_its_last_watch(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        kv = yard.kv("kv")
        streams = run.nodes[1].kv._watches.streams  # type: ignore[attr-defined]
        async with kv.watch(b"k") as one:
            await one.created()
            assert len(streams) == 1
        await until(lambda: not streams, "the server has forgotten it")
        async with kv.watch(b"k") as other:
            await other.created()
            await kv.put(b"k", b"")
            assert len(await following(other, 1)) == 1


async def test_a_follower_serves_watches_of_those_who_ask_it(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, _, yard):
        kv = yard.kv("kv")
        follower = 1 + (await run.leader("kv")) % 3
        async with kv.watch(b"k", node=follower) as changes:
            await changes.created()
            await kv.put(b"k", b"v" * 2000)
            assert seen(await following(changes, 1)) == [(2, [(b"k", b"v" * 2000)])]


async def test_a_follower_has_what_is_too_much_for_a_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watch, "PAYLOAD_BYTES_MAX", 10_000)
    async with served(tmp_path, 3) as (run, _, yard):
        kv = yard.kv("kv")
        follower = 1 + (await run.leader("kv")) % 3
        async with kv.watch(b"k", prefix=True, node=follower) as changes:
            await changes.created()
            await kv.txn([], [Put(b"k%d" % number, b"%d" % number * 6000) for number in range(4)])
            found = await following(changes, 1)
            assert seen(found) == [(2, [(b"k%d" % number, b"%d" % number * 6000) for number in range(4)])]


async def test_what_is_too_much_for_a_push_is_asked_for_until_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_watch, "PAYLOAD_BYTES_MAX", 10_000)
    failures: list[Exception] = [NotLeader(0), NotLeader(0)]
    asked = KV.ask

    async def ask(self: KV, data: bytes, *how: Any) -> Any:
        if failures:
            raise failures.pop()
        return await asked(self, data, *how)

    monkeypatch.setattr(KV, "ask", ask)
    large = [Put(b"k%d" % number, b"%d" % number * 6000) for number in range(4)]
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        async with kv.watch(b"k", prefix=True) as changes:
            await changes.created()
            await kv.txn([], large)
            assert len((await following(changes, 1))[0].events) == 4 and not failures
            failures.append(BadRequest("what does not pass ends it"))
            await kv.txn([], large)
            with pytest.raises(BadRequest):
                await following(changes, 1)


async def test_a_change_and_its_condition(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        kv: KV = yard.kv("kv")
        async with kv.watch(b"", prefix=True) as changes:
            await changes.created()
            await kv.txn([Compare(b"lock", "version", "=", 0)], [Put(b"lock", b"me")])
            await kv.txn([Compare(b"lock", "version", "=", 0)], [Put(b"lock", b"you")], [Delete(b"lock")])
            assert await following(changes, 2) == [
                Changes(2, (Event(b"lock", await kv_at(kv, 2)),)), Changes(3, (Event(b"lock", None),))
            ]  # fmt: skip
        assert machine(run, 1).state.revision == 3


async def kv_at(kv: KV, revision: int) -> KeyValue | None:
    return await kv.get(b"lock", revision=revision)


# Which watch sees what


def version(key: bytes, revision: int, value: bytes | None = b"") -> Version:
    return key, revision, 0, revision, 1, 0, value


def test_tracks_find_watches_by_key_prefix_and_range() -> None:
    track = Track()
    for number, (key, end) in enumerate(
        [(b"a", b""), (b"a", b"b"), (b"a/", prefix_end(b"a/")), (b"a", b"a/1"), (b"\0", b"\0"), (b"b", b"\0")]
    ):
        track.add(Watch(number, key, end, 0))
    assert prefix_end(b"a\xff") == b"b" and prefix_end(b"\xff\xff") == b"\0"
    assert sorted(watch.number for watch in track.matching(b"a")) == [0, 1, 3, 4]
    assert sorted(watch.number for watch in track.matching(b"a/1")) == [1, 2, 4]
    assert sorted(watch.number for watch in track.matching(b"c")) == [4, 5]
    for number in range(6):
        track.remove(number)
    assert not list(track.matching(b"a")) and not track.watches


def test_tracks_meet_and_go_on_together() -> None:
    tracks = Tracks()
    for number, revision in ((1, 5), (2, 5), (3, 9)):
        tracks.add(Watch(number, b"k", b"", 0), revision)
    assert tracks.lowest() == 5 and tracks.above(5) == 9
    tracks.move(5, 9)
    assert tracks.lowest() == 9 and sorted(tracks.tracks[9].watches) == [1, 2, 3]
    tracks.remove(2)
    tracks.remove(2)
    tracks.move(9, 12)
    assert sorted(tracks.drop(12)) == [1, 3] and tracks.lowest() is None and not tracks.place


def test_watches_that_went_leave_no_track() -> None:
    """Who watched from a revision to come, and went, left one for as long as its stream lasted."""
    tracks = Tracks()
    for number in range(100):
        tracks.add(Watch(number, b"k", b"", 0), 1000 + number)
        tracks.add(Watch(number, b"k", b"", 0), 2000 + number)
    assert sorted(tracks.tracks) == list(range(2000, 2100))
    tracks.move(2000, 2001)
    for number in range(100):
        tracks.remove(number)
    assert not tracks.tracks and not tracks.place and tracks.lowest() is None


def test_what_a_push_holds_is_bounded_by_whole_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    track = Track()
    track.add(Watch(1, b"k", b"", NO_DELETE))
    monkeypatch.setattr("logyard.service.kv.tracks.ROWS_MAX", 3)
    events = [(revision, ((version(b"k", revision), None),)) for revision in range(2, 9)]
    found = collect(track, events, 2)
    assert [one[0] for one in found.revisions] == [2, 3, 4] and found.next == 5
    deleted = [(2, ((version(b"k", 2, None), version(b"k", 1)),)), (3, ((version(b"x", 3), None),))]
    assert collect(track, deleted, 2) == ([], {}, 4, 0)


def test_a_part_of_a_revision_is_bounded_by_all_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.service.kv.tracks.PART_BYTES", 1000)

    def parts(events: tuple[Any, ...], *watches: Watch) -> list[Found]:
        track = Track()
        for watch in watches:
            track.add(watch)
        found = [collect(track, [(2, events)], 2)]
        while found[-1].rest:
            found.append(collect(track, [(2, events)], 2, found[-1].rest))
        assert [one.next for one in found] == [*[2] * (len(found) - 1), 3]
        assert sum([len(one.revisions[0][1]) for one in found]) in (0, len(events))
        return found

    small = tuple([(version(b"k%02d" % number, 2), version(b"k%02d" % number, 1, b"v" * 400)) for number in range(20)])
    assert len(parts(small, Watch(1, b"k", b"l", PARTS))) == 2, "nobody sees what was there"
    assert len(parts(small, Watch(1, b"k", b"l", PARTS | PREVIOUS))) == 10
    assert len(parts(small, *[Watch(number, b"k", b"l", PARTS) for number in range(100)])) == 10
    assert len(parts(small, Watch(1, b"k", b"l", PARTS), Watch(2, b"k", b"l", 0))) == 1, "one of them joins none"
    monkeypatch.setattr("logyard.service.kv.tracks.PART_EVENTS", 5)
    assert len(parts(small, Watch(1, b"other", b"", PARTS))) == 4, "looking takes its time, too"


async def test_a_watch_of_older_revisions_misses_nothing_after_a_cut_although_others_are_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, lost = client_watch.Stream._pushed, [0]

    def push(self: client_watch.Stream, number: int, header: Any, data: memoryview) -> None:
        if number not in lost or header["kind"] != "events":
            pushed(self, number, header, data)

    monkeypatch.setattr(client_watch.Stream, "_pushed", push)
    async with served(tmp_path) as (_, doors, yard):
        kv = yard.kv("kv")
        for number in range(20):
            await kv.put(b"k%d" % number, b"v")
        async with kv.watch(b"other") as ahead:
            await ahead.created()
            await kv.put(b"other", b"1")
            assert len(await following(ahead, 1)) == 1
            # What the server sends from now on is lost with the connection.
            stream, lost[0] = ahead._stream, ahead._stream._id
            async with kv.watch(b"k", prefix=True, start=2) as behind:
                await until(lambda: behind.number in stream._live, "the server has it")
                await doors.cut(1)
                assert [one.revision for one in await following(behind, 20)] == list(range(2, 22))
                await kv.put(b"other", b"2")
                assert [one.revision for one in await following(ahead, 1)] == [23]


async def test_of_very_many_that_were_paused_the_one_that_goes_on_first_is_there_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_watch, "ADD_MAX", 2)
    there = set(range(1, 6))

    async def change(call: Any) -> None:
        there.difference_update(call.arguments["remove"])
        there.update(row[0] for row in call.arguments["add"])

    tasks: list[Any] = []
    yard = SimpleNamespace(spawn=tasks.append, run=change, runtime=TrioRuntime())
    stream = client_watch.Stream(SimpleNamespace(yard=yard, name="kv"), None)
    stream._id, stream._open, stream._sent = 1, True, set(there)
    flow = client_watch.Flow(b"k", b"", 1, False, True, True, True, False)
    stream.watches |= {number: client_watch.Watch(stream, number, flow) for number in there}
    for number in range(1, 6):
        stream._stop(number)
    stream.want(stream.watches[4])
    (task,) = tasks
    await task()
    assert there == {4}


def test_a_watch_that_went_hides_nothing_from_the_others() -> None:
    """A push may still name watches that were cancelled since: the others that it names see it."""
    yard = SimpleNamespace(spawn=lambda *_: None, runtime=TrioRuntime())
    stream = client_watch.Stream(SimpleNamespace(yard=yard, name="kv"), None)
    flow = client_watch.Flow(b"k", b"", 1, False, True, True, True, False)
    watches = {number: client_watch.Watch(stream, number, flow) for number in (1, 2, 3)}
    stream.watches |= watches
    track = Track()
    for number in watches:
        track.add(Watch(number, b"k", b"", 0))
    stream._sent, stream._live = set(watches), set(watches)
    found = collect(track, [(2, ((version(b"k", 2, b"v"), None),))], 2)
    assert [one[0] for one in found.revisions[0][1]] == [[1, 2, 3]], "those that go are named before the others"
    # The first is gone, the second is not live any more.
    stream.unwant(watches[1])
    stream._live.discard(2)
    stream._events({"revisions": found.revisions, "places": [], "low": 3}, memoryview(b""))
    assert [len(one._kept) for one in watches.values()] == [0, 0, 1]
    assert watches[3]._kept[0][1].events[0].key == b"k"
