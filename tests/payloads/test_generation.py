from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.payloads import layout
from logyard.payloads.generation import HALF_MADE, Generation
from logyard.payloads.journal import Journal
from logyard.payloads.layout import SourceRow
from logyard.payloads.writing import Statistics, Writing
from logyard.protocol.errors import (
    FormatNewer,
    GenerationFailed,
    GenerationUnfinished,
    PayloadCorrupt,
    PayloadMissing,
    StoreFull,
    StoreShort,
)

from .support import MIB, SMALL, Crash, Door, Made, crash_after, made


@pytest.fixture
def generation(tmp_path: Path) -> Iterator[Generation]:
    found = Generation(str(tmp_path / "gen-1"), 1, SMALL)
    found.create(0, Door().sync_directory)
    yield found
    found.close()


def rows_of(entries: list[Made]) -> list[SourceRow]:
    return [entry.row() for entry in entries]


def check(generation: Generation, run: int, entry: Made) -> None:
    stored = generation.entry(run, entry.uid, entry.index)
    assert (stored.term, stored.data) == (entry.term, entry.data)
    assert [unit.number for unit in stored.units] == list(range(len(entry.units)))
    for number, (body, small) in enumerate(entry.units):
        pack = stored.pack(number)
        assert (pack is not None) == small
        assert pack is None or pack == body
        assert generation.read_unit(run, entry.uid, entry.index, number) == body


def test_a_creation_that_the_disk_refuses_is_typed_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise lmdb.DiskError("no space left")

    kept = []
    for _ in range(2):
        # Whoever failed may still be referred to.
        kept.append(Generation(str(tmp_path / "gen-1"), 1, SMALL))
        with monkeypatch.context() as broken:
            broken.setattr(Statistics, "put", refuse)
            with pytest.raises(StoreFull):
                kept[-1].create(0, Door().sync_directory)
    found = Generation(str(tmp_path / "gen-1"), 1, SMALL)
    found.create(0, Door().sync_directory)
    assert found.write_entries(1, [made(5, 1, [100]).row()], 1).entries == 1
    found.close()


def test_round_trip(generation: Generation) -> None:
    entries = [made(uid, index, [100, 5000, 70_000, 30]) for uid in (5, 9) for index in range(1, 20)]
    report = generation.write_entries(1, rows_of(entries), 1)
    assert (report.entries, report.full, report.damaged) == (38, False, [])
    for entry in entries:
        check(generation, 1, entry)
    assert generation.statistics().entries == 38
    measured = generation.measure()
    assert measured.damage == [] and measured.total == generation.statistics().total == report.written
    with pytest.raises(PayloadMissing):
        generation.entry(1, 5, 20)
    with pytest.raises(PayloadMissing):
        generation.entry(2, 5, 1)
    with pytest.raises(PayloadMissing):
        generation.read_unit(1, 5, 1, 4)


def test_small_payloads_are_one_row_an_entry(generation: Generation) -> None:
    """500 entries of four packs each: 500 rows beside the generation's own."""
    before = generation._env.stat()["entries"]  # type: ignore[union-attr]
    generation.write_entries(1, rows_of([made(1, index, [256, 900, 20, 4000]) for index in range(1, 501)]), 1)
    own = generation.statistics().ledgers + 1
    assert generation._env.stat()["entries"] - before == 500 + own  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "size", [0, 1, 4095, 4096, 65536, MIB - 1, MIB, MIB + 1, 2 * MIB + 4096, 3 * layout.PIECE_BYTES]
)
def test_a_large_unit_reads_back_in_any_part(generation: Generation, size: int) -> None:
    entry = made(1, 1, [50, max(size, 1)])
    entry.units[1] = (entry.units[1][0][:size], False)
    body = entry.units[1][0]
    generation.write_entries(1, [entry.row()], 1)
    cuts = [
        0,
        1,
        size // 3,
        layout.PIECE_BYTES - 1,
        layout.PIECE_BYTES,
        layout.PIECE_BYTES + 1,
        size - 1,
        size,
        size + 9,
    ]
    for start in cuts:
        for stop in [None, *cuts]:
            if start >= 0 and (stop is None or stop >= start):
                assert generation.read_unit(1, 1, 1, 1, start, stop) == body[start:stop], (start, stop)


