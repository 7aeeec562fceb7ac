from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logyard.payloads import checkpoints, layout, verify
from logyard.payloads.catalog import Catalog
from logyard.payloads.compaction import MigrateReport
from logyard.payloads.generation import Generation
from logyard.payloads.journal import Journal
from logyard.payloads.store import PayloadStore, StoreConfig
from logyard.payloads.writing import GenerationConfig
from logyard.protocol.errors import (
    FormatNewer,
    GenerationFailed,
    GenerationUnfinished,
    PayloadCorrupt,
    PayloadMissing,
    StoreFull,
)

from .support import MIB, Door, Source, check_all, check_counters, made, open_store


def migrate(store: PayloadStore, source: Source) -> MigrateReport:
    report = store.run(store.migrate_job(source.ranges()), source.read)
    store.adopt(report)
    return report


def test_migrated_entries_are_found_by_group_and_index(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(uid, index, [400, 9000]) for uid in (1, 2, 3) for index in range(5, 25)])
    report = migrate(store, source)
    assert report.rows == 60 and report.runs == [(uid, 5, 24, 1, 1) for uid in (1, 2, 3)]
    check_all(store, source)
    check_counters(store)
    assert [entry.index for entry in store.scan(2, 0, 99)] == list(range(5, 25))
    with pytest.raises(PayloadMissing):
        store.lookup(2, 4)
    with pytest.raises(PayloadMissing):
        store.read_unit(9, 5, 0)
    store.close()


def test_a_full_generation_is_sealed_and_the_next_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(uid, index, [300, 90_000]) for uid in (1, 2) for index in range(1, 121)])
    report = migrate(store, source)
    assert len(store.generations()) >= 3
    assert [info.sealed for info in store.generations()] == [True] * (len(store.generations()) - 1) + [False]
    assert all(info.disk <= 8 * MIB + 65536 for info in store.generations())
    covered = sorted((uid, first, last) for uid, first, last, _, _ in report.runs)
    for uid in (1, 2):
        pieces = [(first, last) for owner, first, last in covered if owner == uid]
        assert pieces[0][0] == 1 and pieces[-1][1] == 120
        assert all(left[1] + 1 == right[0] for left, right in itertools.pairwise(pieces))
    check_all(store, source)
    check_counters(store)
    assert [entry.index for entry in store.scan(1, 1, 120, bodies=False)] == list(range(1, 121))
    store.close()


def test_units_die_one_by_one_and_the_entry_with_its_last(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = made(1, 1, [1000, 50_000, 60_000])
    migrate(store, Source([entry, made(1, 2, [10])]))
    live = store.live_bytes
    assert store.mark_dead(1, (1, 1), (1, 2)) == {1: 50_000}
    assert store.mark_dead(1, (1, 1), (1, 2)) == {}
    assert store.mark_dead(1, (1, 0), (1, 1)) == {1: 1000}
    check_counters(store)
    overhead = live - store.live_bytes
    last = store.mark_dead(1, (1, 0), (2, 0))[1]
    assert last == 60_000 + len(entry.data) + (live - 51_000 - 60_000 - len(entry.data) - store.live_bytes)
    assert last > 60_000 + len(entry.data) and overhead == 51_000
    check_counters(store)
    assert store.lookup(1, 2).index == 2
    store.close()


def test_an_entry_dies_with_a_range_that_ends_behind_its_last_unit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, 1, [1000, 50_000]), made(1, 2, [10])]))
    assert store.mark_dead(1, (1, 0), (1, 2))[1] > 51_000
    assert store.mark_dead(1, (1, 0), (2, 0)) == {}, "nothing of it is left"
    check_counters(store)
    store.close()


def test_a_range_inside_entries_leaves_both_ends_alive(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(1, index, [100, 5000, 6000]) for index in range(1, 6)])
    migrate(store, source)
    freed = store.mark_dead(1, (2, 1), (4, 1))
    source.live = {(1, 2): {0}, (1, 3): set(), (1, 4): {1, 2}}
    overhead_of_3 = freed[1] - (5000 + 6000) - (100 + 5000 + 6000) - 100
    assert overhead_of_3 > len(source.entries[1, 3].data)
    check_all(store, source)
    check_counters(store)
    store.close()


