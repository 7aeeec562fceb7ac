"""The snapshots of system groups have three copies, two rows and a file: whatever becomes of one, two or all of them,
the newest that can be used is what all say afterwards, or none is, and nothing is guessed."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.manifest_files import HEAD, MAGIC, ManifestFiles, uid_of
from logyard.engine.log.meta import HEADER_BYTES, MetaStore
from logyard.engine.log.meta_copies import holds
from logyard.engine.log.meta_rows import GroupRow, SnapshotRow, StateRow, chunk_key, group_key, snapshot_key
from logyard.engine.recovery.manifests import NOBODYS, REWRITTEN, TAKEN, USELESS, mend
from logyard.engine.snapshot.format import Encoded, Snapshot, encode, split
from logyard.protocol.errors import Corrupt, NoSpace, WalFailed, WrongIdentity

UID, KEY = 7, snapshot_key(7)
OLD, NEW = 10, 20
STATES = ("good", "damaged", "torn", "missing", "older")


def snapshot(index: int, size: int = 50) -> Snapshot:
    return Snapshot(UID, index, 2, b"members", 1, 0, 1_700_000_000_000, {"part": bytes([index]) * size}, b"live")


def row(index: int) -> SnapshotRow:
    return SnapshotRow(UID, index, 2, encode(snapshot(index)))


def state(base: int, index: int = NEW) -> StateRow:
    return StateRow(UID, 2, 1, index, index, 2, extra={"log": [base, 2 if base else 0]})


def opened(path: Path, disk: Disk | None = None) -> MetaStore:
    store = MetaStore(disk or Disk(), str(path), 64 << 20)
    store.open("test", 1)
    return store


def environment(path: Path, name: str) -> lmdb.Environment:
    return lmdb.open(str(path / name), map_size=64 << 20, sync=False)


def raw_of(path: Path, name: str) -> bytes | None:
    with environment(path, name) as found, found.begin() as transaction:
        value = transaction.get(KEY)
        return None if value is None else bytes(value)


def poke(path: Path, name: str, raw: bytes | None) -> None:
    with environment(path, name) as found, found.begin(write=True) as transaction:
        if raw is None:
            transaction.delete(KEY)
        else:
            transaction.put(KEY, raw)


def spoiled(how: str, good: bytes, older: bytes) -> bytes | None:
    """What is left of a copy."""
    flipped = good[:-20] + bytes([good[-20] ^ 1]) + good[-19:]
    return {"good": good, "damaged": flipped, "torn": good[: len(good) // 2], "missing": None, "older": older}[how]


class Yard:
    """A store with the newer snapshot of one system group in three copies; `old` and `new` are what its file had."""

    def __init__(self, path: Path, base: int = 0) -> None:
        self.path = path
        store = opened(path)
        store.commit([GroupRow(UID, "_system", "log").put(), state(base, OLD).put(), row(OLD).put()], [UID])
        self.file = Path(store.manifests.path(UID))
        self.old = self.file.read_bytes()
        store.commit([state(base).put(), row(NEW).put()], [UID])
        self.new = self.file.read_bytes()
        store.close()

    def spoil(self, a: str, b: str, file: str) -> None:
        for name, how in (("a", a), ("b", b)):
            poke(self.path, name, spoiled(how, self.new[HEAD.size :], self.old[HEAD.size :]))
        left = spoiled(file, self.new, self.old)
        self.file.unlink(missing_ok=True)
        if left is not None:
            self.file.write_bytes(left)

    def mended(self) -> tuple[list[str], bool]:
        """What a start says of it, and whether its row is lost."""
        store = opened(self.path)
        try:
            found = [one.kind for one in mend(store)]
            return found, KEY in store.lost
        finally:
            store.close()

    def says(self) -> tuple[set[int], int]:
        """The indexes in the rows, and in the file; 0: there is none, or a bad one."""
        raws = [raw_of(self.path, name) or b"" for name in ("a", "b")]
        rows = {SnapshotRow.unpack(KEY, raw[HEADER_BYTES:]).index if holds(KEY, raw) else 0 for raw in raws}
        try:
            return rows, ManifestFiles(Disk(), str(self.file.parent)).load(UID).index
        except Corrupt:
            return rows, 0


def outcomes(base: int) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Every state of the three copies, and the index that all of them should say then, 0: none can be used."""
    worth = {"good": NEW, "older": OLD}
    for a, b, file in itertools.product(STATES, repeat=3):
        rows, kept = max(worth.get(a, 0), worth.get(b, 0)), worth.get(file, 0)
        yield (a, b, file), max(rows, kept if kept >= base else 0)


def test_files_of_other_names_are_nobodys() -> None:
    name = f"{UID:016x}.manifest"
    assert uid_of(name) == UID
    for other in (
        name[1:],
        f"0{name}",
        name.upper(),
        name[:16],
        f"{name}.new",
        f"-{name[1:]}",
        f"{'g' * 16}.manifest",
        "",
    ):
        assert uid_of(other) == 0, other


