"""The meta store: rows, identity, and two copies that make each other good."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import lmdb
import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log import meta
from logyard.engine.log.meta import FileRow, GroupRow, MetaStore, SnapshotRow, StateRow
from logyard.engine.log.meta_rows import (
    SegmentRun,
    file_key,
    file_rows,
    group_key,
    group_rows,
    snapshot_key,
    snapshot_rows,
    state_rows,
)
from logyard.engine.types import Buffer
from logyard.protocol.errors import Corrupt, NoSpace, WrongIdentity


def opened(path: Path, cluster: str = "test", node: int = 1, map_bytes: int = 64 << 20) -> MetaStore:
    store = MetaStore(Disk(), str(path), map_bytes)
    store.open(cluster, node)
    return store


def poke(path: Path, key: bytes, value: bytes | None) -> None:
    """Change one copy of a row behind the store's back."""
    environment = lmdb.open(str(path), map_size=64 << 20)
    with environment.begin(write=True) as transaction:
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)
    environment.close()


def raw(path: Path) -> dict[bytes, bytes]:
    environment = lmdb.open(str(path), map_size=64 << 20)
    with environment.begin() as transaction:
        found = dict(transaction.cursor())
    environment.close()
    return found


def flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def test_rows_of_every_kind_come_back(tmp_path: Path) -> None:
    store = opened(tmp_path / "meta")
    group = GroupRow(2**64 - 1, "orders", "kv", {"cells": 3}, b"\x01\x02", 1_700_000_000_000)
    state = StateRow(5, 3, 2, 90, 80, 2, 70, [SegmentRun(81, 90, 4)], [(81, 3)], [[81, 90, 7, 1]], {"bytes": 12})
    snapshot = SnapshotRow(5, 80, 2, b"small")
    files = [FileRow("segment", 4, {"bytes": 9}), FileRow("wal", 2, {}), FileRow("segment", 300)]
    store.commit([group.put(), state.put(), snapshot.put(), *(row.put() for row in files)])
    store.close()
    store = opened(tmp_path / "meta")
    assert list(group_rows(store)) == [group]
    assert list(state_rows(store)) == [state]
    assert list(snapshot_rows(store)) == [snapshot]
    assert list(file_rows(store, "segment")) == [files[0], files[2]] and len(list(file_rows(store))) == 3
    store.commit([(snapshot_key(5), None), (file_key("wal", 2), None)])
    assert not list(snapshot_rows(store)) and not list(file_rows(store, "wal"))
    assert store.repaired == 0 and not store.lost
    store.close()
    store.close()


def test_ten_thousand_groups_in_one_commit(tmp_path: Path) -> None:
    store = opened(tmp_path / "meta")
    began = time.process_time()
    store.commit([GroupRow(uid, f"group-{uid}", "kv").put() for uid in range(1, 10_001)])
    assert sum(1 for _ in group_rows(store)) == 10_000
    assert time.process_time() - began < 2
    store.close()


def test_another_nodes_directory_is_refused_untouched(tmp_path: Path) -> None:
    store = opened(tmp_path / "meta", "one", 1)
    store.close()
    before = (tmp_path / "meta" / "a" / "data.mdb").read_bytes()
    for cluster, node in (("two", 1), ("one", 2)):
        with pytest.raises(WrongIdentity, match="belongs to node 1"):
            opened(tmp_path / "meta", cluster, node)
    assert (tmp_path / "meta" / "a" / "data.mdb").read_bytes() == before
    store = opened(tmp_path / "meta", "", 0)
    assert store.identity is not None and (store.identity.cluster, store.identity.node) == ("one", 1)
    store.close()