def test_disk_falls_when_everything_in_a_generation_died(tmp_path: Path) -> None:
    store = open_store(tmp_path, drop_current_bytes=100 * MIB)
    source = Source([made(1, index, [100_000]) for index in range(1, 201)])
    migrate(store, source)
    before = store.disk_bytes()
    assert store.unlink_dead() == 0
    store.mark_dead(1, (0, 0), (151, 0))
    freed = store.unlink_dead()
    assert freed >= 7 * MIB and store.disk_bytes() <= before - freed
    source.live = {(1, index): set() for index in range(1, 151)}
    check_all(store, source)
    check_counters(store)
    store.close()


def test_a_dead_current_generation_goes_too_and_its_number_never_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, 1, [500_000])]))
    store.delete_group(1)
    assert store.dead_generations() == [1]
    assert store.unlink_dead() > 500_000
    assert [info.id for info in store.generations()] == [2]
    store.close()
    again = open_store(tmp_path)
    report = migrate(again, Source([made(2, 1, [100])]))
    assert report.runs == [(2, 1, 1, 2, 2)], "run numbers go on as well"
    again.close()


def test_pinned_and_running_generations_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, 1, [100_000])]))
    store.pin(1)
    store.delete_group(1)
    assert store.unlink_dead() == 0
    store.unpin(1)
    job = store.migrate_job([(2, 1, 1)])
    assert store.unlink_dead() == 0, "the job may be writing there"
    store.adopt(store.run(job, Source([made(2, 1, [100])]).read))
    assert store.unlink_dead() == 0, "and now it holds something"
    check_counters(store)
    store.close()


def test_marks_made_while_a_job_runs_count_for_its_copies(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(1, index, [100, 5000]) for index in range(1, 11)])
    source.entries.update(Source([made(2, index, [100]) for index in range(1, 4)]).entries)
    source.entries.update(Source([made(3, index, [100]) for index in range(1, 4)]).entries)
    job = store.migrate_job(source.ranges())
    report = store.run(job, source.read)
    store.mark_dead(1, (0, 0), (3, 0))
    store.mark_dead(1, (3, 0), (4, 1))
    store.truncate(1, 9)
    store.delete_group(3)
    store.adopt(report)
    source.live = (
        {(1, index): set() for index in (1, 2, 3, 9, 10)} | {(1, 4): {1}} | {(3, index): set() for index in (1, 2, 3)}
    )
    check_all(store, source)
    check_counters(store)
    for index in (9, 10):
        with pytest.raises(PayloadMissing):
            store.lookup(1, index)
    assert store.homes(3) == []
    assert store.mark_dead(1, (0, 0), (4, 1)) == {}, "it died before it was adopted"
    store.close()


# Of each generation: (number, bytes ever stored, bytes that live). The eighth is not sealed.
SPARSE = [
    ([], []), ([(1, 100, 50)], []), ([(1, 100, 49)], [1]), ([(1, 100, 0)], []), ([(8, 100, 10)], []),
    ([(1, 100, 40), (2, 100, 20), (3, 100, 90)], [2, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("generations", "want"), SPARSE)
def test_which_generations_are_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generations: list[tuple[int, int, int]], want: list[int]
) -> None:
    store = PayloadStore(tmp_path, StoreConfig(), Door())
    store._totals = {number: total for number, total, _ in generations}
    store._placement.copies._live = {number: live for number, _, live in generations}
    monkeypatch.setattr(Catalog, "sealed", lambda self, number: number != 8)
    assert store.sparse(0.5) == want


def test_rewrite_keeps_survivors_only_and_gives_the_disk_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(uid, index, [200, 30_000]) for uid in (1, 2) for index in range(1, 101)])
    migrate(store, source)
    assert store.sparse(0.5) == []
    for uid in (1, 2):
        for index in range(1, 101):
            if index % 3:
                store.mark_dead(uid, (index, 0), (index + 1, 0))
                source.live[uid, index] = set()
            else:
                store.mark_dead(uid, (index, 1), (index, 2))
                source.live[uid, index] = {0}
    store.seal_current()
    [victim] = store.sparse(0.5)
    before, live = store.disk_bytes(), store.live_bytes
    job = store.rewrite_job(victim)
    report = store.run(job)
    store.mark_dead(1, (3, 0), (4, 0))
    source.live[1, 3] = set()
    store.adopt(report)
    assert report.damaged == [] and report.source == victim
    assert store.unlink_dead() > 6_000_000 and store.disk_bytes() < before / 2
    assert victim not in [info.id for info in store.generations()]
    check_all(store, source)
    check_counters(store)
    assert store.live_bytes < live
    assert store.lookup(1, 6).units[0].at == 0, "what lay beside its metadata does so still"
    with pytest.raises(PayloadMissing):
        store.read_unit(1, 6, 1)
    store.close()


