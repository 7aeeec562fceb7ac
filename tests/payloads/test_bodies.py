"""Generations with large bodies in a file beside the environment: order, crashes, damage, and both formats together."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from logyard.payloads import layout
from logyard.payloads.bodies import NAME
from logyard.payloads.generation import Generation
from logyard.payloads.layout import BESIDE_BYTES, PIECE_BYTES
from logyard.payloads.store import PayloadStore
from logyard.payloads.writing import GenerationConfig
from logyard.protocol.errors import GenerationFailed, PayloadCorrupt, StoreFull

from .support import MIB, Crash, Door, Source, check_all, check_counters, crash_after, made, open_store
from .test_compaction import steps_of
from .test_store import migrate

SIZES = (0, 1, 4096, BESIDE_BYTES - 1, BESIDE_BYTES, 65_536, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 5000)
CONFIG = GenerationConfig(map_bytes=16 * MIB, transaction_bytes=MIB, beside=True)


def opened(path: Path, door: Door | None = None, beside: bool = True, **changes: int) -> PayloadStore:
    return open_store(path, door, beside=beside, **changes)


def two_generations() -> Source:
    source = Source([made(uid, index, [300, 120_000, 20_000]) for uid in (1, 2) for index in range(1, 40)])
    source.live[1, 3] = {1}
    source.live[2, 7] = set()
    return source


class Watched(Door):
    """Says in which order bytes are written, synced and committed; `fails` at the next of that."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.fails: tuple[str, int] | None = None

    def _do(self, what: str) -> None:
        self.done.append(what)
        if self.fails is not None and self.fails[0] == what:
            raise OSError(self.fails[1], os.strerror(self.fails[1]))

    def direct_write(self, fd: int, memory: memoryview, offset: int) -> None:
        self._do("write")
        super().direct_write(fd, memory, offset)

    def datasync(self, fd: int) -> None:
        self._do("sync")
        super().datasync(fd)

    def revalidate(self, path: str) -> None:
        self._do("revalidate")
        super().revalidate(path)

    def open_direct(self, path: str) -> int:
        self._do("open")
        return super().open_direct(path)

    def step(self, name: str, size: int) -> None:
        self.done.append(name)
        if self.fails is not None and self.fails[0] == name:
            raise lmdb.DiskError(os.strerror(self.fails[1]))


def generation(path: Path, door: Door | None = None) -> Generation:
    door = door or Door()
    found = Generation(str(path / "gen-0000000001"), 1, CONFIG, None, door)
    found.create(0, door.sync_directory)
    return found


