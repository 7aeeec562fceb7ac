"""What must hold of a cluster with a catalogue when everything is healed: a name is one log or none, nothing that had a
leader is lost, nothing half-made stays.

`unsettled` says what is not so yet; what never comes to be so is a complaint. Used by `stories`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from logyard.machines.catalog import Catalog
from logyard.machines.catalog.logs import CONFLICTING, LIVE, RESERVED, Log
from logyard.service.catalog.electorate import voters_wanted
from logyard.service.catalog.keeper import catalog_uid, logs_of, nodes_of, plan_of

from .yard import Yard

UID = catalog_uid("sim")


def rows(catalog: Catalog) -> list[Log]:
    """All logs, as a copy has them."""
    return list(logs_of(catalog))


def unsettled(yard: Yard, states: Mapping[int, str]) -> Iterator[str]:
    """Yield what is not as it has to be in the end. `states`: of the nodes."""
    down = [number for number, host in yard.hosts.items() if not host.ready and number not in yard.away]
    if down:
        yield f"nodes {down} are not up: {[str(yard.hosts[number].failure) for number in down]}"
        return
    copies = {number: yard.catalog(number) for number in yard.up if number in yard.keeps}
    lacking = [number for number, copy in copies.items() if copy is None]
    if lacking:
        yield f"nodes {lacking} have no catalogue: {[yard.nodes[number].keeper.trouble for number in lacking]}"  # type: ignore[union-attr]
        return
    first = next(copy for copy in copies.values() if copy is not None)
    for number, copy in copies.items():
        keeper = yard.nodes[number].keeper
        assert copy is not None and keeper is not None
        if copy.snapshot() != first.snapshot():
            yield f"node {number} has another catalogue"
        if keeper.trouble:
            yield f"node {number}: {keeper.trouble}"
    found = {number: row.state for number, row in nodes_of(first).rows}
    if found != dict(states):
        yield f"nodes are {found}, not {dict(states)}"
    own = {member.raft.base[1].voters for number in copies if (member := yard.nodes[number].keeper.member())}  # type: ignore[union-attr]
    if len(own) != 1 or min(own) != voters_wanted(min(own), states):
        yield f"{sorted(own)} vote in the catalogue"
    moves = [move for _, move in plan_of(first).rows]
    if moves:
        yield f"moves are under way: {moves}"
    yield from _logs(yard, rows(first))


def _logs(yard: Yard, found: Collection[Log]) -> Iterator[str]:
    """Yield what of the logs is not as the catalogue has it."""
    odd = [(row.name, row.state) for row in found if row.state not in (LIVE, CONFLICTING)]
    if odd:
        yield f"{odd} are neither there nor gone"
    names = Counter(row.name for row in found if row.state == LIVE)
    yield from (f"{name!r} is {count} logs" for name, count in names.items() if count > 1)
    by_uid = {row.uid: row for row in found}
    held: Counter[int] = Counter()
    for number in yard.up:
        system = yard.system(number)
        assert system is not None
        for name, uid in sorted(system.names.items()):
            if uid == UID:
                continue
            row = by_uid.get(uid)
            if row is None:
                yield f"node {number} has {name!r} ({uid:016x}), which the catalogue does not know"
            elif number not in row.nodes():
                yield f"node {number} has a replica of {name!r}, whose members are {sorted(row.nodes())}"
            else:
                held[uid] += 1
    for row in found:
        wanted = sum(number in yard.up for number in row.nodes())
        if row.state == LIVE and held[row.uid] != wanted:
            yield f"{row.name!r} is on {held[row.uid]} of its {wanted} nodes"
        if row.state == LIVE and not yard.leader(row.name):
            yield f"{row.name!r} has no leader"


def lost(yard: Yard, ended: Collection[str]) -> Iterator[str]:
    """Yield groups that had a leader and are nowhere any more, but for those whose name was deleted (`ended`)."""
    copies = [copy for number in yard.up if (copy := yard.catalog(number)) is not None]
    known = {row.uid for copy in copies for row in rows(copy)}
    for uid in sorted(yard.led - known - {UID}):
        name = yard.led_as.get(uid, "")
        if name not in ended:
            yield f"{name!r} ({uid:016x}) had a leader, and is lost"


def founders(yard: Yard) -> set[tuple[int, tuple[int, ...]]]:
    """Return (when, by whom) of all the catalogues that nodes are members of."""
    found = set()
    for number in yard.up:
        system = yard.system(number)
        member = system.members.get(UID) if system is not None else None
        if member is not None and member.spec.name == RESERVED:
            found.add((member.spec.created, member.spec.voters))
    return found