def test_a_rewrite_ends_at_damage_and_saves_the_rest_when_that_is_dead(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(1, index, [200, 30_000]) for index in range(1, 6)])
    migrate(store, source)
    store.seal_current()
    saved = store.checkpoint()
    store.close()
    file = tmp_path / "gen-0000000001" / "data.mdb"
    data = bytearray(file.read_bytes())
    for needle in (source.entries[1, 2].data, source.entries[1, 4].units[1][0][:1000]):
        # Wherever it is: what LMDB moved from a page that it split is still there as well.
        at = data.find(needle)
        while at >= 0:
            data[at + 3] ^= 1
            at = data.find(needle, at + 1)
    file.write_bytes(data)
    again = open_store(tmp_path)
    again.restore(saved)
    with pytest.raises(PayloadCorrupt):
        again.lookup(1, 2)
    for index in (2, 4):
        report = again.run(again.rewrite_job(1))
        assert [damaged for _, damaged, _ in report.damaged] == [index]
        again.abandon()
        again.mark_dead(1, (index, 0), (index + 1, 0))
    report = again.run(again.rewrite_job(1))
    assert not report.damaged
    again.adopt(report)
    again.unlink_dead()
    source.live = {(1, 2): set(), (1, 4): set()}
    check_all(again, source)
    check_counters(again)
    with pytest.raises(PayloadMissing):
        again.lookup(1, 2)
    again.close()


def test_truncated_entries_come_back_under_the_same_index(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, index, [5000], term=1) for index in range(1, 11)]))
    store.truncate(1, 6)
    with pytest.raises(PayloadMissing):
        store.lookup(1, 6)
    later = Source([made(1, index, [5000], term=2) for index in range(6, 15)])
    migrate(store, later)
    check_all(store, later)
    assert store.lookup(1, 5).term == 1 and store.lookup(1, 6).term == 2
    assert [entry.term for entry in store.scan(1, 4, 7)] == [1, 1, 2, 2]
    check_counters(store)
    store.truncate(1, 1)
    assert store.live_bytes == 0
    store.close()


def test_a_refill_replaces_the_older_copy(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(1, index, [5000]) for index in range(1, 11)])
    migrate(store, source)
    migrate(store, Source([source.entries[1, index] for index in (4, 5)]))
    assert [(home.first, home.last, home.run) for home in store.homes(1)] == [(1, 3, 1), (4, 5, 2), (6, 10, 1)]
    check_all(store, source)
    check_counters(store)
    store.close()


def test_rows_without_ranges(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, 5, [5000])]))
    source = Source([made(uid, index, [5000]) for uid in (1, 2) for index in (2, 3, 7, 9)])
    rows = [entry.row() for _, entry in sorted(source.entries.items())]
    report = store.run(store.migrate_job(number=40), rows=rows)
    store.adopt(report)
    assert report.runs == [(1, 2, 3, 1, 40), (1, 7, 9, 1, 40), (2, 2, 9, 1, 40)], (
        "what is at home elsewhere stays there"
    )
    check_all(store, source)
    assert store.lookup(1, 5).index == 5
    check_counters(store)
    store.close()


def test_checkpoint_and_restore(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(uid, index, [300, 7000]) for uid in (1, 2, 3) for index in range(1, 30)])
    migrate(store, source)
    rows = dict(store.changes())
    assert len(rows) == 3 and store.changes() == []
    store.mark_dead(1, (0, 0), (10, 1))
    store.mark_dead(2, (5, 1), (5, 2))
    store.delete_group(3)
    changed = dict(store.changes())
    assert len(changed) == 3 and list(changed.values()).count(None) == 1
    rows.update(changed)
    saved, told = store.checkpoint(), store.generations()
    store.close()
    for state in (saved, [(key, value) for key, value in rows.items() if value is not None]):
        again = open_store(tmp_path)
        again.restore(state)
        assert again.generations() == told
        check_counters(again)
        assert again.mark_dead(1, (0, 0), (10, 1)) == {}, "replayed marks change nothing"
        assert again.lookup(2, 5).index == 5
        again.close()
    with pytest.raises(PayloadCorrupt):
        open_store(tmp_path).restore(saved[:-1] + bytes([saved[-1] ^ 1]))


