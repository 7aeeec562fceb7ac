"""Hibernating groups and their stored rows: what a restart leaves asleep, and how one group becomes a member again.

Invariant: a group stays a row at a restart only if the WAL says nothing of it but what happened before it slept; a
member is rebuilt from its rows by the very code of recovery. Called by `recovery` and `quiesce`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logyard.protocol.errors import Corrupt, LogyardError

from ..log import meta_rows
from ..log.recovered import Recovered
from ..raft.membership import Configuration
from ..recovery.rebuild import log_base, spec_of
from ..repair import log_repair
from ..replica.member import Member
from ..types import Spec
from .quiesced_table import Row, Shape

if TYPE_CHECKING:
    from ..host.system import System


def adopt_row(system: System, spec: Spec, state: meta_rows.StateRow) -> None:
    """Adopt a hibernating group, which stays one: no member is built."""
    leader, epoch, due, start, end, size = state.extra["asleep"]
    configuration = Configuration.decode(state.extra["configurations"][0][2])
    shape = Shape(configuration.voters, configuration.learners, (), (), spec.machine)
    row = Row(state.term, int(log_base(state)[0]), due, start, end, 0, size, shape, spec.name)
    system.hibernation.adopt(spec.uid, row, leader, epoch, state.extra.get("slept", 0))


def stored_spec(system: System, uid: int) -> Spec:
    """Return a group's definition from its stored row. Raises `Corrupt`."""
    key = meta_rows.group_key(uid)
    value = system.storage.books.meta.get(key)
    if value is None:
        raise Corrupt(str(system.path / "meta"), 0, f"a definition of group {uid:016x}", "none")
    return spec_of(meta_rows.GroupRow.unpack(key, value))


def revive(system: System, uid: int, name: str) -> Member:
    """Return a member from the rows that it hibernated by: recovery of one group, with nothing in the WAL. One whose
    rows are damaged comes up stopped."""
    meta = system.storage.books.meta
    try:
        spec = stored_spec(system, uid)
    except LogyardError as error:
        member = system.builder.fresh(Spec(uid, name, "log", {}, (), 0))
        log_repair.stop(member, str(error))
        return member
    try:
        state_key, snapshot_key = meta_rows.state_key(uid), meta_rows.snapshot_key(uid)
        state, snapshot = meta.get(state_key), meta.get(snapshot_key)
        if state is None or snapshot is None:
            raise Corrupt(f"group {spec.name}", 0, "its rows", "none")
        member = system.builder.build(
            spec, meta_rows.StateRow.unpack(state_key, state),
            meta_rows.SnapshotRow.unpack(snapshot_key, snapshot), Recovered(),
        )  # fmt: skip
    except Exception as error:
        return system.damages.revive(spec, error)
    system.versions.learn(member)
    return member