def test_a_newer_format_is_refused_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("logyard.engine.log.meta.FIRST_FORMAT", 3)
        opened(tmp_path / "meta").close()
    before = {name: (tmp_path / "meta" / name / "data.mdb").read_bytes() for name in ("a", "b")}
    with pytest.raises(WrongIdentity, match="format 3"):
        opened(tmp_path / "meta")
    assert before == {name: (tmp_path / "meta" / name / "data.mdb").read_bytes() for name in ("a", "b")}


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_bad_row_is_taken_from_the_twin(tmp_path: Path, side: str) -> None:
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([GroupRow(uid, f"g{uid}", "kv").put() for uid in range(1, 6)])
    store.close()
    good = raw(path / side)[group_key(3)]
    poke(path / side, group_key(3), flipped(good))
    store = opened(path)
    assert store.repaired == 1 and [row.name for row in group_rows(store)] == [f"g{uid}" for uid in range(1, 6)]
    store.close()
    assert raw(path / side)[group_key(3)] == good


def test_a_row_bad_in_both_is_lost_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([GroupRow(uid, f"g{uid}", "kv").put() for uid in (1, 2)])
    store.close()
    for side in ("a", "b"):
        poke(path / side, group_key(1), flipped(raw(path / side)[group_key(1)]))
    store = opened(path)
    assert store.lost == [group_key(1)] and [row.uid for row in group_rows(store)] == [2]
    with pytest.raises(Corrupt):
        store.get(group_key(1))
    store.close()


def test_rot_while_open_is_read_from_the_twin(tmp_path: Path) -> None:
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([GroupRow(1, "g1", "kv").put()])
    environment = store._environments[0]
    with environment.begin(write=True) as transaction:
        transaction.put(group_key(1), flipped(transaction.get(group_key(1)) or b""))
    assert [row.name for row in group_rows(store)] == ["g1"] and store.get(group_key(1)) is not None
    store.close()


def test_a_crash_between_the_two_commits(tmp_path: Path) -> None:
    """The second copy is older as a whole: changed, new and deleted rows all follow the first."""
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([(b"keep", b"1"), (b"change", b"old"), (b"delete", b"x")])
    store.close()
    shutil.copytree(path / "b", tmp_path / "older")
    store = opened(path)
    store.commit([(b"change", b"new"), (b"delete", None), (b"add", b"y")])
    store.close()
    shutil.rmtree(path / "b")
    shutil.copytree(tmp_path / "older", path / "b")
    store = opened(path)
    assert dict(store.scan(b"")).keys() >= {b"keep", b"change", b"add"}
    assert store.get(b"change") == b"new" and store.get(b"delete") is None and store.get(b"add") == b"y"
    store.close()
    assert raw(path / "a") == raw(path / "b")


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_ruined_environment_is_set_aside_and_refilled(tmp_path: Path, side: str) -> None:
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([GroupRow(1, "g1", "kv").put()])
    store.close()
    (path / side / "data.mdb").write_bytes(b"\xff" * 8192)
    store = opened(path)
    assert [row.name for row in group_rows(store)] == ["g1"]
    store.close()
    assert (path / f"{side}.bad-0").exists()
    assert raw(path / "a") == raw(path / "b")


def test_an_environment_that_killed_two_scans_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([(b"k", b"v")])
    store.close()
    for death in (1, 2):
        (path / "scanning-b").write_text(f"{death}")
        store = opened(path)
        assert store.get(b"k") == b"v"
        store.close()
        assert (path / "b.bad-0").exists() == (death == 2)
        assert not (path / "scanning-b").exists()


def test_a_scan_that_kills_is_not_held_against_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "meta"
    store = opened(path)
    store.commit([(b"k", b"v")])
    store.close()
    scan = MetaStore._scan

    def dies(self: MetaStore, which: str) -> lmdb.Environment:
        if which.endswith("a") and not (path / "a.bad-0").exists():
            raise KeyboardInterrupt
        return scan(self, which)

    monkeypatch.setattr(MetaStore, "_scan", dies)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            opened(path)
    store = opened(path)
    assert store.get(b"k") == b"v" and store.repaired
    store.close()
    assert (path / "a.bad-0").exists() and not (path / "b.bad-0").exists()