@given(st.integers(0, 6 * MIB))
def test_pieces_cover_a_unit_exactly(length: int) -> None:
    lengths = layout.piece_lengths(length)
    assert sum(lengths) == length and lengths and max(lengths) <= layout.PIECE_BYTES
    assert [size for _, _, size in layout.pieces_between(length, 0, max(length, 1))] == lengths
    pages = sum(layout.row_pages(size + layout.PIECE_ROW.size) for size in lengths)
    assert length < 4096 or pages <= length * 1.02 + 8300


@given(st.integers(4096, 6 * MIB))
def test_a_large_unit_takes_little_more_space_than_its_bytes(length: int) -> None:
    pages = sum(layout.row_pages(size + layout.PIECE_ROW.size) for size in layout.piece_lengths(length))
    assert pages <= length * 1.03 + 850
    if length % 4096 == 0:
        assert pages <= length * 1.07, "sizes that people use"


@given(st.integers(0, 6 * MIB))
def test_units_of_the_first_format_are_cut_as_they_were(length: int) -> None:
    full, rest = divmod(length, layout.PIECE_BYTES)
    spare = (rest + layout.PIECE_ROW.size + layout.PAGE_HEAD) % layout.PAGE
    tail = [rest - spare, spare] if rest > 4096 and 0 < spare <= 1024 else [rest] if rest or not full else []
    assert layout.piece_lengths(length, 1) == [layout.PIECE_BYTES] * full + tail


def test_a_generation_of_the_first_format_goes_on_as_it_is(tmp_path: Path) -> None:
    sizes = [4096, 5000, 7000, 9000, 65_536, MIB + 7]
    one = Generation(str(tmp_path / "gen-1"), 1, SMALL)
    one.form = 1
    one.create(0, lambda path: None)
    entries = [made(1, index, sizes) for index in (1, 2)]
    one.write_entries(1, rows_of(entries[:1]), 1)
    one.close()
    again = Generation(str(tmp_path / "gen-1"), 1, SMALL)
    again.open_writer()
    assert again.form == 1
    again.write_entries(1, rows_of(entries[1:]), 1)
    for index in (1, 2):
        for number, (body, _) in enumerate(entries[index - 1].units):
            assert again.read_unit(1, 1, index, number) == body
    assert not again.measure().damage
    again.close()


def test_scan_is_in_order_and_bounded(generation: Generation) -> None:
    entries = [made(7, index, [3000, 5000] if index % 3 else [2000]) for index in range(1, 700)]
    generation.write_entries(1, rows_of([made(6, 1, [9]), *entries, made(8, 1, [9])]), 1)
    seen = list(generation.scan(1, 7, 100, 650))
    assert [entry.index for entry in seen] == list(range(100, 651))
    assert all(found.data == entries[found.index - 1].data for found in seen)
    assert [bytes(found.pack(0) or b"") for found in seen] == [entries[found.index - 1].units[0][0] for found in seen]
    bare = list(generation.scan(1, 7, 1, 5, bodies=False))
    assert [entry.inline for entry in bare] == [b""] * 5 and bare[0].data == entries[0].data


def test_an_entry_larger_than_a_transaction(generation: Generation) -> None:
    entry = made(1, 1, [100, 5 * MIB + 17])
    steps: list[str] = []
    generation.write_entries(1, [entry.row(), made(1, 2, [5]).row()], 1, step=lambda step, size: steps.append(step))
    assert steps.count("after part") >= 2
    check(generation, 1, entry)
    assert generation.measure().damage == []