@pytest.mark.parametrize("length", SIZES)
def test_every_length_and_range_reads_back(tmp_path: Path, length: int) -> None:
    made_ = generation(tmp_path)
    entry = made(7, 1, [10, length, 5000])
    body = entry.units[1][0]
    # Whether it is packed is the proposer's decision.
    entry.units[1] = (body, False)
    assert made_.write_entries(1, [entry.row()], 1).entries == 1
    edges = {0, 1, length // 2, length, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, length + 9}
    for start in edges:
        for stop in (None, *(at for at in edges if at >= start)):
            assert made_.read_unit(1, 7, 1, 1, start, stop) == body[start:stop]
    assert made_.read_unit(1, 7, 1, 0) == entry.units[0][0] and made_.read_unit(1, 7, 1, 2) == entry.units[2][0]
    measured = made_.measure()
    assert not measured.damage and measured.entries == 1 and measured.total >= length
    size = os.path.getsize(tmp_path / "gen-0000000001" / NAME)
    assert size == (-(-length // 4096) * 4096 if length >= BESIDE_BYTES else 0)
    made_.close()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A process that asks for much more memory than a test needs gets none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # Beside what the process has from tests before this one.
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData:")) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_whatever_a_damaged_row_says_of_length_and_place_is_damage_of_its_entry_alone(
    tmp_path: Path, little_memory: None
) -> None:
    """Neither is verified before the bytes are read: no memory, and no place in the file, goes by them."""
    made_ = generation(tmp_path)
    made_.write_entries(1, [made(7, index, [10, PIECE_BYTES + 30_000]).row() for index in (1, 2)], 1)
    made_.close()
    size = os.path.getsize(tmp_path / "gen-0000000001" / NAME)
    with lmdb.open(made_.path, map_size=CONFIG.map_bytes) as env, env.begin() as txn:
        found = [row for row in txn.cursor() if len(row[1]) == layout.PLACE_ROW.size and row[0][:8] != bytes(8)]
    assert len(found) == 4
    key, whole = found[0]
    for bit in range(8 * layout.HASH_BYTES, 8 * layout.PLACE_ROW.size):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with lmdb.open(made_.path, map_size=CONFIG.map_bytes) as env, env.begin(write=True) as txn:
            txn.put(key, damaged)
        again = Generation(made_.path, 1, CONFIG, None, Door())
        again.open_writer()
        assert again._bodies.end == layout.aligned(size), bit
        with pytest.raises(PayloadCorrupt):
            again.read_unit(1, 7, 1, 1)
        assert len(again.read_unit(1, 7, 2, 1)) == PIECE_BYTES + 30_000
        measured = again.measure()
        assert measured.bad == {(1, 7, 1)} and measured.damage, bit
        again.close()


def test_bytes_are_durable_before_the_rows_that_name_them(tmp_path: Path) -> None:
    door = Watched()
    made_ = generation(tmp_path, door)
    rows = [made(1, index, [100, 400_000]).row() for index in range(1, 9)]
    rows += [made(2, 1, [100, 3 * MIB]).row(), made(2, 2, [100, 900]).row()]
    assert made_.write_entries(1, rows, 1, step=door.step).entries == 10
    found = [one for one in door.done if one in ("write", "sync") or one.startswith("before")]
    assert "before part" in found
    for at, what in enumerate(found):
        if what == "write":
            assert found[at + 1] in ("write", "sync")
        if what == "sync":
            assert found[at - 1] == "write" and found[at + 1].startswith("before")
    assert found.count("write") >= found.count("sync") >= 5
    made_.close()


def test_a_crash_at_every_step_and_the_same_job_again(tmp_path: Path) -> None:
    source = two_generations()
    store = opened(tmp_path / "whole", drop_current_bytes=100 * MIB)
    job = store.migrate_job(source.ranges())
    steps = steps_of(lambda step: store.adopt(store.run(job, source.read, step=step)))
    want = store.checkpoint()
    assert steps.count("sealed") >= 1
    check_all(store, source)
    check_counters(store)
    store.close()
    for at in range(len(steps)):
        path = tmp_path / f"crash-{at}"
        store = opened(path, drop_current_bytes=100 * MIB)
        job = store.migrate_job(source.ranges())
        with pytest.raises(Crash):
            store.run(job, source.read, step=crash_after(at))
        store.close()
        # What is behind the last commit may be anything after a power cut: garbage, zeros, or not there.
        for found in path.glob(f"gen-*/{NAME}"):
            with found.open("r+b") as file:
                end = file.seek(0, os.SEEK_END)
                if at % 3 == 0:
                    file.write(os.urandom(100_000))
                elif at % 3 == 1:
                    file.truncate(end + 50_000)
        store = opened(path, drop_current_bytes=100 * MIB)
        store.resume(job)
        store.adopt(store.run(job, source.read))
        assert store.checkpoint() == want, steps[at]
        check_all(store, source)
        check_counters(store)
        store.close()
        shutil.rmtree(path)


@pytest.mark.parametrize("what", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_or_sync_commits_nothing_and_the_job_is_done_again(tmp_path: Path, what: str, code: int) -> None:
    door = Watched()
    store = opened(tmp_path, door, drop_current_bytes=100 * MIB)
    source = two_generations()
    job = store.migrate_job(source.ranges())
    done = crash_after(6)
    with pytest.raises(Crash):
        store.run(job, source.read, step=done)
    door.fails = (what, code)
    with pytest.raises(StoreFull if code == errno.ENOSPC else GenerationFailed):
        store.run(job, source.read)
    store.close()
    store = opened(tmp_path, drop_current_bytes=100 * MIB)
    store.resume(job)
    store.adopt(store.run(job, source.read))
    check_all(store, source)
    check_counters(store)
    store.close()


def test_damage_is_that_of_its_entry(tmp_path: Path) -> None:
    store = opened(tmp_path)
    source = Source([made(1, index, [200, 30_000]) for index in range(1, 7)])
    migrate(store, source)
    store.seal_current()
    saved = store.checkpoint()
    store.close()
    file = tmp_path / "gen-0000000001" / NAME
    data = bytearray(file.read_bytes())
    for index in (2, 4):
        data[data.index(source.entries[1, index].units[1][0]) + 29_999] ^= 1
    del data[data.index(source.entries[1, 6].units[1][0]) + 5 :]
    file.write_bytes(data)
    again = opened(tmp_path)
    again.restore(saved)
    for index in range(1, 7):
        if index in (2, 4, 6):
            with pytest.raises(PayloadCorrupt) as error:
                again.read_unit(1, index, 1)
            assert (error.value.uid, error.value.index) == (1, index)
        else:
            assert again.read_unit(1, index, 1) == source.entries[1, index].units[1][0]
        assert again.read_unit(1, index, 0) == source.entries[1, index].units[0][0], "what is not in the file is whole"
    assert {index for _, _, index in again.measure(1).bad} == {2, 4, 6}
    for index in (2, 4, 6):
        report = again.run(again.rewrite_job(1))
        assert [damaged for _, damaged, _ in report.damaged] == [index]
        again.abandon()
        again.mark_dead(1, (index, 0), (index + 1, 0))
    again.close()
    file.unlink()
    with pytest.raises(GenerationFailed):
        Generation(str(tmp_path / "gen-0000000001"), 1, CONFIG).open_reader()


def test_old_generations_are_read_written_on_and_rewritten_into_new_ones(tmp_path: Path) -> None:
    store = opened(tmp_path, beside=False, drop_current_bytes=100 * MIB)
    source = Source([made(1, index, [200, 60_000]) for index in range(1, 20)])
    migrate(store, source)
    saved = store.checkpoint()
    store.close()
    store = opened(tmp_path, drop_current_bytes=100 * MIB)
    store.restore(saved)
    more = Source([made(2, index, [200, 60_000]) for index in range(1, 200)])
    migrate(store, more)
    assert not (tmp_path / "gen-0000000001" / NAME).exists(), "what was begun goes on as it was"
    assert (tmp_path / "gen-0000000002" / NAME).stat().st_size > MIB
    store.adopt(store.run(store.rewrite_job(1)))
    check_all(store, Source([*source.entries.values(), *more.entries.values()]))
    check_counters(store)
    store.close()


def test_a_full_generation_is_bounded_with_its_file(tmp_path: Path) -> None:
    made_ = generation(tmp_path)
    report = made_.write_entries(1, [made(1, index, [50, 250_000]).row() for index in range(1, 100)], 1)
    assert report.full and report.entries > 40 and report.unwritten
    size = sum(found.stat().st_size for found in Path(made_.path).iterdir() if found.name != "lock.mdb")
    assert 12 * MIB < size <= CONFIG.map_bytes
    made_.close()


def test_a_small_unit_costs_no_row_more() -> None:
    assert not layout.is_beside(BESIDE_BYTES - 1, layout.BESIDE) and not layout.is_beside(MIB, layout.FORMAT)
    for length in range(0, 3 * PIECE_BYTES, 50_021):
        assert sum(layout.piece_lengths(length, layout.BESIDE)) == length


END_ROW = layout.own_key(layout.BODIES)


def rows_of(path: Path) -> dict[bytes, bytes]:
    """Every row of a closed generation."""
    env = lmdb.open(str(path), readonly=True, lock=False)
    with env.begin() as txn:
        rows = dict(txn.cursor())
    env.close()
    return rows


def set_row(path: Path, key: bytes, value: bytes | None) -> None:
    """Put a row of a closed generation as damage would, or take it away."""
    env = lmdb.open(str(path), map_size=CONFIG.map_bytes)
    with env.begin(write=True) as txn:
        if value is None:
            assert txn.delete(key)
        else:
            txn.put(key, value)
    env.close()


def reopened(path: Path) -> Generation:
    found = Generation(str(path), 1, CONFIG, None, Door())
    found.open_writer()
    return found


@pytest.mark.parametrize("lost", ["gone", "damaged", "an older one"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_lost_end_row_overwrites_nothing_that_lives(tmp_path: Path, lost: str, cut: bool) -> None:
    made_ = generation(tmp_path)
    path = Path(made_.path)
    first = [made(1, index, [100, 60_000]) for index in range(1, 20)]
    assert made_.write_entries(1, [entry.row() for entry in first[:5]], 1).entries == 5
    made_.close()
    older = rows_of(path)[END_ROW]
    made_ = reopened(path)
    assert made_.write_entries(2, [entry.row() for entry in first[5:]], 2).entries == 14
    made_.close()
    whole = rows_of(path)[END_ROW]
    set_row(path, END_ROW, {"gone": None, "damaged": whole[:-1] + b"\x7f", "an older one": older}[lost])
    size = os.path.getsize(path / NAME)
    if cut:
        # What the last rows name is not there any more: it is damage, and stays damage of those.
        os.truncate(path / NAME, size - 65_536)
    made_ = reopened(path)
    more = [made(2, index, [100, 60_000]) for index in range(1, 9)]
    assert made_.write_entries(3, [entry.row() for entry in more], 3).entries == 8
    for run, entry in [(1 if entry.index < 6 else 2, entry) for entry in first[: -2 if cut else None]]:
        assert made_.read_unit(run, 1, entry.index, 1) == entry.units[1][0], entry.index
    for entry in more:
        assert made_.read_unit(3, 2, entry.index, 1) == entry.units[1][0]
    measured = made_.measure()
    assert measured.bad == ({(2, 1, 18), (2, 1, 19)} if cut else set())
    made_.close()
    assert layout.END_ROW.unpack(rows_of(path)[END_ROW][layout.HASH_BYTES :])[0] >= size + 8 * 60_000


def test_without_an_end_row_bytes_that_no_row_names_are_kept_too(tmp_path: Path) -> None:
    """What lost the end row may have lost rows beside it, which a walk does not see."""
    made_ = generation(tmp_path)
    path = Path(made_.path)
    assert made_.write_entries(1, [made(1, index, [100, 60_000]).row() for index in range(1, 9)], 1).entries == 8
    made_.close()
    places = [key for key, value in rows_of(path).items() if len(value) == layout.PLACE_ROW.size]
    for key in (END_ROW, *places[4:]):
        set_row(path, key, None)
    before = (path / NAME).read_bytes()
    made_ = reopened(path)
    assert made_.write_entries(2, [made(2, 1, [100, 60_000]).row()], 2).entries == 1
    made_.close()
    assert (path / NAME).read_bytes()[: len(before)] == before


def test_a_row_that_names_what_can_not_be_is_no_end(tmp_path: Path) -> None:
    made_ = generation(tmp_path)
    path = Path(made_.path)
    assert made_.write_entries(1, [made(1, index, [100, 60_000]).row() for index in range(1, 4)], 1).entries == 3
    made_.close()
    size = os.path.getsize(path / NAME)
    key, value = next(one for one in rows_of(path).items() if len(one[1]) == layout.PLACE_ROW.size)
    set_row(path, key, value[: layout.PIECE_ROW.size] + (1 << 60).to_bytes(8, "little"))
    set_row(path, END_ROW, None)
    made_ = reopened(path)
    assert made_.write_entries(2, [made(2, 1, [100, 60_000]).row()], 2).entries == 1
    assert made_.measure().bad == {(1, 1, 1)}
    made_.close()
    assert os.path.getsize(path / NAME) < size + 70_000


def test_a_crash_leaves_bytes_that_are_written_over(tmp_path: Path) -> None:
    made_ = generation(tmp_path)
    path = Path(made_.path)
    assert made_.write_entries(1, [made(1, 1, [100, 60_000]).row()], 1).entries == 1
    made_.close()
    size = os.path.getsize(path / NAME)
    with (path / NAME).open("ab") as file:
        file.write(bytes(100_000))
    made_ = reopened(path)
    assert made_.write_entries(2, [made(2, 1, [100, 60_000]).row()], 2).entries == 1
    made_.close()
    assert layout.END_ROW.unpack(rows_of(path)[END_ROW][layout.HASH_BYTES :])[0] == size + 60_000


def test_the_end_row_is_there_from_the_beginning_and_its_lack_is_damage(tmp_path: Path) -> None:
    made_ = generation(tmp_path)
    made_.close()
    path = Path(made_.path)
    assert layout.END_ROW.unpack(rows_of(path)[END_ROW][layout.HASH_BYTES :]) == (0,)
    made_ = reopened(path)
    assert made_.write_entries(1, [made(1, 1, [100, 60_000]).row()], 1).entries == 1 and not made_.measure().damage
    made_.close()
    set_row(path, END_ROW, None)
    made_ = Generation(str(path), 1, CONFIG)
    made_.open_reader()
    assert made_.read_unit(1, 1, 1, 1) == made(1, 1, [100, 60_000]).units[1][0], "it says nothing to those who read"
    measured = made_.measure()
    assert measured.bad == {(0, 0, 0)} and "lacks the row" in measured.damage[0]
    made_.close()


def places(path: Path) -> dict[tuple[int, int], int]:
    """Where the pieces of a closed generation begin, by (uid, index)."""
    found = {}
    for key, value in rows_of(path).items():
        placed = layout.parse_place(str(path), key, memoryview(value), layout.BESIDE) if key >= FIRST else None
        if placed is not None and layout.KEY.unpack(key)[4]:
            found[layout.KEY.unpack(key)[1:3]] = placed[1]
    return found


FIRST = layout.KEY.pack(layout.OWN + 1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("what", ["write", "sync", "before commit"])
def test_after_a_failure_the_file_is_read_anew_and_goes_on_where_what_is_committed_ends(
    tmp_path: Path, what: str
) -> None:
    door = Watched()
    made_ = generation(tmp_path, door)
    first, second = [made(uid, 1, [100, 60_000]) for uid in (1, 2)]
    assert made_.write_entries(1, [first.row()], 1).entries == 1
    door.fails = (what, errno.EIO)
    with pytest.raises((GenerationFailed, StoreFull)):
        made_.write_entries(2, [second.row()], 2, step=door.step)
    assert made_.read_unit(1, 1, 1, 1) == first.units[1][0], "who reads goes on"
    for still in ("revalidate", "open"):
        door.fails = (still, errno.EIO)
        door.done.clear()
        with pytest.raises(GenerationFailed):
            made_.write_entries(2, [second.row()], 2)
        assert door.done[-1] == still, "nothing is written while the disk fails"
    door.fails = None
    door.done.clear()
    assert made_.write_entries(2, [second.row()], 2).entries == 1
    assert door.done == ["revalidate", "open", "write", "sync"], "before anything is written"
    third = made(3, 1, [100, 60_000])
    assert made_.write_entries(3, [third.row()], 3).entries == 1 and door.done.count("revalidate") == 1
    for run, entry in enumerate((first, second, third), 1):
        assert made_.read_unit(run, entry.uid, 1, 1) == entry.units[1][0]
    assert not made_.measure().damage
    made_.close()
    assert places(Path(made_.path)) == {(1, 1): 0, (2, 1): 61_440, (3, 1): 122_880}
