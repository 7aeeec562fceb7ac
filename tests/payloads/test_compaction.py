from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from logyard.payloads.compaction import MigrateJob, RewriteJob, _fresh, _Survivors, run_migrate
from logyard.payloads.layout import ENTRY_ROW, SourceRow, entry_value, plan
from logyard.payloads.store import PayloadStore
from logyard.payloads.writing import GenerationConfig, JobState
from logyard.protocol.errors import JobStale, StoreFull

from .support import MIB, Crash, Door, Source, check_all, check_counters, crash_after, made, open_store


def steps_of(run: Callable[[Callable[[str, int], None]], object]) -> list[str]:
    names: list[str] = []
    run(lambda name, size: names.append(name))
    return names


def two_generations() -> Source:
    source = Source([made(uid, index, [300, 120_000]) for uid in (1, 2, 3) for index in range(1, 30)])
    source.live[1, 3] = {1}
    source.live[2, 7] = set()
    return source


def test_damage_that_was_met_before_a_crash_is_met_again(tmp_path: Path) -> None:
    """What is committed behind it would be where the same job goes on, and its source would go."""

    class Rotten(Source):
        def read(self, uid: int, first: int, last: int) -> Iterator[SourceRow]:
            for index in range(first, last + 1):
                entry = self.entries[uid, index]
                payload = entry.payload[:-1] + bytes([entry.payload[-1] ^ (index == 2)])
                yield entry.row(read=partial(self.part_of, payload))

        @staticmethod
        def part_of(payload: bytes, offset: int, size: int) -> bytes:
            return payload[offset : offset + size]

    source = Rotten([made(1, index, [300, 400_000]) for index in range(1, 10)])
    store = open_store(tmp_path)
    job = store.migrate_job(source.ranges())
    for number in range(30):
        try:
            report = store.run(job, source.read, step=crash_after(number))
        except Crash:
            continue
        assert number > 2
        break
    assert [index for _, index, _ in report.damaged] == [2]
    assert [index for _, index, _ in store.run(job, source.read).damaged] == [2]
    store.abandon()
    store.close()


@pytest.mark.parametrize("left", range(2, 8))
def test_a_rewrite_meets_damage_again_after_a_crash(tmp_path: Path, left: int) -> None:
    source = Source([made(1, index, [200, 30_000]) for index in range(1, 6)])
    store = open_store(tmp_path)
    store.adopt(store.run(store.migrate_job(source.ranges()), source.read))
    store.seal_current()
    saved = store.checkpoint()
    store.close()
    file = tmp_path / "gen-0000000001" / "data.mdb"
    data = bytearray(file.read_bytes())
    at = data.find(source.entries[1, 3].data)
    while at >= 0:
        data[at + 3] ^= 1
        at = data.find(source.entries[1, 3].data, at + 1)
    file.write_bytes(data)
    again = open_store(tmp_path)
    again.restore(saved)
    job = again.rewrite_job(1)
    with suppress(Crash):
        again.run(job, step=crash_after(left))
    report = again.run(job)
    assert [index for _, index, _ in report.damaged] == [3]
    again.close()


def test_migration_crashes_at_every_step_and_the_same_job_finishes_it(tmp_path: Path) -> None:
    """The process dies in each step in turn; the job, saved by the host, is run again by a fresh process; then all
    is as without crashes."""
    source = two_generations()

    def fresh(name: str) -> tuple[PayloadStore, MigrateJob]:
        store = open_store(tmp_path / name, drop_current_bytes=100 * MIB)
        return store, store.migrate_job(source.ranges())

    store, job = fresh("whole")
    steps = steps_of(lambda step: store.adopt(store.run(job, source.read, step=step)))
    want = store.checkpoint()
    assert steps.count("sealed") >= 1 and len(steps) > 10
    store.close()
    for at in range(len(steps)):
        store, job = fresh(f"crash-{at}")
        with pytest.raises(Crash):
            store.run(job, source.read, step=crash_after(at))
        store.close()
        again = open_store(tmp_path / f"crash-{at}", drop_current_bytes=100 * MIB)
        again.resume(job)
        again.adopt(again.run(job, source.read))
        assert again.checkpoint() == want, steps[at]
        if at % 5 == 0:
            check_all(again, source)
            check_counters(again)
        again.close()
        shutil.rmtree(tmp_path / f"crash-{at}")


def test_a_crash_in_the_redone_job_and_a_job_done_twice(tmp_path: Path) -> None:
    source = two_generations()
    store = open_store(tmp_path)
    job = store.migrate_job(source.ranges())
    for at in (3, 5, 2, 4):
        with pytest.raises(Crash):
            store.run(job, source.read, step=crash_after(at))
    report = store.run(job, source.read)
    twice = store.run(job, source.read)
    assert twice.rows == 0 and twice.runs == report.runs
    store.adopt(twice)
    check_all(store, source)
    check_counters(store)
    store.close()


