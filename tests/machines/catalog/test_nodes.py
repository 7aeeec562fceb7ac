"""Nodes: numbers bound to directories, invitations, and which state follows on which."""

from __future__ import annotations

from typing import Any

import pytest

from logyard.machines.catalog.nodes import NODE_REMOVED
from logyard.protocol.errors import BadRequest, Busy, LogyardError, Refused, WrongIdentity

from .told import Told, wanted

HASH, OTHER = bytes(32), bytes([1] * 32)


def hello(told: Told, node: int, directory: int = 0, **more: Any) -> Any:
    values: dict[str, Any] = {"versions": {"catalog": 1}, "peer": f"p{node}", "client": f"c{node}", **more}
    return told("nodes", "hello", node=node, directory=directory or 100 + node, **values)


def join(told: Told, secret: bytes, directory: int, place: str = "9") -> Any:
    told("nodes", "found", uid=1)
    return told("nodes", "join", hash=secret, directory=directory, peer=f"p{place}", client=f"c{place}")


def state(told: Told, node: int) -> str:
    found = told.nodes.rows.get(node)
    assert found is not None
    return found.state


def test_there_is_one_founder() -> None:
    told = Told()
    assert told("nodes", "found", uid=5) == 5 and told("nodes", "found", uid=5) == 5
    with pytest.raises(WrongIdentity, match=f"{5:016x}, not {6:016x}"):
        told("nodes", "found", uid=6)


def test_a_number_is_one_directory_s() -> None:
    told = Told()
    assert hello(told, 3, 33) == 3 and hello(told, 3, 33, epoch=4) == 3
    with pytest.raises(WrongIdentity, match="another number"):
        hello(told, 3, 34)
    told("nodes", "declare_dead", node=3)
    told("nodes", "remove", node=3)
    with pytest.raises(LogyardError, match="was removed") as refused:
        hello(told, 3, 33)
    assert refused.value.code == NODE_REMOVED
    told("nodes", "invite", hash=HASH, until=10**9)
    assert join(told, HASH, 44) == 4


def test_an_invitation_is_for_one_directory() -> None:
    told = Told()
    hello(told, 1)
    told("nodes", "invite", hash=HASH, until=10**9)
    with pytest.raises(Refused, match="no such invitation"):
        join(told, OTHER, 44)
    with pytest.raises(Refused, match=r"node \[1\] is there"):
        join(told, HASH, 44, "1")
    assert join(told, HASH, 44) == 2 and join(told, HASH, 44) == 2
    assert state(told, 2) == "joining"
    with pytest.raises(Refused, match="another directory has used it"):
        join(told, HASH, 45)
    assert told("nodes", "heard", node=2) == "active"


def test_an_invitation_is_over() -> None:
    told = Told()
    with pytest.raises(BadRequest, match="for some time"):
        told("nodes", "invite", hash=HASH, until=1)
    told("nodes", "invite", hash=HASH, until=3500)
    told("nodes", "found", uid=1)
    with pytest.raises(Refused, match="is over"):
        join(told, HASH, 44)


def test_a_replacement_takes_the_address_of_the_one_that_it_replaces() -> None:
    told = Told()
    for node in (1, 2, 3):
        hello(told, node)
    told("nodes", "invite", hash=HASH, until=10**9, replaces=3)
    assert join(told, HASH, 44, "3") == 4
    assert state(told, 3) == "dead"
    found = told.nodes.rows.get(4)
    assert found is not None and (found.replaces, found.peer) == (3, "p3")


def test_which_state_follows() -> None:
    told = Told()
    hello(told, 1)
    told("logs", "create", logs=[wanted("a", 7, 1, 2)])
    for command, after in (
        ("silent", "silent"), ("silent", "silent"), ("heard", "active"), ("drain", "draining"), ("silent", "draining"),
        ("admit", "active"), ("declare_dead", "dead"), ("declare_dead", "dead"), ("heard", "returned"),
        ("heard", "returned"), ("drain", "draining"),
    ):  # fmt: skip
        assert told("nodes", command, node=1) == after
    with pytest.raises(Refused, match="1 logs have a member on node 1"):
        told("nodes", "remove", node=1)
    told("logs", "report", logs=[(7, 5, (2,), ())])
    assert told("nodes", "remove", node=1) == "removed"
    with pytest.raises(Refused, match="node 1 is removed: admit is for returned, draining"):
        told("nodes", "admit", node=1)
    with pytest.raises(BadRequest, match="no node 9"):
        told("nodes", "drain", node=9)
    assert told.ask("nodes", "list") == [] and len(told.ask("nodes", "list", removed=True)) == 1


def test_a_dead_node_is_kept_by_nothing_that_only_waits_for_it() -> None:
    told = Told()
    hello(told, 1)
    hello(told, 2)
    told("logs", "create", logs=[wanted("a", 7, 1, 2), wanted("b", 8, 1, 2)])
    told("logs", "report", logs=[(7, 5, (1, 2), ()), (8, 5, (1, 2), ())])
    told("logs", "delete", uid=7)
    assert [row["held"] for row in told.ask("nodes", "list")] == [2, 2]
    told("nodes", "drain", node=1)
    told("nodes", "declare_dead", node=2)
    assert [row["held"] for row in told.ask("nodes", "list")] == [2, 1], "who lives says so itself, soon"
    for node, count in ((1, 2), (2, 1)):
        with pytest.raises(Refused, match=f"{count} logs have a member on node {node}"):
            told("nodes", "remove", node=node)
    told("logs", "delete", uid=8)
    assert told("nodes", "remove", node=2) == "removed"


def test_names_are_final_when_every_node_is_new() -> None:
    told = Told()
    hello(told, 1)
    hello(told, 2, versions={})
    with pytest.raises(Refused, match=r"nodes \[2\]"):
        told("nodes", "finalise", version=1)
    hello(told, 2)
    with pytest.raises(Refused, match=r"nodes \[1, 2, 3\]"):
        told("nodes", "finalise", version=1, nodes=[1, 2, 3])
    assert told("nodes", "finalise", version=1, nodes=[1, 2]) == 1


def test_addresses_and_labels_change() -> None:
    told = Told()
    hello(told, 1, zone="a")
    told("nodes", "update", node=1, peer="elsewhere", labels={"rack": "2"})
    (row,) = told.ask("nodes", "list")
    assert (row["peer"], row["client"], row["zone"], row["labels"]) == ("elsewhere", "c1", "a", {"rack": "2"})


def test_one_node_takes_the_place_of_another() -> None:
    told = Told()
    for node in (1, 2, 3):
        hello(told, node)
    assert told("nodes", "replace", node=2, by=3) == "draining" and told("nodes", "replace", node=2, by=3) == "draining"
    found = told.nodes.rows.get(3)
    assert found is not None and found.replaces == 2
    told("nodes", "declare_dead", node=1)
    assert told("nodes", "replace", node=1, by=3) == "dead"
    for node, by in ((3, 3), (3, 2)):
        with pytest.raises(Refused, match="can't take the members"):
            told("nodes", "replace", node=node, by=by)


def test_a_number_of_a_configuration_file_is_given_to_nobody_who_joins() -> None:
    told = Told()
    told("nodes", "invite", hash=HASH, until=10**9)
    with pytest.raises(Busy, match="being founded"):
        told("nodes", "join", hash=HASH, directory=44, peer="p", client="c")
    told("nodes", "found", uid=1, nodes=[1, 2, 3])
    assert join(told, HASH, 44) == 4
