"""The cluster's nodes: who they are, where they are reached, and what state each one is in.

A number is one data directory's for ever: another directory is another number. A node comes by its configuration file
(`hello`, while the cluster imports) or by an invitation (`join`), whose secret is never stored, only its hash, and
which the first directory that uses it keeps for itself. Which state follows on which is `NEXT`, and nothing else
changes a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgpack

from logyard.engine.machine import Reject

from .section import At, Table

JOINING, ACTIVE, SILENT, DRAINING = "joining", "active", "silent", "draining"
DEAD, RETURNED, REMOVED = "dead", "returned", "removed"
HASH_BYTES = 32
INVITES_MAX = 1024
NEXT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "heard": {JOINING: ACTIVE, SILENT: ACTIVE, DEAD: RETURNED},
        "silent": {ACTIVE: SILENT},
        "drain": {ACTIVE: DRAINING, SILENT: DRAINING, RETURNED: DRAINING},
        "declare_dead": dict.fromkeys((JOINING, ACTIVE, SILENT, DRAINING, RETURNED), DEAD),
        "admit": {RETURNED: ACTIVE, DRAINING: ACTIVE},
        "remove": dict.fromkeys((JOINING, DRAINING, DEAD, RETURNED), REMOVED),
    }
)
"""By command: from which state to which. `heard` and `silent` in another state change nothing; of the others, who is
there already is answered as before, and any other state is a refusal."""
NODE_REMOVED = "node_removed"
"""The code of the refusal to a node that was removed, and says who it is."""


class Node(NamedTuple):
    """One node. `directory` is the number of its data directory; `since`: when it came into its state, in ms of log
    time; `space`: bytes of its disk, and free ones; `replaces`: whose members it is to take."""

    state: str
    directory: int
    peer: str
    client: str
    since: int
    zone: str = ""
    labels: Mapping[str, str] = {}
    epoch: int = 0
    versions: Mapping[str, int] = {}
    space: tuple[int, int] = (0, 0)
    replaces: int = 0


class Invite(NamedTuple):
    """A way in: the hash of its secret, until when it holds (ms), the directory and the node that have used it."""

    hash: bytes
    until: int
    directory: int = 0
    node: int = 0
    replaces: int = 0


class Nodes:
    """All nodes by number. `held(node)` counts the logs that count it as a member, `awaited(node)` those of them that
    are going and wait for it to let them go."""

    name: ClassVar[str] = "nodes"
    version: ClassVar[int] = 1
    commands: ClassVar[Collection[str]] = ("found", "finalise", "hello", "invite", "join", "update", "replace", *NEXT)
    questions: ClassVar[Collection[str]] = ("list",)

    def __init__(self, held: Callable[[int], int], awaited: Callable[[int], int]) -> None:
        self._held = held
        self._awaited = awaited
        self.rows: Table[Node] = Table("rows", Node)
        self.invites: Table[Invite] = Table("invites", Invite)
        self.uid = 0
        """The catalogue's own, once it is founded."""
        self.finalised = 0
        """The version that an operator finalised; 0: the cluster still imports, and names may be double."""

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Apply a command; see the method of its name."""
        if command in NEXT:
            return self._next(at, command, int(values["node"]))
        return getattr(self, f"_{command}")(at, values)

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        """Return all nodes that were not removed, unless `removed` asks for them, too."""
        rows = [(number, row) for number, row in self.rows if values.get("removed") or row.state != REMOVED]
        return [{"node": number, **row._asdict(), "held": self._keeping(number, row.state)} for number, row in rows]

    def _found(self, at: At, values: Mapping[str, Any]) -> Any:
        """Note whose catalogue this is; there is one founder."""
        uid = int(values["uid"])
        if self.uid not in (0, uid):
            raise Reject("wrong_identity", f"this is the catalogue {self.uid:016x}, not {uid:016x}")
        self.uid = uid
        # Those of configuration files have not all said who they are yet.
        self.rows.skip(max(values.get("nodes", ()), default=0))
        return uid

    def _finalise(self, at: At, values: Mapping[str, Any]) -> Any:
        """End the import, when every node has said that it is new: from here on names are unique, and none goes back
        below `version`."""
        version = int(values["version"])
        late = [
            number
            for number, row in self.rows
            if row.state not in (REMOVED, DEAD) and row.versions.get("catalog", 0) < version
        ]
        if late or set(values.get("nodes", ())) - {number for number, _ in self.rows}:
            raise Reject("refused", f"nodes {late or sorted(values['nodes'])} have not all said that they are new")
        self.finalised = max(self.finalised, version)
        return self.finalised

    def _hello(self, at: At, values: Mapping[str, Any]) -> Any:
        """Take what a node says of itself: who, where, which versions. A number is bound to its first directory."""
        number, directory = int(values["node"]), int(values["directory"])
        row = self.rows.get(number)
        if row is not None and row.directory != directory:
            raise Reject("wrong_identity", f"node {number} has another data directory, and that is another number")
        if row is not None and row.state == REMOVED:
            raise Reject(NODE_REMOVED, f"node {number} was removed; join as a new one, with an empty directory")
        if row is None and not 0 < number < 1 << 32:
            raise Reject("bad_request", f"{number} is no node's number")
        before = row or Node(ACTIVE, directory, "", "", at.now)
        after = before._replace(epoch=max(before.epoch, int(values.get("epoch", 0))), **_said(values))
        if after != row:
            self.rows.put(number, after)
        return number

    def _invite(self, at: At, values: Mapping[str, Any]) -> Any:
        """Store a way in; those that are over go."""
        secret, until, replaces = values["hash"], int(values["until"]), int(values.get("replaces", 0))
        # `bytes` of a number are so many: of a large one there may be no memory.
        if type(secret) is not bytes or len(secret) != HASH_BYTES or until <= at.now:
            raise Reject("bad_request", f"an invitation has a hash of {HASH_BYTES} bytes and holds for some time")
        if replaces and (self.rows.get(replaces) is None):
            raise Reject("refused", f"there is no node {replaces} to replace")
        for number in [number for number, row in self.invites if row.until <= at.now]:
            self.invites.drop(number)
        if len(self.invites) >= INVITES_MAX:
            raise Reject("refused", f"there are {INVITES_MAX} invitations already")
        return self.invites.add(Invite(secret, until, replaces=replaces))

    def _join(self, at: At, values: Mapping[str, Any]) -> Any:
        """Give a directory its number; the same directory gets the same one again."""
        secret, directory = values["hash"], int(values["directory"])
        if not self.uid:
            raise Reject("busy", "the catalogue is being founded: try again in a second")
        found = next(((number, row) for number, row in self.invites if row.hash == secret), None)
        if found is None or directory <= 0:
            raise Reject("refused", "no such invitation: make one with `logyard nodes invite`")
        number, invite = found
        if invite.directory == directory:
            return invite.node
        if invite.directory or invite.until <= at.now:
            raise Reject("refused", "this invitation is over, or another directory has used it")
        peer, client = str(values["peer"]), str(values["client"])
        replaces = invite.replaces or int(values.get("replaces", 0))
        replaced = self.rows.get(replaces)
        if replaces and replaced is None:
            raise Reject("refused", f"there is no node {replaces} to replace")
        taken = [
            one
            for one, row in self.rows
            if row.state not in (REMOVED, DEAD) and one != replaces and (row.peer == peer or row.client == client)
        ]
        if taken or not peer or not client:
            raise Reject("refused", f"{peer or 'no address'}, {client or 'no address'}: node {taken} is there")
        node = self.rows.add(Node(JOINING, directory, "", "", at.now, replaces=replaces)._replace(**_said(values)))
        self.invites.put(number, invite._replace(directory=directory, node=node))
        if replaced is not None and replaced.state in NEXT["declare_dead"]:
            # Its directory is gone, says who invited: nothing has to be waited for.
            self.rows.put(replaces, replaced._replace(state=DEAD, since=at.now))
        return node

    def _update(self, at: At, values: Mapping[str, Any]) -> Any:
        """Change where a node is reached, its zone or its labels; what is not named stays."""
        number, row = self._row(int(values["node"]))
        self.rows.put(number, row._replace(**_said(values)))
        return number

    def _replace(self, at: At, values: Mapping[str, Any]) -> Any:
        """Let one node take the members of another, which is dead or drains from now on."""
        number, row = self._row(int(values["by"]))
        replaced, old = self._row(int(values["node"]))
        if number == replaced or row.state not in (JOINING, ACTIVE) or old.state == REMOVED:
            raise Reject(
                "refused", f"node {number}, {row.state}, can't take the members of node {replaced}, {old.state}"
            )
        self.rows.put(number, row._replace(replaces=replaced))
        return old.state if old.state in (DEAD, DRAINING) else self._next(at, "drain", replaced)

    def _next(self, at: At, command: str, number: int) -> str:
        """Bring a node to its next state; return the one that it is in."""
        number, row = self._row(number)
        steps = NEXT[command]
        if row.state in steps:
            state = steps[row.state]
            if state == REMOVED and (left := self._keeping(number, row.state)):
                raise Reject("refused", f"{left} logs have a member on node {number}: `logyard nodes drain` it first")
            self.rows.put(number, row._replace(state=state, since=at.now))
            return state
        if row.state in steps.values() or command in ("heard", "silent"):
            return row.state
        raise Reject("refused", f"node {number} is {row.state}: {command.replace('_', '-')} is for {', '.join(steps)}")

    def _keeping(self, number: int, state: str) -> int:
        """Count the logs that keep a node from being removed. One that is dead lets nothing go: what only waits for
        that does not count."""
        return self._held(number) - (self._awaited(number) if state in (DEAD, REMOVED) else 0)

    def _row(self, number: int) -> tuple[int, Node]:
        row = self.rows.get(number)
        if row is None:
            raise Reject("bad_request", f"there is no node {number}")
        return number, row

    def snapshot(self) -> Mapping[str, bytes]:
        """Return the rows in shards, and what is there once."""
        return {"once": msgpack.packb([self.uid, self.finalised]), **self.rows.shards(), **self.invites.shards()}

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        """Take the place of what was packed."""
        self.uid, self.finalised = msgpack.unpackb(shards["once"])
        self.rows.restore(shards)
        self.invites.restore(shards)

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Have nothing to do: there is one version."""


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a command says of a node, of what may be said. Raises `Reject`."""
    found: dict[str, Any] = {key: str(values[key]) for key in ("peer", "client", "zone") if key in values}
    if "labels" in values:
        found["labels"] = {str(key): str(value) for key, value in sorted(values["labels"].items())}
    if "versions" in values:
        found["versions"] = {str(key): int(value) for key, value in sorted(values["versions"].items())}
    if "space" in values:
        total, free = values["space"]
        found["space"] = (int(total), int(free))
    return found