def test_rewrite_crashes_at_every_step_lose_nothing(tmp_path: Path) -> None:
    """Scan, copy, adopt, unlink (fault L2): the survivors are readable at every moment, before and after the
    restart."""
    source = Source([made(uid, index, [300, 60_000]) for uid in (1, 2) for index in range(1, 31)])
    source.live = {(uid, index): set() for uid in (1, 2) for index in range(1, 31) if index % 2}
    master = open_store(tmp_path / "master")
    job = master.migrate_job(source.ranges())
    everything = Source(list(source.entries.values()))
    master.adopt(master.run(job, everything.read))
    master.seal_current()
    for uid, index in source.live:
        master.mark_dead(uid, (index, 0), (index + 1, 0))
    saved = master.checkpoint()
    master.close()

    def copy(name: str) -> PayloadStore:
        shutil.copytree(tmp_path / "master", tmp_path / name)
        store = open_store(tmp_path / name)
        store.restore(saved)
        return store

    store = copy("whole")
    steps = steps_of(lambda step: store.adopt(store.run(store.rewrite_job(1), step=step)))
    store.close()
    assert len(steps) >= 5
    for at in range(len(steps)):
        store = copy(f"crash-{at}")
        with pytest.raises(Crash):
            store.run(store.rewrite_job(1), step=crash_after(at))
        check_all(store, source)
        store.close()
        again = open_store(tmp_path / f"crash-{at}")
        again.restore(saved)
        again.unlink_dead()
        check_all(again, source)
        again.adopt(again.run(again.rewrite_job(1)))
        again.unlink_dead()
        assert 1 not in [found.id for found in again.generations()]
        check_all(again, source)
        check_counters(again)
        again.close()
        shutil.rmtree(tmp_path / f"crash-{at}")


def test_survivors_of_a_home_are_those_of_its_entries(tmp_path: Path) -> None:
    """From any of them to any other, with all of their units."""
    store = open_store(tmp_path / "payloads")
    source = Source([made(7, index, [100, 5000]) for index in range(1, 6)])
    store.adopt(store.run(store.migrate_job(source.ranges()), source.read))
    run = store.home(7, 1)
    assert run is not None
    survivors = _Survivors(store.catalog.get(1), RewriteJob(9, 2, 1, [(7, 1, 5, run.run)], []))
    for first in range(1, 6):
        for last in range(first, 6):
            found = [(row.index, row.live_units) for row in survivors.read(7, first, last)]
            assert found == [(index, {0, 1}) for index in range(first, last + 1)]
    store.close()


def test_reserved_fields_of_an_entrys_row_are_zero() -> None:
    row = made(7, 3, [100]).row()
    fields = ENTRY_ROW.unpack_from(entry_value(b"key", 3, b"data", plan(row), [bytes(100)]))
    assert fields[1:] == (3, 0, 4, 1, 0, 100)


def test_a_job_whose_beginning_is_gone_must_be_built_anew(tmp_path: Path) -> None:
    source = two_generations()
    store = open_store(tmp_path)
    job = store.migrate_job(source.ranges())
    store.run(job, source.read)
    store.close()
    shutil.rmtree(tmp_path / "gen-0000000001")
    again = open_store(tmp_path)
    again.resume(job)
    with pytest.raises(JobStale):
        again.run(job, source.read)
    again.abandon()
    again.adopt(again.run(again.migrate_job(source.ranges()), source.read))
    check_all(again, source)
    check_counters(again)
    again.close()


def test_another_process_writes_while_this_one_reads(tmp_path: Path) -> None:
    """A reading store and a catalog of its own stand for the two processes; LMDB forbids both in one, so each opens
    in turn."""
    source = Source([made(1, index, [300, 9000]) for index in range(1, 20)])
    reader = open_store(tmp_path, remote_writer=True)
    job = reader.migrate_job(source.ranges())
    report = run_migrate(
        str(tmp_path), MigrateJob(*job), source.read, disk=Door(), config=GenerationConfig(8 * MIB, MIB)
    )
    reader.adopt(report)
    check_all(reader, source)
    check_counters(reader)
    assert not reader.generation(1).writable
    reader.close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond `size`: to LMDB that looks like a quota."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_refused_write_is_typed_and_nothing_is_lost(tmp_path: Path) -> None:
    source = two_generations()
    store = open_store(tmp_path)
    store.adopt(store.run(store.migrate_job([(9, 1, 1)]), Source([made(9, 1, [100])]).read))
    job = store.migrate_job(source.ranges())
    with file_size_limit(20_000), pytest.raises(StoreFull):
        store.run(job, source.read)
    assert store.lookup(9, 1).index == 1
    store.adopt(store.run(job, source.read))
    check_all(store, source)
    check_counters(store)
    store.close()


def test_a_full_disk_takes_no_payloads_and_still_drops_them(tmp_path: Path) -> None:
    """A file system of 12 MiB fills up in the middle of a commit; dropping a dead generation makes room again."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root: not run")
    try:
        store = open_store(tmp_path / "store")
        first = Source([made(1, index, [100_000]) for index in range(1, 61)])
        store.adopt(store.run(store.migrate_job(first.ranges()), first.read))
        store.seal_current()
        second = Source([made(2, index, [100_000]) for index in range(1, 71)])
        job = store.migrate_job(second.ranges())
        for _ in range(2):
            with pytest.raises(StoreFull):
                store.run(job, second.read)
        check_all(store, first)
        store.delete_group(1)
        assert store.unlink_dead() > 6_000_000
        store.adopt(store.run(job, second.read))
        check_all(store, second)
        check_counters(store)
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_migration_that_goes_on_reads_what_was_not_durable_whatever_the_order_of_indexes() -> None:
    """Groups come in the order of their numbers; an index says nothing of another group's."""
    asked: list[tuple[int, int, int]] = []

    def read(uid: int, first: int, last: int) -> Iterator[SourceRow]:
        asked.append((uid, first, last))
        return iter(())

    ranges = [(1, 1, 9), (2, 1, 5), (2, 6, 9), (3, 1, 3)]
    assert not list(_fresh(ranges, read, [(1, JobState(7, 1, 0, (1, 1), (2, 7)))])) and asked == [(2, 8, 9), (3, 1, 3)]
