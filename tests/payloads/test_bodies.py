"""Generations with large bodies in a file beside the environment: order, crashes, damage, and both formats together."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from logyard.payloads import layout
from logyard.payloads.bodies import NAME
from logyard.payloads.generation import Generation
from logyard.payloads.layout import BESIDE_BYTES, PIECE_BYTES, Buffer
from logyard.payloads.store import PayloadStore
from logyard.payloads.writing import GenerationConfig
from logyard.protocol.errors import GenerationFailed, PayloadCorrupt, StoreFull

from .support import MIB, Door, Source, check_all, check_counters, made, open_store
from .test_compaction import Crash, crash_after, steps_of
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

    def aligned_write(self, fd: int, buffers: Iterable[Buffer], offset: int, stage: memoryview) -> int:
        self._do("write")
        return super().aligned_write(fd, buffers, offset, stage)

    def datasync(self, fd: int) -> None:
        self._do("sync")
        super().datasync(fd)

    def step(self, name: str, size: int) -> None:
        self.done.append(name)


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
            assert found[at + 1] == "sync" and found[at + 2].startswith("before")
    assert found.count("write") == found.count("sync") >= 5
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
    report = again.run(again.rewrite_job(1))
    assert sorted(index for _, index, _ in report.damaged) == [2, 4, 6]
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