def test_many_rows_are_scanned_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "SCAN_ROWS", 4)
    store = opened(tmp_path / "meta")
    for count in (3, 4, 5, 8, 9):
        store.commit([(b"k%02d" % n, b"v") for n in range(count)] + [(b"l", b"other")])
        assert [key for key, _ in store.scan(b"k")] == [b"k%02d" % n for n in range(count)]
    store.close()


def test_a_full_map_refuses_a_commit_as_a_whole(tmp_path: Path) -> None:
    store = opened(tmp_path / "meta", map_bytes=1 << 20)
    store.commit([(b"k", b"v")])
    with pytest.raises(NoSpace):
        store.commit([(b"k", b"w"), *((b"big%d" % n, bytes(4000)) for n in range(400))])
    assert store.get(b"k") == b"v" and not dict(store.scan(b"big"))
    store.commit([(b"k", b"x")])
    store.close()
    store = opened(tmp_path / "meta", map_bytes=1 << 20)
    assert store.get(b"k") == b"x" and store.repaired == 0
    store.close()


Changes = list[tuple[bytes, bytes | None]]


def refusing(monkeypatch: pytest.MonkeyPatch, refuse: list[bool]) -> None:
    """Have the next commits of single environments find no room, as `refuse` says of each."""
    real = MetaStore._apply

    def apply(self: MetaStore, environment: lmdb.Environment, changes: Changes) -> None:
        if refuse and refuse.pop(0):
            raise NoSpace("full")
        real(self, environment, changes)

    monkeypatch.setattr(MetaStore, "_apply", apply)