@pytest.mark.parametrize("base", [0, OLD, OLD + 5], ids=["whole log", "log above the older", "log above both"])
def test_each_subset_of_bad_copies_is_mended_by_the_newest_that_can_be_used(tmp_path: Path, base: int) -> None:
    yard = Yard(tmp_path, base)
    for states, index in outcomes(base):
        if base and "older" not in states:
            continue
        yard.spoil(*states)
        said, lost = yard.mended()
        rows, kept = yard.says()
        if index:
            # A file that is missing beside good rows is written when the group is built.
            assert rows == {index} and kept == (0 if states[2] == "missing" else index) and not lost, (states, said)
            assert yard.mended() == ([], False), (states, "a second start finds nothing to do")
        else:
            bad = {"damaged", "torn"} & set(states[:2])
            assert rows == {0} and lost == bool(bad) and TAKEN not in said, (states, said)
            assert (states[2] == "missing") == (USELESS not in said), (states, said)


def big(store: MetaStore, base: int = 0) -> Encoded:
    """A store whose newer snapshot has its part in a chunk, and the rows are lost."""
    found = split(snapshot(NEW, 5000), 1000)
    (name,) = found.names
    store.commit([GroupRow(UID, "_system", "log").put(), state(base).put()])
    store.commit(
        [SnapshotRow(UID, NEW, 2, found.manifest).put(), (chunk_key(UID, name), bytes(found.chunks[name]))], [UID]
    )
    return found


@pytest.mark.parametrize("has_chunk", [True, False])
def test_a_file_counts_only_with_all_of_its_chunks(tmp_path: Path, has_chunk: bool) -> None:
    store = opened(tmp_path)
    found = big(store)
    if not has_chunk:
        store.commit([(chunk_key(UID, found.names[0]), None)])
    raw = Path(store.manifests.path(UID)).read_bytes()[HEAD.size :]
    store.close()
    for name in ("a", "b"):
        poke(tmp_path, name, raw[:-1] + b"?")
    store = opened(tmp_path)
    (one,) = mend(store)
    assert (one.kind, KEY in store.lost) == ((TAKEN, False) if has_chunk else (USELESS, True)), one
    store.close()


@pytest.mark.parametrize("what", ["blank", "no checkpoint"])
def test_a_file_does_not_bring_back_what_was_given_up(tmp_path: Path, what: str) -> None:
    yard = Yard(tmp_path)
    yard.spoil("missing", "missing", "good")
    store = opened(tmp_path)
    put = state(0, 0).put()
    store.commit([put if what == "blank" else (put[0], None)])
    assert [one.kind for one in mend(store)] == [USELESS] and store.get(KEY) is None
    store.close()


def test_the_file_goes_before_the_row_and_that_of_nobody_at_a_start(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    disk = FaultyDisk()
    store = opened(tmp_path, disk)
    # Where it can't be removed, the row stays as well.
    disk.fail("unlink", 1, errno.EMFILE)
    with pytest.raises(NoSpace):
        store.commit([(KEY, None)])
    assert store.get(KEY) is not None and yard.file.exists()
    store.commit([(KEY, None)])
    assert store.get(KEY) is None and not yard.file.exists() and not store.manifests.uids
    yard.file.write_bytes(yard.new)
    store.commit([(group_key(UID), None)])
    store.close()
    assert yard.mended() == ([NOBODYS], False) and not yard.file.exists()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.file.write_bytes(HEAD.pack(MAGIC, 2, 0) + yard.new[HEAD.size :])
    with pytest.raises(WrongIdentity, match="format 2"):
        yard.mended()


def test_without_room_for_the_file_the_rows_do_and_it_comes_with_the_next_commit(tmp_path: Path) -> None:
    yard, disk = Yard(tmp_path), FaultyDisk()
    store = opened(tmp_path, disk)
    disk.fail("create", 1, errno.ENOSPC)
    store.commit([row(NEW + 1).put()], [UID])
    assert yard.file.read_bytes() == yard.new
    store.commit([])
    assert store.manifests.load(UID).index == NEW + 1
    disk.fail("sync_file", 1, errno.EIO)
    with pytest.raises(WalFailed):
        store.commit([row(NEW + 2).put()], [UID])
    store.close()
    # Cut off before its file was there: the rows are newer.
    assert yard.mended() in (([REWRITTEN], False), ([], False)) and yard.says() == ({NEW + 2}, NEW + 2)


def test_the_scrub_mends_the_file_and_leaves_other_groups_without_one(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    store = opened(tmp_path)
    store.commit([SnapshotRow(8, 5, 1, b"small").put()])
    assert store.verify(b"", 100).mended == []
    yard.file.write_bytes(yard.old)
    assert store.verify(b"", 100).mended == [(KEY, "manifests")] and store.manifests.load(UID).index == NEW
    yard.file.write_bytes(yard.new[:40])
    assert store.verify(b"", 100).mended == [(KEY, "manifests")] and store.manifests.load(UID).index == NEW
    assert store.manifests.uids == {UID}
    store.close()


def test_an_unfinished_file_is_removed_and_other_names_are_left_alone(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.file.with_name(yard.file.name + ".tmp").write_bytes(b"half")
    yard.file.with_name("notes").write_bytes(b"mine")
    assert yard.mended() == ([], False)
    assert sorted(one.name for one in yard.file.parent.iterdir()) == sorted([yard.file.name, "notes"])
    assert yard.file.read_bytes() == yard.new


def test_files_are_gone_for_good_before_the_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut that brought one back would have it speak for a replica that went."""
    files = ManifestFiles(Disk(), str(tmp_path))
    files.store([(UID, bytes(HEADER_BYTES))])
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        Disk, "sync_directory", lambda disk, path: synced.append((path, os.path.exists(files.path(UID))))
    )
    files.remove([UID])
    assert synced == [(str(tmp_path), False)] and not files.uids