def test_a_row_of_a_checkpoint_has_its_groups_name_and_its_bytes(tmp_path: Path) -> None:
    name = checkpoints.key(7)
    value = checkpoints.encode(7, [], [])
    assert checkpoints.decode(name, value) == (7, [], [])
    other = name.replace(b"payloads", b"somewhat")
    with pytest.raises(PayloadCorrupt):
        checkpoints.decode(other, layout.wrap(other, value[layout.HASH_BYTES :]))
    for at in range(len(value)):
        with pytest.raises(PayloadCorrupt):
            checkpoints.decode(name, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])


@pytest.mark.parametrize("saved", [b"", b"x" * 40])
def test_an_empty_checkpoint_is_an_error(tmp_path: Path, saved: bytes) -> None:
    store = open_store(tmp_path)
    with pytest.raises(PayloadCorrupt):
        store.restore(saved)
    store.close()


def test_what_a_checkpoint_names_and_is_gone_is_lost(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, index, [200_000]) for index in range(1, 5)]))
    saved = store.checkpoint()
    store.delete_group(1)
    store.unlink_dead()
    store.close()
    again = open_store(tmp_path)
    again.restore(saved)
    assert again.lost() == [(1, 1, 4)] and again.homes(1) == [] and again.live_bytes == 0
    again.close()


def test_an_abandoned_jobs_rows_are_dead(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    source = Source([made(1, 1, [5000])])
    store.run(store.migrate_job(source.ranges()), source.read)
    store.abandon()
    store.close()
    again = open_store(tmp_path)
    [info] = again.generations()
    assert info.live == 0 and info.dead == info.total > 5000
    migrate(again, source)
    check_counters(again)
    check_all(again, source)
    again.close()


def test_the_number_of_a_job_that_was_given_up_is_not_used_again(tmp_path: Path) -> None:
    """Rows that it may have written lie under it."""
    with closing(open_store(tmp_path)) as store:
        source = Source([made(1, 1, [5000])])
        first = store.migrate_job(source.ranges()).job
        store.abandon()
        assert store.migrate_job(source.ranges()).job > first


def test_of_a_generation_that_failed_nothing_is_served_whoever_asks(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        migrate(store, Source([made(1, 1, [5000])]))
        assert store.generation(1).number == 1
        store.fail(1, OSError("it can't be read"))
        with pytest.raises(GenerationFailed, match="it can't be read"):
            store.generation(1)


def test_whoever_has_read_is_inside_of_no_environment_any_more(tmp_path: Path) -> None:
    """Who is, when the process is killed, has it set aside as what killed it."""
    with closing(open_store(tmp_path)) as store:
        source = Source([made(1, index, [400, 5000]) for index in range(1, 4)])
        migrate(store, source)
        generation = store.generation(1)
        check_all(store, source)
        assert len(list(store.scan(1, 1, 3))) == 3 and len(list(store.scan(1, 2, 2, bodies=False))) == 1
        assert store.measure(1).damage == [] and store.recount()
        assert generation._inside == 0


def test_a_crash_inside_an_environment_sets_it_aside(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, index, [5000]) for index in range(1, 4)]))
    saved = store.checkpoint()
    with store._lock:
        store.catalog.get(1)._enter()  # The process is inside; it never leaves.
    store._journal.close()
    asked: list[int] = []

    def probe(path: str, number: int, map_bytes: int) -> bool:
        asked.append(number)
        return len(asked) == 1

    store.catalog.get(1)._leave()
    store.catalog.close()
    config = store.config
    again = PayloadStore(tmp_path, config, Door(), probe_generation=probe)
    assert again.open() == [] and asked == [1], "it was probed, and is well"
    again.restore(saved)
    assert again.lookup(1, 2).index == 2
    again.catalog.get(1)._enter()
    again._journal.close()
    again.catalog.get(1)._leave()
    again.catalog.close()
    third = PayloadStore(tmp_path, config, Door(), probe_generation=probe)
    assert third.open() == [1] and third.suspects() == [1]
    third.restore(saved)
    assert third.lost() == [(1, 1, 3)]
    report = migrate(third, Source([made(1, index, [5000]) for index in range(1, 4)]))
    assert report.runs[0][3] == 2, "refilled beside what was set aside"
    third.close()


