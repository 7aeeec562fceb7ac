"""The verbs that are not a log's, as calls: groups, members, snapshots, status. `Call` says what to ask whom.

Sans-IO; the methods are in `_async.admin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, UnknownGroup
from logyard.protocol.verbs import BOARD_ROWS, LIST_ROWS, NODE, VERBS

from .board import Board, standings

T = TypeVar("T")
CATALOG = "_catalog"
"""The group that knows the cluster: no client finds it by its name, or changes it but by its own verbs."""
CREATE_GROUPS = 256
"""Groups of one create call: its arguments are bounded, and one slow call should not hold thousands of them."""
CHANGES = ("add", "remove", "add_learner", "promote")
OF_ANY_MACHINE = frozenset(("session_open", "query", "fetch", "kv_watch"))
"""Verbs that are told what the group has to be: its machine does not show it by refusing them."""
STATUS_PATIENCE_S = 3.0
"""A status report does not wait for a dead node as long as a command would."""


Rows: TypeAlias = list[dict[str, Any]]
"""(Inside the verbs' classes `list` is a verb.)"""
Nodes: TypeAlias = list[int]


def plain(value: Any) -> Any:
    """Return the answer as it came."""
    return value


class Call(NamedTuple, Generic[T]):
    """One question. `group`: for its leader; `nodes`: for one of these first; `pinned`: for nodes[0] and no other.

    `idempotent`: asking twice does no harm, so a cut connection is not an unknown outcome. `kind`: what the group must
    be, "" for whatever it is.
    """

    method: str
    arguments: dict[str, object]
    decode: Callable[[Any], T]
    group: str = ""
    nodes: tuple[int, ...] = ()
    pinned: bool = False
    idempotent: bool = True
    kind: str = ""


def ask(
    method: str,
    decode: Callable[[Any], T],
    *,
    at: int | None = None,
    among: Sequence[int] = (),
    leader_of: str = "",
    kind: str = "",
    **said: Any,
) -> Call[T]:
    """Return a call of a verb, as the table of verbs has it: who answers, whether it may be asked twice, what it takes.
    None is not sent. For the node `at` alone, or one of `among` first; else for the leader of the group `name`, or of
    `leader_of`, if the verb is a group's. `kind`: what that must be. Raises `BadRequest` for what a node would."""
    verb = VERBS[method]
    arguments = verb.given(said)
    if kind and method in OF_ANY_MACHINE:
        arguments["kind"] = kind
    group = leader_of if verb.served == NODE else str(arguments["name"])
    nodes = tuple(among) if at is None else (at,)
    return Call(method, arguments, decode, group, nodes, at is not None, verb.idempotent, kind)


def call_node(method: str, node: int | None, **arguments: Any) -> Call[Any]:
    """Return a call for one node, or for any."""
    return ask(method, plain, at=node, **arguments)


def call_leader(method: str, name: str, **arguments: Any) -> Call[Any]:
    """Return a call for the leader of a group."""
    return ask(method, plain, name=name, **arguments)


def group_spec(name: str, members: Sequence[int], machine: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return what `create` needs to know of one group; raise `BadRequest`."""
    if not members or len(set(members)) != len(members):
        raise BadRequest(f"{name}: members are one or more different nodes, not {list(members)}")
    return {"name": name, "members": list(members), "machine": machine, "arguments": dict(arguments)}


def create_calls(specs: Iterable[Mapping[str, object]]) -> list[Call[Any]]:
    """Return calls that create groups, a bounded number in each, for a node that is a member of them."""
    by_members: dict[tuple[int, ...], list[Mapping[str, object]]] = {}
    for spec in specs:
        members = spec["members"]
        assert isinstance(members, list)
        by_members.setdefault(tuple(members), []).append(spec)
    return [
        ask("create", plain, among=members, specs=group[at : at + CREATE_GROUPS])
        for members, group in by_members.items()
        for at in range(0, len(group), CREATE_GROUPS)
    ]


def batch_call(
    names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, object]
) -> Call[int]:
    """Return a call that creates a batch of groups asleep, for a node that is a member of them."""
    return ask(
        "create_batch", plain, among=members, names=list(names), members=list(members), machine=machine,
        arguments=dict(arguments),
    )  # fmt: skip


def members_call(name: str, changes: Sequence[tuple[str, int]]) -> Call[Any]:
    """Return a call that changes members: (kind, node) pairs that take effect together."""
    if name == CATALOG:
        raise BadRequest(f"{name!r} is the cluster's own: its members follow its nodes (logyard nodes)")
    for kind, _ in changes:
        if kind not in CHANGES:
            raise BadRequest(f"a membership change is one of {', '.join(CHANGES)}, not {kind!r}")
    if len(changes) == 1:
        return ask("members", plain, name=name, change=changes[0][0], node=changes[0][1])
    return ask("members", plain, name=name, changes=[list(change) for change in changes])


def leaders_view(value: Any) -> dict[str, Any]:
    """Return a describe answer, if its leader gave it; another member's may be old. Raises `NotLeader`."""
    found: dict[str, Any] = value
    if found["role"] != "leader":
        raise NotLeader.told(f"{found['name']}: node {found['node']} does not lead it", {"leader": found["leader"]})
    return found


def merge_groups(rows_by_node: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row a group from the lists of several nodes: its leader's where there is one."""
    merged: dict[str, dict[str, Any]] = {}
    for rows in rows_by_node:
        for row in rows:
            known = merged.get(row["name"])
            if known is None or (row.get("role") == "leader" and row.get("term", 0) >= known.get("term", 0)):
                merged[row["name"]] = row
    return [merged[name] for name in sorted(merged)]


def list_call(node: int, found: Sequence[Mapping[str, Any]]) -> Call[Any]:
    """Return a call for the groups of one node behind those that were found, a bounded number."""
    return ask("list", plain, at=node, after=found[-1]["name"] if found else " ", limit=LIST_ROWS)


def add_page(found: list[dict[str, Any]], page: Sequence[dict[str, Any]]) -> bool:
    """Add what `list_call` brought to what was found before, by name; return whether there may be more. A node that
    knows no pages gives all its groups each time, in any order."""
    after = found[-1]["name"] if found else ""
    fresh = sorted((row for row in page if row["name"] > after), key=lambda row: str(row["name"]))
    found += fresh
    return len(page) == LIST_ROWS and bool(fresh)


def board_call(node: int, after: str) -> Call[Board]:
    """Return a call for the groups of one node behind the name `after`, a bounded number."""
    return ask("board", standings, at=node, after=after or " ", limit=BOARD_ROWS)


def unreached(node: int, error: LogyardError) -> dict[str, Any]:
    """Return a node's status when it gave none."""
    return {"node": node, "error": error.code, "message": error.message}


def all_of(found: Mapping[int, Any]) -> dict[int, Any]:
    """Return the answers by node if there is no error among them. Else raises the first error, with a message that
    names all nodes that gave one; its details have them as `missing`, and the `answers` of the others."""
    errors = {node: answer for node, answer in found.items() if isinstance(answer, LogyardError)}
    answers = {node: answer for node, answer in found.items() if node not in errors}
    for first in errors.values():
        said = "; ".join(f"node {node} did not do it: {error.message}" for node, error in errors.items())
        details = {**first.details, "missing": list(errors), "answers": answers}
        raise type(first).told(said, details, code=first.code, retry=first.retry)
    return answers


def leader_in(answer: Any) -> int:
    """Return who leads a group by a node's locate answer for it, 0 where it knows none or gave an error."""
    return next((int(row[2]) for row in answer), 0) if not isinstance(answer, LogyardError) else 0


def located(found: Mapping[int, Any], name: str) -> dict[str, Any]:
    """Return where one group is, from the locate answers of several nodes. Raises `UnknownGroup` when none has it; what
    stood in the way of an answer, when those that gave one do not: the others may have it."""
    rows = [
        (row[2] == node, bool(row[2]), row)
        for node, answer in found.items()
        if not isinstance(answer, LogyardError)
        for row in answer
    ]
    if not rows:
        for answer in found.values():
            if isinstance(answer, LogyardError):
                raise answer
        raise UnknownGroup(f"no group {name!r} on any node", name=name)
    # The leader itself knows best; a member that knows no leader, or was removed, knows least.
    _, _, row = max(rows, key=lambda found: found[:2])
    more = {"kind": row[5]} if len(row) > 5 else {}
    return {"name": name, "uid": row[1], "leader": row[2], "members": list(row[3]), **more}
