"""The scrub: damage that nobody has met yet is found in every kind of file, and repaired; nothing else is."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.disk.door import Disk
from logyard.engine.log.meta_rows import KEY, GroupRow, SnapshotRow, StateRow
from logyard.engine.log.segment import HEAD, HEAD_BYTES, ROW_BYTES
from logyard.engine.raft.membership import Change
from logyard.engine.repair import log_repair
from logyard.payloads import verify
from logyard.protocol.errors import Corrupt

from ..host.cluster import Cluster, cluster, plain, until
from ..host.test_mending import hurt_segments, mended, metadata
from ..host.test_repair import all_read, filled, hurt_file, hurt_generations, in_files


async def scrubbed(c: Cluster, number: int) -> dict[str, Any]:
    """A whole pass of a node, from here on; its status."""
    scrub = c.system(number).repair.scrub
    wanted = scrub.ask()
    await until(lambda: scrub.passes >= wanted, "the scrub ends")
    assert not scrub.error
    return scrub.status()


async def test_a_sound_directory_is_read_and_nothing_is_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        await c.nodes[1].compact()
        await c.fill(1, 4, 20_000)
        await c.roll(1)
        await c.nodes[1].snapshot()
        status = await scrubbed(c, 1)
        assert not status["findings"] and status["finished_ms"]
        read = {kind for kind, one in status["last"].items() if one["bytes"]}
        assert read == {"meta", "snapshot", "segment", "wal", "generation"}, "no group here has a ring"
        assert status["last"]["generation"]["bytes"] >= sum(map(len, bodies))


@pytest.mark.parametrize("number", [1, 3], ids=["leader", "follower"])
@pytest.mark.parametrize("place", ["wal", "generation"])
async def test_damaged_payloads_come_from_peers(tmp_path: Path, place: str, number: int) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        if place == "generation":
            await c.nodes[number].compact()
            assert hurt_generations(c, number, bodies[2:5]) == 3
        else:
            await c.roll(number)
            assert hurt_file(c, number, bodies[2:5]) == 3
        status = await scrubbed(c, number)
        assert status["last"][place]["found"] == status["last"][place]["repaired"] == 1, status
        assert not status["left"]
        # Its own again: nobody has to be asked.
        c.partition(number)
        fetched = c.system(number).repair.payload_repair.fetched
        await all_read(c, number, bodies)
        assert c.system(number).repair.payload_repair.fetched == fetched
        c.network.heal()
        status = await scrubbed(c, number)
        assert not status["findings"]


class StalePages(Disk):
    """A page cache that still has what the disk has not: the next that is forgotten of a file shows its damage."""

    __slots__ = ("damage",)

    def __init__(self) -> None:
        super().__init__()
        self.damage: dict[str, tuple[int, bytes]] = {}

    def forget_pages(self, fd: int, offset: int, length: int) -> None:
        at, data = self.damage.get(path := os.readlink(f"/proc/self/fd/{fd}"), (-1, b""))
        if data and offset <= at < offset + length:
            Path(path).write_bytes(data)
            del self.damage[path]
        super().forget_pages(fd, offset, length)


async def test_large_bodies_are_verified_as_the_disk_has_them(tmp_path: Path) -> None:
    disk = StalePages()
    async with cluster(tmp_path, disks={3: disk}, payload_cache_bytes=0, generation_files=1) as c:
        bodies = await filled(c)
        await c.nodes[3].compact()
        (path,) = (c.path / "node-3" / "payloads").glob("gen-*/bodies")
        good = path.read_bytes()
        at = good.index(bodies[3])
        disk.damage[str(path.resolve())] = (at, good[:at] + bytes(100) + good[at + 100 :])
        status = await scrubbed(c, 3)
        assert status["last"]["generation"]["found"] == status["last"]["generation"]["repaired"] == 1, status
        assert not disk.damage and not status["left"]
        c.partition(3)
        await all_read(c, 3, bodies)


def segment_of(c: Cluster, number: int) -> Path:
    (path,) = (c.path / f"node-{number}" / "segments").glob("*.seg")
    return path


async def test_a_segment_whose_index_is_damaged_is_written_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        await c.roll(3)
        path = segment_of(c, 3)
        good = path.read_bytes()
        # The groups, behind the rows, and one end of the fields.
        path.write_bytes(good[: -HEAD_BYTES - 8] + bytes(8 + HEAD_BYTES))
        status = await scrubbed(c, 3)
        assert status["last"]["segment"]["found"] == status["last"]["segment"]["repaired"] == 1
        assert path.read_bytes() == good
        assert not (await scrubbed(c, 3))["findings"]
        # Nothing of it is left, but a reader that was open before knows it.
        c.system(3).storage.segments.reader(1)
        path.unlink()
        assert not (await scrubbed(c, 3))["left"]
        assert path.read_bytes() == good and c.member(3).raft.mend is None
        await c.restart(3)
        await c.applied()
        await all_read(c, 3, bodies)


@pytest.mark.parametrize("number", [1, 3], ids=["leader", "follower"])
async def test_a_group_whose_entry_in_a_segment_is_damaged_is_mended_and_no_other(tmp_path: Path, number: int) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other")
        bodies = await filled(c)
        await c.lead(1, "other")
        others = await c.fill(1, 4, 2000, "other")
        await c.applied("other")
        data = metadata(c, number, 5)
        other = c.member(number, "other")
        await c.roll(number)
        hurt_segments(c, number, data)
        status = await scrubbed(c, number)
        assert [one["group"] for one in status["findings"]] == ["log"] and not status["left"], status["findings"]
        await mended(c, number)
        assert c.member(number, "other") is other and other.raft.mend is None
        await all_read(c, number, bodies)
        assert [body for _, body in await c.read(number, name="other")] == others
        assert not (await scrubbed(c, number))["findings"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("numbers", [(2, 3), (1, 3), (1, 2, 3)], ids=["followers", "leader too", "all"])
async def test_two_members_with_different_damages_are_mended_one_after_the_other(
    tmp_path: Path, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has what the other lacks; both at once would leave nobody to say what is committed."""
    monkeypatch.setattr(log_repair, "HELD_S", 1.0)
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        for number in c.ids:
            data = metadata(c, number, 3 + number)
            await c.roll(number)
            if number in numbers:
                hurt_segments(c, number, data)
        ends = [(c.system(number).repair.scrub, c.system(number).repair.scrub.ask()) for number in c.ids]
        most = 0

        def ended() -> bool:
            nonlocal most
            most = max(most, sum(c.member(number).raft.mend is not None for number in c.ids))
            return all(scrub.passes >= wanted for scrub, wanted in ends)

        await until(ended, "all scrubs end")
        assert [scrub.status()["left"] for scrub, _ in ends] == [0, 0, 0] and most == 1
        bodies += await c.fill(await c.leader(), 1, 100)
        await c.applied()
        for number in c.ids:
            await all_read(c, number, bodies)