def test_the_real_probe_reads_a_generation_and_refuses_a_cut_one(tmp_path: Path) -> None:
    from logyard.payloads.probe import survives

    store = open_store(tmp_path)
    migrate(store, Source([made(1, 1, [50_000])]))
    path = store.catalog.path(1)
    store.close()
    assert survives(path, 1, 8 * MIB)
    os.truncate(os.path.join(path, "data.mdb"), 30_000)
    assert not survives(path, 1, 8 * MIB)


@pytest.mark.parametrize("map_bytes", [256 << 10, 8 * MIB], ids=["a smaller map", "its map"])
def test_a_scan_of_a_generation_that_grows_meanwhile_finds_no_damage(tmp_path: Path, map_bytes: int) -> None:
    """Behind the end of a smaller map LMDB lets nobody begin to read."""
    with closing(open_store(tmp_path)) as store:
        migrate(store, Source([made(1, 1, [50_000])]))
        code = """
import sys
from logyard.payloads import verify
from logyard.payloads.generation import Generation
measure = Generation.measure
def later(self):
    print("open", file=sys.stderr, flush=True)
    sys.stdin.readline()
    return measure(self)
Generation.measure = later
sys.exit(verify.main(sys.argv[1:]))
"""
        arguments = verify.command(store.catalog.path(1), 1, map_bytes, [1])[3:]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        ) as child:
            assert child.stderr is not None and child.stderr.readline() == b"open\n"
            migrate(store, Source([made(1, index, [900_000]) for index in range(2, 5)]))
            output, errors = child.communicate(b"go on\n")
        if map_bytes == store.config.generation_bytes:
            assert verify.Verified.of_process(child.returncode, output) == ([], "")
        else:
            assert b"MapResizedError" in errors
            with pytest.raises(OSError, match="was not verified"):
                verify.Verified.of_process(child.returncode, output)


def test_a_clean_close_and_a_kill_outside_suspect_nothing(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "in-use"))
    assert journal.open() == []
    slot = journal.enter(7)
    journal.mark(slot, False)
    other = journal.enter(8)
    journal._map = None  # Killed: nothing is closed.
    journal = Journal(str(tmp_path / "in-use"))
    assert journal.open() == [8] and other != slot
    journal.close()
    (tmp_path / "in-use").write_bytes(b"garbage" * 9000)
    assert Journal(str(tmp_path / "in-use")).open() == []


def test_the_journal_grows_and_remembers_who_was_inside(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "in-use"))
    assert journal.open() == []
    slots = [journal.enter(number) for number in range(1, 2501)]
    assert len(set(slots)) == 2500
    for number, slot in enumerate(slots, 1):
        journal.mark(slot, number in (3, 1500, 2500))
    journal.leave(slots[1])
    assert journal.enter(2501) == slots[1], "what is closed is used again"
    journal.mark(slots[1], False)
    journal._map = None  # Killed: nothing is closed.
    size = os.path.getsize(tmp_path / "in-use")
    journal = Journal(str(tmp_path / "in-use"))
    assert journal.open() == [3, 1500, 2500] and os.path.getsize(tmp_path / "in-use") == size
    journal.close()
    assert Journal(str(tmp_path / "in-use")).open() == []


def test_a_store_has_as_many_generations_as_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.payloads.journal._BYTES", 64)
    store = open_store(tmp_path)
    source = Source([made(1, index, [5000]) for index in range(1, 9)])
    for (uid, index), entry in source.entries.items():
        migrate(store, Source([entry]))
        assert store.seal_current() and store.home(uid, index) is not None
    check_all(store, source)
    saved = store.checkpoint()
    store.close()
    with closing(open_store(tmp_path)) as again:
        again.restore(saved)
        assert len(again.generations()) == 8 and not again.suspects()
        check_all(again, source)


