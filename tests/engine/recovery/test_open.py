"""A start alone: a real directory, and doubles of what holds payloads and of who runs the groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.entry import COMMANDS, build_plain
from logyard.engine.identity import Origin
from logyard.engine.log import checkpoint_rows as rows
from logyard.engine.log import meta_rows
from logyard.engine.log.meta import MetaStore
from logyard.engine.log.wal import Wal, WalConfig, WalItem
from logyard.engine.recovery.incarnation import MARK, Incarnation, readmit, revalidate
from logyard.engine.recovery.open import DataDirectory, Files, Groups, Start
from logyard.engine.types import Spec
from logyard.protocol.errors import BadRequest, Corrupt, DirectoryInUse, Outdated, WalFailed, WrongIdentity

MIB = 1 << 20
CONFIG = SystemConfig(wal_file_bytes=1 * MIB, wal_batch_bytes=1 * MIB // 2)
SPEC = Spec(7, "log", "log", {}, (1, 2, 3), 0)


class Member(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


class Bench:
    """A start on a directory. `told` says what it asked of others, in order."""

    def __init__(self, path: Path, node: int = 1) -> None:
        self.told: list[Any] = []
        self.path = path
        self.disk = Disk()
        self.directory = DataDirectory(self.disk, path)
        self.meta = MetaStore(self.disk, str(path / "meta"))
        self.incarnation = Incarnation(node, "a cluster", self.disk, path, self.meta)
        self.wal = Wal(self.disk, str(path / "wal"), WalConfig.of(CONFIG))
        self.members: dict[int, Any] = {}
        self.names: dict[str, int] = {}
        self.deleted: set[int] = set()
        self.departed: dict[int, meta_rows.Departed] = {}
        self.fault: Exception | None = None
        self.fresh: list[Spec] = []
        store: Any = SimpleNamespace(
            open=self.says("store"), close=self.says("store closed"), restore=lambda found: list(found),
            homes=lambda uid: (),
        )  # fmt: skip
        segments: Any = SimpleNamespace(
            spoil=lambda files: None, recovered=lambda users: None, shed=self.says("shed"),
            close=self.says("segments closed"),
        )  # fmt: skip
        rings: Any = SimpleNamespace(scan=lambda: None, sweep=lambda is_known: None, close=lambda: None)
        homes: Any = SimpleNamespace(look_for_lost=self.says("lost?"))
        space: Any = SimpleNamespace(open=self.says("space"))
        flush: Any = SimpleNamespace(hard_state_written=self.says("hard"))
        location: Any = SimpleNamespace()
        janitor: Any = SimpleNamespace(adopt=lambda sealed: None)
        files = Files(space, self.wal, self.meta, store, segments, rings, location, homes, flush, janitor)
        self.repair: Any = SimpleNamespace(
            known={}, blank=set(), load=lambda epoch: self.told.append(("epoch", epoch)), judge=lambda *_: {},
            unfit=lambda spec, row, error: error, build=self.mended, is_left=lambda member: False,
        )  # fmt: skip
        groups = Groups(
            self.members, self.names, self.deleted, self.departed, self.build, self.says("quiesced"),
            lambda specs: self.fresh.extend(specs), self.says("payloads lost"), self.says("tidy"),
        )  # fmt: skip
        self.start = Start(self.directory, self.incarnation, files, groups, cast(Any, self.repair))

    def says(self, what: str) -> Any:
        return lambda *_: self.told.append(what)

    def build(self, spec: Spec, state: Any, snapshot_row: Any, recovered: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        log = SimpleNamespace(snapshot_index=0)
        raft = SimpleNamespace(log=log, entries=recovered.entries, hard_state=recovered.hard_state)
        return Member(spec=spec, raft=raft, segments=[], snapshot_index=0, state="running", damaged=False)

    def mended(self, spec: Spec, known: Exception, state: Any, snapshot: Any, recovered: Any) -> Any:
        self.told.append(("mended", known))
        self.fault = None
        return self.build(spec, state, snapshot, recovered)

    def run(self) -> Bench:
        self.start.run()
        return self

    def close(self) -> None:
        self.directory.close()


def test_a_fresh_directory_has_nothing_and_its_life_is_durable(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "data").run()
    assert not bench.members and bench.told == ["space", "store", ("epoch", 1), "tidy"]
    assert bench.incarnation.epoch == 1 and bench.meta.get(meta_rows.EPOCH) == (1).to_bytes(8, "little")
    bench.close()
    assert bench.told[-1] == "store closed"
    again = Bench(tmp_path / "data").run()
    assert again.incarnation.epoch == 2
    assert again.incarnation.origin.directory == bench.incarnation.origin.directory
    assert again.incarnation.origin.start != bench.incarnation.origin.start
    again.close()


def test_groups_come_from_their_rows_and_the_wal_and_deleted_ones_do_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path).run()
    gone = SPEC._replace(uid=8, name="gone")
    bench.meta.commit([rows.group(SPEC), rows.group(gone), *rows.deleted(8), rows.group(gone)])
    entries = [build_plain(index, 2, COMMANDS, 0) for index in (1, 2)]
    bench.wal.write([WalItem(7, hard_state=(2, 1, 1), entries=entries)])
    bench.close()
    again = Bench(tmp_path).run()
    assert again.members.keys() == {7} and again.names == {"log": 7} and again.deleted == {8}
    raft = again.members[7].raft
    assert [one.index for one in raft.entries] == [1, 2] and raft.hard_state == (2, 1, 1)
    assert again.told[-4:] == ["hard", "lost?", "shed", "tidy"], "what the WAL says goes with the next checkpoint"
    again.close()


@pytest.mark.parametrize("unmet", [None, 1, 9])
def test_what_a_life_wrote_that_no_other_node_knew_is_not_claimed(tmp_path: Path, unmet: int | None) -> None:
    """`unmet`: the life that the row is of; another one's (a release that has no such row was here) means nothing."""
    bench = Bench(tmp_path).run()
    told = bench.incarnation.origin.written
    row = None if unmet is None else unmet.to_bytes(8, "little") + told.to_bytes(8, "little")
    bench.meta.commit([rows.group(SPEC), (meta_rows.UNMET, row)])
    bench.wal.write([WalItem(7, hard_state=(2, 1, 1), entries=[build_plain(1, 2, COMMANDS, 0)])])
    assert bench.incarnation.claim(bench.wal.next_batch) == told < bench.wal.next_batch
    bench.incarnation.acquaintances.count()
    assert bench.incarnation.claim(bench.wal.next_batch) == bench.wal.next_batch
    bench.close()
    again = Bench(tmp_path).run()
    assert again.incarnation.origin.written == (told if unmet == 1 else again.wal.next_batch) > 0
    assert again.meta.get(meta_rows.UNMET) is not None
    again.close()


