"""A stopped directory's rows and WAL as values: what is gathered, what is passed over, and what a check asks of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import KEY, SegmentRun, SnapshotRow, StateRow, state_key
from logyard.engine.log.replay_result import Damage
from logyard.engine.recovery.damage import Damaged
from logyard.engine.recovery.inspect import Facts, Wal, image_of
from logyard.engine.snapshot import format as snapshot_format
from logyard.pipeline.directory.files import users_of
from logyard.protocol.errors import WrongIdentity

from .test_rebuild import SPEC, checkpoint, entries, shape, snapshot, wal


class Meta(dict[bytes, bytes]):
    """Rows in memory."""

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted((key, value) for key, value in self.items() if key.startswith(prefix)))


def facts(state: StateRow | None = None, stored: SnapshotRow | None = None) -> Facts:
    found = Facts()
    found.groups[SPEC.uid] = SPEC
    if state is not None:
        found.states[SPEC.uid] = state
    if stored is not None:
        found.snapshots[SPEC.uid] = stored
    return found


def test_rows_are_gathered_and_those_that_say_nonsense_are_told() -> None:
    group = meta_rows.GroupRow(7, "group", "log", {}, image_of(7, facts(), Wal()).base[1].encode())
    meta = Meta([group.put(), checkpoint(10).put()])
    meta[state_key(8)] = b"\xc1"
    meta[meta_rows.EPOCH] = (3).to_bytes(8, "little")
    meta[meta_rows.OUTDATED] = b"older"
    for uid in (7, 9):
        meta[meta_rows.DEPARTED + KEY.pack(uid)] = b"\x95\x01\x02\x03\x04\x05"
    meta[meta_rows.DAMAGED + KEY.pack(9)] = Damaged("lost", False, 4, False).pack()
    bad: list[bytes] = []
    found = Facts()
    found.gather(meta, lambda key, error: bad.append(key))
    assert bad == [state_key(8)] and not found.complete
    assert found.groups.keys() == found.states.keys() == {7} and (found.epoch, found.refused) == (3, "older")
    assert found.claimed == meta_rows.ALL
    for life, claimed in ((3, 5), (2, meta_rows.ALL)):
        meta[meta_rows.UNMET] = meta_rows.unmet(life, 5)
        found.gather(meta, lambda key, error: None)
        assert found.claimed == claimed, "of another life, by a release that does not know the row, it says nothing"
    # This node is a member of group 7 again.
    assert found.deleted == {9} and found.departed[7].term == 1 and found.damaged[9].reason == "lost"


def test_a_snapshot_that_can_not_be_read_is_the_first_finding_and_a_newer_one_ends_it() -> None:
    encoded = snapshot_format.encode(snapshot(6))
    good = facts(checkpoint(10, (6, 1)), SnapshotRow(7, 6, 1, encoded))
    assert shape(image_of(7, good, Wal()))[0] == (6, 1)
    spoilt = facts(checkpoint(10, (6, 1)), SnapshotRow(7, 6, 1, encoded[:-1] + bytes([encoded[-1] ^ 1])))
    assert [one.kind for one in image_of(7, spoilt, Wal()).findings][:2] == ["snapshot", "snapshot"]
    newer = facts(None, SnapshotRow(7, 6, 1, encoded[:4] + b"\x63\x00" + encoded[6:]))
    with pytest.raises(WrongIdentity):
        image_of(7, newer, Wal())


def test_damage_without_a_name_has_suspects_and_a_directory_that_lost_batches_claims_none() -> None:
    known, said = facts(), Wal()
    assert said.suspects(known) == set() and said.written == 1
    said.result.damage.append(Damage(0, 3, 64, "a batch is lost"))
    assert said.suspects(known) == {7} and said.written == 0
    said.result.cleared.add(7)
    assert said.suspects(known) == set()


def test_of_segments_a_log_needs_what_a_start_would_read() -> None:
    """A checkpoint is older than what the WAL overwrote: damage there costs nothing."""
    said = Wal()
    assert users_of(facts(checkpoint(10)), said) == {4: {7: [(1, 10)]}}
    said.groups[7] = wal(7, entries(7, 8, 2), hard=(2, 0, 0))
    assert users_of(facts(checkpoint(10)), said) == {4: {7: [(1, 6)]}}
    installed = SnapshotRow(7, 20, 2, snapshot_format.encode(snapshot(20, 2)))
    assert users_of(facts(checkpoint(10, commit=8), installed), Wal()) == {4: {7: [(1, 8)]}}
    orphan = Facts()
    orphan.states[8] = StateRow(8, runs=[SegmentRun(1, 2, 5)])
    assert users_of(orphan, Wal()) == {5: {8: [(1, 2)]}}