def test_without_room_for_the_journal_nothing_is_opened_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logyard.payloads.journal._BYTES", 64)
    with closing(open_store(tmp_path)) as store:
        source = Source([made(1, index, [5000]) for index in range(1, 4)])
        for entry in source.entries.values():
            migrate(store, Source([entry]))
            store.seal_current()
        real, full = os.posix_fallocate, True

        def fallocate(fd: int, offset: int, length: int) -> None:
            if full and os.readlink(f"/proc/self/fd/{fd}").endswith("in-use"):
                raise OSError(errno.ENOSPC, "no space")
            real(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        more = Source([made(1, 4, [5000])])
        job = store.migrate_job(more.ranges())
        with pytest.raises(StoreFull, match="full"):
            store.run(job, more.read)
        store.abandon()
        check_all(store, source)
        full = False
        migrate(store, more)
        check_all(store, more)
        assert not store.suspects()


def test_a_failing_generation_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, index, [5000]) for index in range(1, 4)]))
    store.seal_current()
    migrate(store, Source([made(2, 1, [5000])]))
    saved = store.checkpoint()
    store.close()
    os.truncate(tmp_path / "gen-0000000001" / "data.mdb", 12_288)
    again = open_store(tmp_path)
    again.restore(saved)
    assert again.suspects() == [1] and again.lost() == [(1, 1, 3)]
    assert again.lookup(2, 1).index == 1
    with pytest.raises(GenerationFailed):
        again.generation(1)
    with pytest.raises(PayloadMissing):
        again.lookup(1, 1)
    again.close()


@pytest.mark.parametrize("ledger_slots", [2_000_000, 0], ids=["sizes are kept", "sizes are read again"])
def test_a_release_whose_sizes_can_not_be_read_costs_space_and_nothing_else(
    tmp_path: Path, ledger_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    rotten = Source([made(1, index, [5000]) for index in range(1, 4)])
    sound = Source([made(uid, index, [5000]) for uid in (1, 2) for index in range(4, 7)])
    migrate(store, rotten)
    migrate(store, sound)
    saved = store.checkpoint()
    path, live = store.catalog.path(1), store.live_bytes
    store.close()
    key = layout.own_key(layout.LEDGER, 1)
    with lmdb.open(path, map_size=8 * MIB) as environment, environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(key) or b"")
        value[-1] ^= 1
        transaction.put(key, bytes(value))
    with closing(open_store(tmp_path, ledger_slots=ledger_slots)) as again:
        again.restore(saved)
        assert again.mark_dead(1, (1, 0), (4, 0)) == {}
        monkeypatch.setattr(Generation, "columns", lambda *_: pytest.fail("it is read once, not in each release"))
        for _ in range(20):
            assert again.mark_dead(1, (2, 0), (3, 0)) == {} and again.live_bytes == live
        for error in again._placement.copies._damaged.values():
            assert len(list(traceback.walk_tb(error.__traceback__))) < 10, "it keeps no frames of releases"
        monkeypatch.undo()
        assert again.lost() == [] and again.suspects() == []
        check_all(again, rotten)
        check_all(again, sound)
        [freed] = again.mark_dead(1, (4, 0), (7, 0)).values()
        assert freed > 15_000 and again.live_bytes == live - freed, "another run's sizes are there"
        again.delete_group(1)
        again.delete_group(2)
        assert again.dead_generations() == [1]


def not_opened(code: int) -> Callable[[str], None]:
    """Make what refuses a generation's file for an error of the system's."""

    def fails(path: str) -> None:
        raise GenerationFailed(path, "it cannot be opened") from OSError(code, os.strerror(code))

    return fails


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.ELOOP, errno.EIO])
def test_a_generation_that_one_start_can_not_open_is_there_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = open_store(tmp_path)
    source = Source([made(uid, index, [300, 7000]) for uid in (1, 2) for index in range(1, 9)])
    migrate(store, source)
    saved = store.checkpoint()
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr("logyard.payloads.generation.check_file", not_opened(code))
        if code == errno.EIO:
            with closing(open_store(tmp_path)) as once:
                once.restore(saved)
                assert once.lost() == [(1, 1, 8), (2, 1, 8)] and once.homes(1) == []
                saved = once.checkpoint()
        else:
            # Nobody would know what to give up.
            with pytest.raises(GenerationFailed, match="cannot be opened"):
                open_store(tmp_path)
    with closing(open_store(tmp_path)) as again:
        again.restore(saved)
        assert again.lost() == [] and again.suspects() == []
        check_all(again, source)
        check_counters(again)