def test_groups_that_nobody_used_sleep_on_and_whoever_promised_anything_is_built(tmp_path: Path) -> None:
    bench = Bench(tmp_path).run()
    specs = [SPEC._replace(uid=uid, name=f"g{uid}") for uid in range(10, 1500)]
    voted, left, damaged, stored, awake = (spec.uid for spec in specs[:5])
    left_row = meta_rows.DEPARTED + meta_rows.KEY.pack(left), bytes(msgpack.packb([3, 2, 3, 9, 9]))
    bench.meta.commit([rows.group(spec, asleep=spec.uid != awake) for spec in specs])
    bench.meta.commit([left_row, meta_rows.StateRow(stored, term=2).put()])
    bench.wal.write([WalItem(voted, hard_state=(1, 1, 0))])
    bench.close()
    again = Bench(tmp_path)
    again.repair.judge = lambda *_: {damaged: "its records are gone"}
    again.run()
    assert again.members.keys() == {voted, left, damaged, stored, awake} and again.names.keys() == {
        f"g{uid}" for uid in again.members
    }
    assert again.fresh == specs[5:]
    again.close()


def test_one_group_whose_records_make_no_member_is_mended_and_stops_no_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path).run()
    bench.meta.commit([rows.group(SPEC)])
    bench.close()
    again = Bench(tmp_path)
    again.fault = Corrupt("a group", 0, "this", "that")
    again.run()
    assert any(one[0] == "mended" for one in again.told if isinstance(one, tuple)) and 7 in again.members
    again.close()


def test_a_start_that_fails_gives_everything_back_the_last_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.repair.load = lambda epoch: 1 // 0
    with pytest.raises(ZeroDivisionError):
        bench.start.run()
    assert bench.told[-2:] == ["segments closed", "store closed"]
    Bench(tmp_path).run().close()


def test_a_directory_is_one_nodes_at_a_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path).run()
    with pytest.raises(DirectoryInUse):
        Bench(tmp_path).start.run()
    bench.close()
    with pytest.raises(WrongIdentity):
        Bench(tmp_path, node=2).start.run()


def test_what_the_others_refused_is_not_started_on_before_somebody_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path).run()
    bench.meta.commit([(meta_rows.OUTDATED, b"a newer one is known")])
    bench.close()
    with pytest.raises(Outdated, match="a newer one is known"):
        Bench(tmp_path).start.run()
    assert readmit(Disk(), tmp_path) == "a newer one is known" and readmit(Disk(), tmp_path) == ""
    Bench(tmp_path).run().close()
    with pytest.raises(BadRequest):
        readmit(Disk(), tmp_path / "nothing")


def test_what_is_known_of_others_is_remembered_and_nonsense_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path).run()
    bench.meta.commit([rows.peer(2, Origin(5, 1, 9, 3)), rows.peer(3, Origin(5, 1 << 40, 9, 3))])
    bench.close()
    again = Bench(tmp_path).run()
    assert again.incarnation.acquaintances.known == {2: Origin(5, 1, 9, 3)}
    again.close()


def test_only_the_newest_files_of_the_log_are_read_anew_unless_the_last_process_left_the_mark(tmp_path: Path) -> None:
    read: list[str] = []
    disk: Any = SimpleNamespace(
        list_directory=lambda path: sorted(one.name for one in Path(path).iterdir()),
        revalidate=lambda path: read.append(Path(path).name),
    )  # fmt: skip
    (tmp_path / "wal").mkdir()
    for name in ("1.wal", "2.wal", "3.wal", "probe.tmp"):
        (tmp_path / "wal" / name).touch()
    (tmp_path / "gen-0000000001").mkdir()
    for name in ("data.mdb", "bodies", "sealed"):
        (tmp_path / "gen-0000000001" / name).touch()
    revalidate(disk, tmp_path)
    assert read == ["2.wal", "3.wal"]
    (tmp_path / MARK).touch()
    read.clear()
    revalidate(disk, tmp_path)
    assert sorted(read) == ["1.wal", "2.wal", "3.wal", "bodies", "data.mdb"]

    def fails(path: str) -> None:
        raise OSError("it fails still")

    disk.revalidate = fails
    with pytest.raises(WalFailed):
        revalidate(disk, tmp_path)