def test_a_part_of_an_entry_that_went_elsewhere_is_no_damage(tmp_path: Path) -> None:
    """Wherever its writing was cut, also behind its last piece."""
    large = made(1, 2, [SMALL.transaction_bytes // 2] * 4)
    for at in range(12):
        path = str(tmp_path / f"gen-{at}")
        found = Generation(path, 1, SMALL)
        found.create(0, Door().sync_directory)
        found.write_entries(1, [made(1, 1, [3000]).row()], 1)
        with contextlib.suppress(Crash):
            found.write_entries(2, [large.row()], 2, step=crash_after(at))
        found.close()
        again = Generation(path, 1, SMALL)
        again.open_writer()
        measured, statistics = again.measure(), again.statistics()
        assert (measured.damage, measured.bad) == ([], set()), at
        assert (measured.entries, measured.total) == (statistics.entries, statistics.total), at
        if statistics.entries == 2:
            break
        again.close()
    else:
        raise AssertionError("it was never written whole")
    # Of what counts, a row that is gone is damage as ever.
    with again._writing() as txn:
        assert txn.delete(layout.KEY.pack(2, 1, 2, large.term, 1, 0))
    assert [text for text in again.measure().damage if "entry 2 of group" in text and "lacks 1 rows" in text]
    again.close()


def test_map_full_leaves_whole_entries_and_gives_the_rest_back(generation: Generation) -> None:
    entries = [made(1, index, [60_000]) for index in range(1, 200)]
    report = generation.write_entries(1, rows_of(entries), 1)
    assert report.full and report.unwritten
    first = report.unwritten[0].index
    assert report.entries == first - 1 == generation.statistics().entries
    check(generation, 1, entries[first - 2])
    with pytest.raises(PayloadMissing):
        generation.entry(1, 1, first)
    assert os.stat(os.path.join(generation.path, "data.mdb")).st_size <= SMALL.map_bytes


def test_a_too_low_estimate_still_aborts_cleanly(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB itself says the map is full, in the middle of a transaction."""
    monkeypatch.setattr("logyard.payloads.writing.Writing._room", lambda self, more: True)
    entries = [made(1, index, [60_000]) for index in range(1, 200)]
    report = generation.write_entries(1, rows_of(entries), 1)
    assert report.full
    assert next(row.index for row in report.unwritten) == report.entries + 1
    measured = generation.measure()
    assert measured.damage == [] and measured.entries == report.entries
    check(generation, 1, entries[0])


def test_an_entry_that_fits_nowhere_is_an_error(generation: Generation) -> None:
    with pytest.raises(GenerationFailed, match="does not fit"):
        generation.write_entries(1, [made(1, 1, [9 * MIB]).row()], 1)


def test_a_rotten_source_is_left_out_and_reported(generation: Generation) -> None:
    def flipped(entry: Made, at: int) -> SourceRow:
        payload = bytearray(entry.payload)
        payload[at] ^= 4
        return entry.row(read=lambda offset, size: bytes(payload[offset : offset + size]))

    def failing(offset: int, size: int) -> bytes:
        raise PayloadCorrupt("wal-9", "a payload", "x", "y")

    entries = [made(1, index, [100, 1_500_000]) for index in range(1, 7)]
    rows = rows_of(entries)
    rows[1] = flipped(entries[1], 50)
    rows[2] = flipped(entries[2], 1_400_000)
    rows[3] = entries[3].row(read=failing)
    rows[4] = entries[4].row(read=lambda offset, size: b"short")
    for at, index in enumerate((2, 3, 4, 5)):
        # Nothing behind it is written: whoever asks again after a crash begins where it stands.
        report = generation.write_entries(1, rows[index - 1 if at else 0 :], 1)
        assert [damaged for _, damaged, _ in report.damaged] == [index] and report.entries == (not at)
    assert generation.write_entries(1, rows[5:], 1).entries == 1
    check(generation, 1, entries[0])
    check(generation, 1, entries[5])
    for index in (2, 3, 4, 5):
        with pytest.raises(PayloadMissing):
            generation.entry(1, 1, index)
    assert generation.measure().damage == []


def crash_points(entries: list[Made], path: Path) -> int:
    """How many steps writing these entries has."""
    count = [0]

    def step(name: str, size: int) -> None:
        count[0] += 1

    found = Generation(str(path), 1, SMALL)
    found.create(0, Door().sync_directory)
    found.write_entries(4, rows_of(entries), 9, step=step)
    found.close()
    return count[0]


def test_a_crash_at_every_step_loses_nothing_committed_and_resumes(tmp_path: Path) -> None:
    entries = [made(uid, index, [300, 80_000]) for uid in (1, 2) for index in range(1, 16)]
    entries.append(made(3, 1, [2_300_000]))
    steps = crash_points(entries, tmp_path / "gen-0")
    assert steps >= 8
    for at in range(steps):
        path = str(tmp_path / f"crash-{at}")
        found = Generation(path, 1, SMALL)
        found.create(0, Door().sync_directory)
        with pytest.raises(Crash):
            found.write_entries(4, rows_of(entries), 9, step=crash_after(at))
        found.close()

        again = Generation(path, 1, SMALL)
        again.open_writer()
        state = again.job_state(9)
        done = state.last if state else (0, 0)
        rest = [entry for entry in entries if (entry.uid, entry.index) > done]
        measured = again.measure()
        assert measured.entries >= len(entries) - len(rest)
        for entry in entries[: len(entries) - len(rest)]:
            check(again, 4, entry)
        again.write_entries(4, rows_of(rest), 9)
        for entry in entries:
            check(again, 4, entry)
        assert again.measure().damage == [] and again.measure().total == again.statistics().total
        again.close()


def test_flipped_bytes_are_found_and_never_served(tmp_path: Path) -> None:
    """Every byte class of stored bodies and metadata: a read gives the right bytes or `PayloadCorrupt`."""
    path = tmp_path / "gen-1"
    found = Generation(str(path), 1, SMALL)
    found.create(0, Door().sync_directory)
    entry = made(1, 1, [900, 3000, 20_000])
    found.write_entries(1, [entry.row()], 1)
    found.close()
    data = (path / "data.mdb").read_bytes()
    targets = [data.find(entry.data), data.find(entry.units[0][0]) + 450, data.find(entry.units[1][0]) + 2999]
    large = data.find(entry.units[2][0][:4000])
    targets += [large, large + 19_999, large - 1, large - 20, data.find(entry.data) - 1, data.find(entry.data) - 60]
    assert min(targets) > 0
    caught = 0
    for at in targets:
        for bit in (0, 3, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            (path / "data.mdb").write_bytes(damaged)
            again = Generation(str(path), 1, SMALL)
            again.open_reader()
            before = caught
            for number, (body, _) in enumerate(entry.units):
                try:
                    assert again.read_unit(1, 1, 1, number) == body
                except PayloadCorrupt as error:
                    assert (error.uid, error.index) == (1, 1)
                    caught += 1
            assert caught > before and again.measure().damage
            again.close()


def test_any_flipped_page_byte_is_survived_in_a_child(tmp_path: Path) -> None:
    """Tree and meta pages: LMDB may fail, or even kill the process, but wrong bytes are never served."""
    path = tmp_path / "gen-1"
    found = Generation(str(path), 1, SMALL)
    found.create(0, Door().sync_directory)
    entry = made(1, 1, [900, 20_000])
    found.write_entries(1, [entry.row()], 1)
    found.close()
    script = """
import os, random, sys
from tests.payloads.support import SMALL, made
from logyard.protocol.errors import PayloadError
from logyard.payloads.generation import Generation
path, entry, wrong, died = sys.argv[1], made(1, 1, [900, 20_000]), 0, 0
data = open(path + "/data.mdb", "rb").read()
rng = random.Random(5)
for _ in range(150):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        wrong += os.waitstatus_to_exitcode(status) == 3
        died += os.waitstatus_to_exitcode(status) < 0
        rng.random(); rng.random()
        continue
    damaged = bytearray(data)
    damaged[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)
    open(path + "/data.mdb", "wb").write(damaged)
    try:
        again = Generation(path, 1, SMALL)
        again.open_reader()
        for number, (body, _) in enumerate(entry.units):
            if again.read_unit(1, 1, 1, number) != body:
                os._exit(3)
        if again.entry(1, 1, 1).data != entry.data:
            os._exit(3)
    except PayloadError:
        os._exit(1)
    os._exit(0)
print("wrong", wrong)
"""
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "wrong 0", run.stderr


def test_a_cut_file_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "gen-1"
    found = Generation(str(path), 1, SMALL)
    found.create(0, Door().sync_directory)
    found.write_entries(1, [made(1, 1, [200_000]).row()], 1)
    found.close()
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", size - 4096)
    with pytest.raises(GenerationFailed, match="it was cut"):
        Generation(str(path), 1, SMALL).open_reader()
    os.truncate(path / "data.mdb", 100)
    with pytest.raises(GenerationUnfinished):
        Generation(str(path), 1, SMALL).open_reader()


def shorten(path: Path) -> None:
    """Take pages at the end of a generation's file and free them again, until LMDB leaves them unwritten."""
    with lmdb.open(str(path), map_size=SMALL.map_bytes) as env:
        for size in range(1, 200):
            with env.begin(write=True) as txn:
                for number in range(size):
                    txn.put(b"\xffgone%d" % number, bytes(9000))
                for number in range(size):
                    txn.delete(b"\xffgone%d" % number)
            if (path / "data.mdb").stat().st_size < (env.info()["last_pgno"] + 1) * 4096:
                return
    raise AssertionError("the file is as long as it says")


def test_a_file_that_lacks_free_pages_only_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "gen-1"
    found = Generation(str(path), 1, SMALL)
    found.create(0, Door().sync_directory)
    entries = [made(1, index, [200_000]) for index in range(1, 6)]
    found.write_entries(1, rows_of(entries), 1)
    found.close()
    shorten(path)
    for _ in range(2):
        again = Generation(str(path), 1, SMALL)
        again.open_reader()
        assert again.measure().damage == []
        for entry in entries:
            check(again, 1, entry)
        again.close()
    again = Generation(str(path), 1, SMALL)
    again.open_writer()
    more = made(1, 6, [200_000])
    again.write_entries(2, [more.row()], 2)
    check(again, 2, more)
    again.close()
    shorten(path)
    # Without the last page that is written, whatever that is, and without most of them.
    for size in ((path / "data.mdb").stat().st_size - 4096, 40_960):
        os.truncate(path / "data.mdb", size)
        with pytest.raises(GenerationFailed, match="it was cut"):
            Generation(str(path), 1, SMALL).open_reader()


def test_a_newer_format_and_a_foreign_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Generation(str(tmp_path / "gen-1"), 1, SMALL)
    found.create(0, Door().sync_directory)
    found.close()
    with pytest.raises(GenerationFailed, match="generation 1"):
        Generation(str(tmp_path / "gen-1"), 2, SMALL).open_reader()
    monkeypatch.setattr("logyard.payloads.generation.layout.NEWEST", 1)
    with pytest.raises(FormatNewer):
        Generation(str(tmp_path / "gen-1"), 1, SMALL).open_reader()


def test_creation_syncs_both_directories(tmp_path: Path) -> None:
    door = Door()
    found = Generation(str(tmp_path / "gen-1"), 1, SMALL)
    found.create(0, door.sync_directory)
    assert door.synced == [found.path + HALF_MADE, str(tmp_path)]
    assert oct(os.stat(found.path).st_mode)[-3:] == "700"
    assert oct(os.stat(os.path.join(found.path, "data.mdb")).st_mode)[-3:] == "600"
    found.close()


def test_a_map_that_is_full_between_two_entries_gives_back_the_one_in_hand(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB says so when what came before is committed: nothing of that transaction is there, and the entry that waited
    for it is to be written elsewhere, too."""
    entries = [made(1, index, [200_000]) for index in range(1, 30)]
    commit, commits = Writing._commit, 0

    def full(writing: Writing) -> None:
        nonlocal commits
        commits += 1
        if commits == 3:
            raise lmdb.MapFullError("as LMDB says it")
        commit(writing)

    monkeypatch.setattr(Writing, "_commit", full)
    read: list[int] = []

    def rows() -> Iterator[SourceRow]:
        for row in rows_of(entries):
            read.append(row.index)
            yield row

    report = generation.write_entries(1, rows(), 1)
    monkeypatch.undo()
    indexes = [row.index for row in report.unwritten]
    assert report.full and len(indexes) > 1
    # Everything that the source was asked for is either durable or given back.
    assert indexes == list(range(report.entries + 1, read[-1] + 1))
    assert generation.statistics().entries == report.entries
    again = generation.write_entries(1, rows_of(entries[report.entries : indexes[-1]]), 1)
    assert again.entries == len(indexes)
    check(generation, 1, entries[indexes[-1] - 1])


def test_a_map_that_is_full_when_only_damage_is_taken_back_leaves_nothing_unwritten(generation: Generation) -> None:
    """There was no entry to give back, and none to blame: the job ended with an IndexError, and its file stayed."""
    rotten = made(1, 1, [1_500_000]).row(read=lambda offset, size: bytes(size))

    def full(step: str, size: int) -> None:
        if step == "before commit":
            raise lmdb.MapFullError("as LMDB says it")

    report = generation.write_entries(1, [rotten], 1, step=full)
    assert [index for _, index, _ in report.damaged] == [1]
    assert (report.entries, report.full, report.unwritten) == (0, False, [])
    entry = made(1, 2, [200_000])
    assert generation.write_entries(1, rows_of([entry]), 1).entries == 1
    check(generation, 1, entry)


def test_a_generation_that_is_closed_gives_its_slot_of_the_journal_back(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "in-use"))
    journal.open()
    free = len(journal._free)
    found = Generation(str(tmp_path / "gen-1"), 1, SMALL, journal)
    found.create(0, Door().sync_directory)
    assert len(journal._free) == free - 1
    found.close()
    assert len(journal._free) == free
    journal.close()


@pytest.mark.parametrize(("error", "code"), [(lmdb.Error, errno.EMFILE), (lmdb.MemoryError, 0)])
def test_a_want_of_descriptors_or_memory_is_no_damage(
    generation: Generation, monkeypatch: pytest.MonkeyPatch, error: type[lmdb.Error], code: int
) -> None:
    class Refused(error):  # type: ignore[misc, valid-type]
        pass

    Refused.code = code

    class Short:
        def begin(self, **_: object) -> None:
            raise Refused("short")

        def close(self) -> None:
            pass

    with monkeypatch.context() as patch, pytest.raises(StoreShort):
        patch.setattr(generation, "_env", Short())
        generation.columns(0)


def test_an_entry_row_of_another_term_or_length_is_damage_though_its_hash_is_right() -> None:
    key = layout.KEY.pack(1, 7, 5, 3, 0, 0)
    planned = layout.Plan([], 0, 0)
    good = layout.entry_value(key, 3, b"data", planned, [])
    assert layout.parse_entry("p", key, memoryview(good)).data == b"data"
    body = good[layout.HASH_BYTES :] + b"x"
    for bad in (layout.entry_value(key, 4, b"data", planned, []), layout.row_hash(key, body) + body):
        with pytest.raises(PayloadCorrupt, match="term 3, "):
            layout.parse_entry("p", key, memoryview(bad))