def test_a_generation_that_can_not_be_looked_at_is_none_that_was_never_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are removed."""
    store = open_store(tmp_path)
    source = Source([made(1, index, [7000]) for index in range(1, 4)])
    migrate(store, source)
    saved = store.checkpoint()
    store.close()
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("data.mdb"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        open_store(tmp_path, remote_writer=True).close()
    with closing(open_store(tmp_path)) as again:
        again.restore(saved)
        check_all(again, source)


def test_what_died_or_was_found_while_a_generation_could_not_be_opened_does_not_live_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    source = Source([made(uid, index, [300, 7000]) for uid in (1, 2, 3) for index in range(1, 9)])
    migrate(store, source)
    store.mark_dead(1, (1, 0), (3, 0))
    rows = {key: value for key, value in store.changes() if value is not None}
    living = store.live_bytes
    store.close()

    def stored(store: PayloadStore) -> int:
        changes = store.changes()
        for key, value in changes:
            rows.pop(key, None)
            if value is not None:
                rows[key] = value
        return len(changes)

    with monkeypatch.context() as patch:
        patch.setattr("logyard.payloads.generation.check_file", not_opened(errno.EIO))
        for _ in range(2):
            with closing(open_store(tmp_path)) as once:
                once.restore(rows.items())
                assert once.lost() == [(1, 1, 8), (2, 1, 8), (3, 1, 8)] and stored(once) == 3
        with closing(open_store(tmp_path)) as once:
            once.restore(rows.items())
            once.mark_dead(1, (5, 0), (7, 0))
            once.delete_group(3)
            once.lose(2, 1, 8)
            once.found(2, 1, 2)
            assert once.lost() == [(1, 1, 4), (1, 7, 8), (2, 3, 8)] and stored(once) == 3 and len(rows) == 2
    source.live = {(3, index): set() for index in range(1, 9)}
    source.live |= {(1, index): set() for index in (1, 2, 5, 6)} | {(2, index): set() for index in (1, 2)}
    for returned in (2, 0):
        with closing(open_store(tmp_path)) as again:
            again.restore(rows.items())
            assert again.lost() == [] and again.suspects() == []
            check_all(again, source)
            check_counters(again)
            # Of 22 entries that lived 10 do.
            assert abs(again.live_bytes * 22 - living * 10) < 22 * 10 * 50
            assert stored(again) == returned, "with what lives there now"
            assert again.homes(1) == [(1, 4, 1, 1), (7, 8, 1, 1)]
            if not returned:
                for uid in (1, 2):
                    again.mark_dead(uid, (0, 0), (9, 0))
                assert again.live_bytes == 0 and again.dead_generations() == [1]


def test_what_was_passed_over_as_it_failed_goes_once_nothing_is_lost(tmp_path: Path) -> None:
    """It is neither the newest nor sealed: nothing else would ever seal it."""
    store = open_store(tmp_path)
    source = Source([made(1, index, [5000]) for index in range(1, 4)])
    migrate(store, source)
    store.fail(1, GenerationFailed("gen-1", "a read failed, once"))
    migrate(store, Source([made(2, 1, [5000])]))
    while_lost = store.checkpoint()
    migrate(store, source)
    mended = store.checkpoint()
    store.close()
    with closing(open_store(tmp_path)) as again:
        again.restore(while_lost)
        assert again.lost() == [(1, 1, 3)] and again.dead_generations() == [], "it may hold the last copy"
    with closing(open_store(tmp_path)) as again:
        again.restore(mended)
        assert [info.sealed for info in again.generations()] == [True, False]
        assert again.dead_generations() == [1] and again.unlink_dead() > 15_000
        check_all(again, source)
        check_counters(again)
    with closing(open_store(tmp_path)) as again:
        again.restore(mended)
        assert not again.lost()
        check_all(again, source)


def test_without_room_for_a_seal_a_store_opens_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, 1, [5000])]))
    store.fail(1, GenerationFailed("gen-1", "a read failed, once"))
    migrate(store, Source([made(1, 1, [5000])]))
    saved = store.checkpoint()
    store.close()

    def full(number: int) -> None:
        raise StoreFull(f"generation {number}: no room")

    with closing(open_store(tmp_path)) as again:
        monkeypatch.setattr("logyard.payloads.catalog.Catalog.seal", lambda _, number: full(number))
        again.restore(saved)
        assert again.dead_generations() == [] and again.lookup(1, 1).index == 1


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_an_unfinished_generation_is_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "gen-0000000001"
    path.mkdir()
    (path / name).write_bytes(b"")
    with pytest.raises(GenerationUnfinished):
        Generation(str(path), 1, GenerationConfig()).open_reader()
    store = open_store(tmp_path)
    assert store.generations() == []
    source = Source([made(1, 1, [5000])])
    migrate(store, source)
    check_all(store, source)
    store.close()


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    migrate(store, Source([made(1, 1, [5000])]))
    store.close()
    monkeypatch.setattr("logyard.payloads.generation.layout.NEWEST", 1)
    with pytest.raises(FormatNewer):
        open_store(tmp_path)


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_counters_equal_a_recount_after_random_operations(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("random")
    store = open_store(path, generation_bytes=2 * MIB, transaction_bytes=256 << 10, ledger_slots=50)
    everything = Source([])
    ends = {uid: 1 for uid in (1, 2, 3)}
    for _ in range(rng.randrange(3, 14)):
        uid = rng.choice((1, 2, 3))
        end = ends[uid]
        action = rng.random()
        if action < 0.35:
            batch = Source([])
            for group in (1, 2, 3):
                for index in range(ends[group], ends[group] + rng.randrange(0, 15)):
                    entry = made(
                        group,
                        index,
                        [rng.choice((50, 900, 6000, 30_000)) for _ in range(rng.randrange(1, 4))],
                        seed % 9 + 1,
                    )
                    batch.entries[group, index] = entry
                    ends[group] = index + 1
            migrate(store, batch)
            everything.entries.update(batch.entries)
        elif action < 0.7:
            first = (rng.randrange(0, end + 1), rng.randrange(0, 4))
            last = (rng.randrange(first[0], end + 2), rng.randrange(0, 4))
            store.mark_dead(uid, first, last)
            for (group, index), entry in everything.entries.items():
                if group == uid:
                    live = everything.live.get((uid, index), set(range(len(entry.units))))
                    everything.live[uid, index] = {unit for unit in live if not first <= (index, unit) < last}
        elif action < 0.75:
            cut = rng.randrange(1, end + 1)
            store.truncate(uid, cut)
            ends[uid] = cut
            everything.entries = {
                key: entry for key, entry in everything.entries.items() if key[0] != uid or key[1] < cut
            }
            everything.live = {key: live for key, live in everything.live.items() if key[0] != uid or key[1] < cut}
        elif action < 0.9:
            for victim in store.sparse(0.8)[:1]:
                store.adopt(store.run(store.rewrite_job(victim)))
            store.unlink_dead()
        else:
            saved = store.checkpoint()
            store.close()
            store = open_store(path, generation_bytes=2 * MIB, transaction_bytes=256 << 10, ledger_slots=50)
            store.restore(saved)
    check_counters(store)
    check_all(store, everything)
    store.close()


def test_the_name_of_a_new_store_is_durable(tmp_path: Path) -> None:
    door = Door()
    store = open_store(tmp_path / "payloads", door=door)
    assert str(tmp_path) in door.synced
    store.close()


def test_a_lost_run_is_lost_from_its_first_entry_to_its_last(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.lose(7, 5, 9)
        table = {
            (1, 4): False, (1, 5): True, (5, 5): True, (6, 8): True, (9, 9): True, (9, 12): True, (10, 12): False,
            (1, 12): True,
        }  # fmt: skip
        assert {gap: store.is_lost(7, *gap) for gap in table} == table
        assert not store.is_lost(8, 1, 12)
        store.found(7, 5, 5)
        assert not store.is_lost(7, 5, 5) and store.is_lost(7, 6, 6)


def test_runs_are_numbered_by_runs_whatever_the_groups_are_called(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert migrate(store, Source([made(1 << 40, 1, [5000])])).runs == [(1 << 40, 1, 1, 1, 1)]
    assert migrate(store, Source([made(1 << 40, 2, [5000])])).runs == [(1 << 40, 2, 2, 1, 2)]
    store.close()