async def test_no_member_is_mended_that_the_quorum_needs(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await filled(c)
        data = metadata(c, 3, 5)
        await c.roll(3)
        hurt_segments(c, 3, data)
        await c.crash(2)
        await until(lambda: 2 not in c.system(1).live)
        c.system(3).repair.scrub.ask()
        await until(
            lambda: (
                c.system(3).repair.scrub.status()["findings"]
                and c.system(3).repair.scrub.status()["running"] == "repair"
            ),
            "it is found",
        )
        turns = c.system(3).repair.mend_turns
        assert not await turns.may_begin(c.member(3), 1)
        await c.fill(1, 1, 100)
        assert c.member(3).raft.mend is None
        await c.start(2)
        await until(lambda: c.system(3).repair.scrub.passes == 1, "the scrub ends")
        assert not c.system(3).repair.scrub.status()["left"]


async def test_places_of_payloads_that_a_snapshot_covers_are_refilled(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        data = metadata(c, 3, 5)
        await c.roll(3)
        await c.nodes[3].snapshot()
        hurt_segments(c, 3, data)
        member = c.member(3)
        status = await scrubbed(c, 3)
        assert status["last"]["segment"]["repaired"] == 1 and not status["left"], status["findings"]
        assert c.member(3) is member
        c.partition(3)
        await all_read(c, 3, bodies)


def readable(c: Cluster, number: int, name: str = "log") -> set[int]:
    """Walk over all that a member has, as an audit does; the entries that it gives."""
    member = c.member(number, name)
    return {one.index for one in c.system(number).replicas.reader.payload_entries(member, 1, member.raft.applied)}


async def test_a_dead_entry_in_a_home_is_in_nobodys_way(tmp_path: Path) -> None:
    """Nobody needs it, but it lies among what lives: walks over the log, and the file's way to a generation."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        data = metadata(c, 3, 3)
        await c.roll(3)
        await c.nodes[1].truncate("log", 6)
        await c.applied()
        await c.nodes[3].snapshot()
        member = c.member(3)
        dead = next(iter(c.system(3).replicas.reader.payload_entries(member, 3, 3))).entry
        assert dead is not None and member.is_dead(dead)
        hurt_segments(c, 3, data)
        status = await scrubbed(c, 3)
        assert status["last"]["segment"]["found"] == 1 and not status["left"], status["findings"]
        assert c.member(3) is member and readable(c, 3)
        await c.nodes[3].compact()
        assert not (await scrubbed(c, 3))["findings"]
        c.partition(3)
        assert [body for _, body in await c.read(3, 6)] == bodies[6:]


async def test_what_lies_below_a_log_in_a_segment_of_another_group(tmp_path: Path) -> None:
    """After a crash the stored row still names a run that nothing needs: it is dropped, and its damage is none."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        await filled(c)
        await c.lead(1, "other")
        others = await c.fill(1, 4, 2000, "other")
        await c.applied("other")
        data = metadata(c, 3, 5)
        await c.roll(3)
        # Its run stays, as the file is a home; and goes with it, which no row says yet.
        await c.system(3).transfers.snapshots.take([c.member(3)])
        await c.fill(1, 1, 2000)
        await c.applied()
        await in_files(c)
        await c.roll(3)
        assert [run.segment for run in c.member(3).segments] == [1, 2]
        await c.nodes[3].compact()
        assert [run.segment for run in c.member(3).segments] == [2] and c.member(3, "other").segments
        await c.crash(3)
        hurt_segments(c, 3, data)
        await c.start(3)
        await c.applied()
        assert [run.segment for run in c.member(3).segments] == [2]
        readable(c, 3)
        assert not (await scrubbed(c, 3))["findings"]
        assert c.system(3).repair.log_repair.mended == 0
        assert [body for _, body in await c.read(3, name="other")] == others
        # With the last group that needs it the segment goes, too.
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        await until(lambda: not c.system(3).storage.segments.path(1).exists())


async def test_a_snapshot_from_another_member_leaves_no_run_below_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        await filled(c)
        await c.lead(1, "other")
        await c.fill(1, 4, 2000, "other")
        await c.applied("other")
        await c.nodes[3].compact()
        assert c.member(3).segments and not c.system(3).storage.location.files
        data = metadata(c, 1, 5)
        c.partition(3)
        await c.fill(1, 4, 2000)
        for number in (1, 2):
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        c.network.heal()
        await c.applied()
        assert c.member(3).raft.log.snapshot_index > 12
        assert not [run for run in c.member(3).segments if run.segment == 1]
        hurt_segments(c, 3, data)
        readable(c, 3)
        # The other group's log is the only one that needs the segment; when it does no more, it goes.
        assert c.system(3).storage.segments.users[1] == {c.member(3, "other").uid}
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        await until(lambda: not c.system(3).storage.segments.path(1).exists())


@pytest.mark.parametrize("prefix", [GroupRow.PREFIX, StateRow.PREFIX, SnapshotRow.PREFIX])
@pytest.mark.parametrize("copies", [("a",), ("b",), ("a", "b")], ids="".join)
async def test_damaged_rows_of_the_meta_store(tmp_path: Path, prefix: bytes, copies: tuple[str, ...]) -> None:
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        await c.roll(3)
        await c.nodes[3].snapshot()
        uid = c.member(3).uid
        assert overwrite_rows(c, 3, prefix + KEY.pack(uid), copies) == len(copies)
        status = await scrubbed(c, 3)
        assert status["findings"] and {one["group"] for one in status["findings"]} == {"log"}
        assert not status["left"], status["findings"]
        # What a snapshot said is in memory.
        assert not c.system(3).repair.log_repair.mended
        assert not (await scrubbed(c, 3))["findings"]
        await c.restart(3)
        await c.applied()
        assert not c.system(3).storage.meta_batch.meta.repaired and c.system(3).repair.log_repair.mended == 0
        await all_read(c, 3, bodies)


def overwrite_rows(c: Cluster, number: int, key: bytes, copies: tuple[str, ...]) -> int:
    """Spoil a row's value where it lies in the files that a running node has mapped; in how many of them."""
    found = 0
    for name in copies:
        path = c.path / f"node-{number}" / "meta" / name / "data.mdb"
        image, at, hurt = path.read_bytes(), -1, 0
        with path.open("r+b") as file:
            while (at := image.find(key, at + 1)) >= 0:
                # Behind the key: checksum and commit, then the value, if it is not on a page of its own.
                file.seek(at + len(key) + 3)
                file.write(bytes([image[at + len(key) + 3] ^ 8]))
                hurt += 1
        found += hurt > 0
    return found


async def test_a_generation_that_can_not_be_read_is_refilled_as_a_whole(tmp_path: Path) -> None:
    disk = UnreadableDisk()
    async with cluster(tmp_path, payload_cache_bytes=0, disks={3: disk}) as c:
        bodies = await filled(c)
        await c.nodes[3].compact()
        disk.unreadable = "gen-"
        status = await scrubbed(c, 3)
        disk.unreadable = ""
        assert status["last"]["generation"]["repaired"] == 1 and not status["left"], status["findings"]
        assert disk.refused
        c.partition(3)
        await all_read(c, 3, bodies)


class UnreadableDisk(Disk):
    """Files with `unreadable` in their path give EIO."""

    __slots__ = ("refused", "unreadable")

    def __init__(self) -> None:
        super().__init__()
        self.unreadable = ""
        self.refused = 0

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if self.unreadable and self.unreadable in os.readlink(f"/proc/self/fd/{fd}"):
            self.refused += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, length, offset)


class TableFullDisk(Disk):
    """Files with `refused` in their path can't be opened: the process has too many open."""

    __slots__ = ("count", "refused")

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""
        self.count = 0

    def open_file(self, path: str, *, write: bool = False) -> int:
        if self.refused and self.refused in path:
            self.count += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open_file(path, write=write)


async def failed_pass(c: Cluster, number: int) -> None:
    """A pass that can't look at something finds nothing of it, and says so."""
    scrub = c.system(number).repair.scrub
    wanted = scrub.ask()
    await until(lambda: scrub.passes >= wanted, "the scrub ends")
    status = scrub.status()
    assert scrub.error and not status["findings"], status
    assert not c.system(number).store.lost_ranges() and c.member(number).raft.mend is None


@pytest.mark.parametrize("place", ["segments/", "gen-", "wal/", "meta/"])
async def test_what_can_not_be_looked_at_now_is_no_damage(tmp_path: Path, place: str) -> None:
    """Every node of a cluster may run out of descriptors at once: none of them gives anything away for it."""
    disk = TableFullDisk()
    async with cluster(tmp_path, disks={3: disk}) as c:
        bodies = await filled(c)
        await c.nodes[3].compact()
        bodies += await c.fill(1, 4, 9000)
        await c.applied()
        await c.roll(3)
        await c.restart(3)
        await c.applied()
        member = c.member(3)
        # No reader of before knows the segment.
        c.system(3).storage.segments.close()
        disk.refused = place
        await failed_pass(c, 3)
        assert disk.count
        disk.refused = ""
        assert c.member(3) is member
        await all_read(c, 3, bodies)
        assert not (await scrubbed(c, 3))["findings"]


@pytest.mark.parametrize(
    "code",
    ["sys.exit(1)", "os.kill(os.getpid(), 15)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)", "print(7)"],
)
async def test_a_verifying_process_that_ends_early_says_nothing_of_the_generation(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal's Ctrl-C, a service manager's stop, the kernel out of memory and a half upgraded package hit the
    verifying processes of all nodes."""
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        await c.nodes[3].compact()
        with monkeypatch.context() as patch:
            patch.setattr(verify, "command", lambda *_: [sys.executable, "-c", f"import os, sys; {code}"])
            await failed_pass(c, 3)
        await all_read(c, 3, bodies)
        assert not (await scrubbed(c, 3))["findings"]


async def test_a_generation_with_a_damaged_tree_kills_another_process(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        await c.nodes[3].compact()
        (path,) = (c.path / "node-3" / "payloads").glob("gen-*/data.mdb")
        image = path.read_bytes()
        with path.open("r+b") as file:
            for page in range(2, len(image) // 4096):
                # Every page that is part of a tree: its head says so.
                if image[page * 4096 + 10] & 3:
                    file.seek(page * 4096 + 12)
                    file.write(b"\xff" * 64)
        status = await scrubbed(c, 3)
        assert status["last"]["generation"]["repaired"] and not status["left"], status["findings"]
        c.partition(3)
        await all_read(c, 3, bodies)


async def test_what_nobody_else_has_is_named_and_kept(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 12, 20_000)
        await c.nodes[1].compact()
        assert hurt_generations(c, 1, bodies[2:3]) == 1
        bodies += await c.fill(1, 12, 20_000)
        await c.roll(1)
        assert hurt_file(c, 1, bodies[20:21]) == 1
        status = await scrubbed(c, 1)
        assert status["left"] == 2 and {one["kind"] for one in status["findings"]} == {"generation", "wal"}
        for index in {*range(24)} - {2, 20}:
            assert plain((await c.read(1, index, 1))[0][1]) == bodies[index]


async def test_what_comes_and_goes_under_the_walk_is_no_damage(tmp_path: Path) -> None:
    """Passes one after the other beside all that moves, replaces and removes files."""
    async with cluster(tmp_path, scrub_bytes_per_s=1 << 30, wal_stock_files=2, migrate_dead_ratio=0.1) as c:
        await c.lead(1)
        rounds = 0
        done = False

        async def churn() -> None:
            nonlocal rounds
            while not done:
                await c.fill(1, 30, 9000)
                await c.nodes[1].truncate("log", max(0, c.log(1).end - 20))
                await c.nodes[1].snapshot()
                await c.roll(1)
                await c.nodes[1].compact()
                await c.system(1).storage.compactor.collect(1.0)
                rounds += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(churn)
            for _ in range(12):
                status = await scrubbed(c, 1)
                assert not status["findings"], status["findings"]
                assert status["pass_bytes"]
            await until(lambda: rounds >= 3, "files come and go")
            done = True


async def test_a_pass_comes_by_itself_and_a_restart_knows_when_the_last_one_was(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, scrub_every_s=1) as c:
        await until(lambda: c.system(1).repair.scrub.passes >= 2, "passes come by themselves")
        scrub = c.system(1).repair.scrub
        await until(lambda: not scrub.status()["running"])
        before = scrub.finished_ms
        await c.restart(1)
        await until(lambda: c.system(1).repair.scrub.finished_ms >= before)


@pytest.mark.parametrize("covered", [False, True], ids=["log", "snapshot"])
@pytest.mark.parametrize("how", ["cut index", "first row", "another segment"])
@pytest.mark.parametrize("when", ["running", "at a start"])
async def test_a_segment_that_lacks_entries(tmp_path: Path, how: str, covered: bool, when: str) -> None:
    """Rows cut off its index, the first one damaged, or all another segment's: no entry of it reads as if it had never
    been there."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        await c.roll(3)
        bodies += await c.fill(1, 6, 9000)
        await c.applied()
        await in_files(c)
        await c.roll(3)
        if covered:
            await c.nodes[3].snapshot()
        first, second = sorted((c.path / "node-3" / "segments").glob("*.seg"))
        if when == "at a start":
            await c.crash(3)
        if how == "cut index":
            image = second.read_bytes()
            index = HEAD.unpack(image[: HEAD_BYTES - 8])[6]
            os.truncate(second, index + 2 * ROW_BYTES + 5)
        elif how == "first row":
            flipped = bytearray(second.read_bytes())
            flipped[HEAD.unpack(flipped[: HEAD_BYTES - 8])[6] + 9] ^= 1
            second.write_bytes(flipped)
        else:
            second.write_bytes(first.read_bytes())
        if when == "at a start":
            await c.start(3)
            system = c.system(3)
            await until(
                lambda: system.repair.log_repair.mended or system.repair.refill.refilled, "it is met at the start"
            )
        status = await scrubbed(c, 3)
        assert (when == "running") == bool(status["last"]["segment"]["found"]) and not status["left"], status
        await until(lambda: not c.system(3).store.lost_ranges())
        await c.applied()
        c.partition(3)
        await all_read(c, 3, bodies)
        c.network.heal()
        assert not (await scrubbed(c, 3))["findings"]


async def test_a_change_that_never_was_committed_is_not_what_a_member_begins_anew_with(tmp_path: Path) -> None:
    """It would tell who was to be removed that it is out, and that one's copy counts."""
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        await c.lead(2)
        await c.applied()
        await c.roll(2)
        await c.nodes[2].snapshot()
        c.partition(2)
        raft = c.member(2).raft
        raft.propose_membership((Change("remove", 3),))
        assert 3 not in raft.configuration.nodes() and 3 in raft.base[1].nodes()
        assert overwrite_rows(c, 2, SnapshotRow.PREFIX + KEY.pack(c.member(2).uid), ("a", "b")) == 2
        c.system(2).repair.log_repair.found(c.member(2), Corrupt("somewhere", 0, "its records", "damage"))
        await until(lambda: c.member(2).raft is not raft, "it begins anew")
        await c.leader(among=[1, 3])
        c.network.heal()
        await mended(c, 2)
        replica = c.member(3)
        await c.applied()
        c.system(2).host.replica_gc.tell(3, c.member(2))
        await c.lead(3)
        assert c.member(3) is replica
        await all_read(c, 2, bodies)