def test_what_only_the_first_copy_took_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on the full disk would have no room to give it to the second."""
    store = opened(tmp_path / "meta")
    store.commit([(b"delete", b"x"), (b"change", b"x")])
    store.close()
    before = raw(tmp_path / "meta" / "a")
    store = opened(tmp_path / "meta")
    refusing(monkeypatch, [False, True])
    with pytest.raises(NoSpace):
        store.commit([(b"delete", None), (b"add", b"y"), (b"change", b"y")])
    assert store.get(b"delete") == store.get(b"change") == b"x" and store.get(b"add") is None
    store.close()
    assert raw(tmp_path / "meta" / "a") == raw(tmp_path / "meta" / "b") == before


def test_what_only_the_first_copy_took_and_keeps_is_stored_and_comes_before_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "meta")
    store.commit([(b"delete", b"x")])
    refusing(monkeypatch, [False, True, True, True, False])
    store.commit([(b"delete", None), (b"add", b"y")])
    assert store.get(b"delete") is None and store.get(b"add") == b"y"
    with pytest.raises(NoSpace):
        store.commit([(b"never", b"z")])
    assert store.get(b"never") is None, "the first is never ahead by more than one commit"
    store.commit([(b"other", b"z")])
    store.close()
    assert raw(tmp_path / "meta" / "a") == raw(tmp_path / "meta" / "b")
    assert b"delete" not in raw(tmp_path / "meta" / "b") and b"add" in raw(tmp_path / "meta" / "b")


def test_a_start_on_a_full_disk_notes_no_scan(tmp_path: Path) -> None:
    class Full(Disk):
        def write_file(self, path: str, buffers: Iterable[Buffer]) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    opened(tmp_path / "meta").close()
    store = MetaStore(Full(), str(tmp_path / "meta"), 64 << 20)
    store.open("test", 1)
    store.close()


def test_the_names_of_new_environments_are_durable(tmp_path: Path) -> None:
    """A sync of a file does not promise its name: whoever lost it would lose every group with it."""

    class Watching(Disk):
        held: ClassVar[dict[str, list[str]]] = {}

        def sync_directory(self, path: str) -> None:
            self.held[os.path.basename(path)] = os.listdir(path)
            super().sync_directory(path)

    disk = Watching()
    disk.held.clear()
    store = MetaStore(disk, str(tmp_path / "meta"), 64 << 20)
    store.open("test", 1)
    assert "data.mdb" in disk.held["a"] and "data.mdb" in disk.held["b"]
    store.close()


def test_the_names_of_environments_are_durable_at_each_start(tmp_path: Path) -> None:
    # The process before may have died between making one and its name's sync.
    for _ in range(2):
        disk = FaultyDisk()
        store = MetaStore(disk, str(tmp_path / "meta"), 64 << 20)
        store.open("test", 1)
        store.close()
        synced = [call.target for call in disk.calls if call.name == "sync_directory"]
        assert {str(tmp_path / "meta" / name) for name in ("a", "b")} <= set(synced)


def test_a_damaged_page_of_a_running_store_is_read_from_its_twin(tmp_path: Path) -> None:
    store = opened(tmp_path / "meta")
    rows = [GroupRow(number, f"g{number}", "log") for number in range(1, 400)]
    store.commit([row.put() for row in rows])
    data = tmp_path / "meta" / "a" / "data.mdb"
    image = data.read_bytes()
    with data.open("r+b") as file:
        for page in range(2, len(image) // 4096):
            if image[page * 4096 + 10] & 3:
                file.seek(page * 4096)
                file.write(bytes(4096))
    assert store.get(group_key(7)) == rows[6].put()[1] and store.get(group_key(1000)) is None
    assert store.keys(GroupRow.PREFIX) == [row.put()[0] for row in rows]
    assert list(group_rows(store)) == rows
    with pytest.raises(Corrupt, match="environment"):
        store.verify(b"", 100)
    store.close()
    store = opened(tmp_path / "meta")
    assert list(group_rows(store)) == rows and not store.lost
    store.close()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_copy_that_was_cut_is_set_aside_and_touched_by_nobody(tmp_path: Path, name: str) -> None:
    """Reading behind the end of a mapped file kills the process."""
    store = opened(tmp_path / "meta")
    rows = [GroupRow(number, f"g{number}", "log") for number in range(1, 2000)]
    store.commit([row.put() for row in rows])
    store.close()
    data = tmp_path / "meta" / name / "data.mdb"
    # What is left are the two pages that say how long it is.
    os.truncate(data, 2 * 4096)
    store = opened(tmp_path / "meta")
    assert list(group_rows(store)) == rows and not store.lost and store.repaired
    assert (tmp_path / "meta" / f"{name}.bad-0").exists()
    store.close()


def test_without_either_copy_nothing_begins_anew(tmp_path: Path) -> None:
    store = opened(tmp_path / "meta")
    row = GroupRow(7, "orders", "log")
    store.commit([row.put()])
    store.close()
    copies = [tmp_path / "meta" / name / "data.mdb" for name in "ab"]
    good = [path.read_bytes() for path in copies]
    for path in copies:
        path.write_bytes(path.read_bytes()[: 2 * 4096])
    for _ in range(3):
        store = MetaStore(Disk(), str(tmp_path / "meta"), 64 << 20)
        with pytest.raises(Corrupt, match="has to be replaced"):
            store.open("test", 1, began=True)
        store.close()
    # With one of them back all is there.
    copies[1].write_bytes(good[1])
    store = opened(tmp_path / "meta")
    assert list(group_rows(store)) == [row]
    store.close()


def test_a_start_leaves_nothing_in_the_directory_undurable(tmp_path: Path) -> None:
    """The journal of a copy that was opened well is gone for good: found again after two power cuts, it would set a
    sound copy aside."""
    disk = FaultyDisk()
    path = str(tmp_path / "meta")
    for _ in range(2):
        store = MetaStore(disk, path, 64 << 20)
        disk.calls.clear()
        store.open("test", 1)
        store.close()
        changed = [
            number
            for number, call in enumerate(disk.calls)
            if call.name in ("unlink", "create", "rename", "make_directory")
            and os.path.dirname(str(call.target)) == path
        ]
        synced = [number for number, call in enumerate(disk.calls) if call[:2] == ("sync_directory", path)]
        assert changed and max(synced) > max(changed), disk.calls
