"""Where nodes are reached: what is no address is neither stored nor dialled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.machines.catalog import Catalog
from logyard.machines.catalog.nodes import ACTIVE, Node
from logyard.protocol.errors import BadRequest, Busy, NoSpace
from logyard.service.catalog.keeper import nodes_of
from logyard.service.catalog.places import Place, Places, address, decode, reachable
from logyard.service.catalog.verbs import CatalogVerbs

WRONG = ["somehost", "somehost:", ":7000", "h:70000", "h:0", "h:-1", "h:x", "a..b:7000"]


# What Python's own idea of such names takes (IDNA 2003), and trio, which dials, does not.
UNREAD = ["b\xfccher_1.example:7000", "\u2603.example:7000", "a\0b:7000"]


@pytest.mark.parametrize("text", WRONG)
async def test_what_is_no_address_is_not_stored(text: str) -> None:
    """It ended whoever heard of it, and each of their starts."""
    rows: list[tuple[bytes, bytes]] = []
    dialled: list[Any] = []

    async def store(found: Any) -> None:
        rows.extend(found)

    network = SimpleNamespace(add_peer=lambda *what: dialled.append(what))
    places = Places({}, cast(Any, network), store, lambda *_: None)
    with pytest.raises(BadRequest, match="HOST:PORT"):
        await places.meet(2, text, "c:1")
    assert not rows and not dialled
    await places.meet(2, "node-2:7000", "c:1")
    assert dialled == [(2, ("node-2", 7000))] and decode(rows[0][1]) == {2: Place("node-2:7000", "c:1")}


async def test_what_could_not_be_stored_is_done_at_the_next_look() -> None:
    """A node whose address found no space was never dialled, and one that left was for ever, until a restart."""
    full = True
    done: list[Any] = []

    async def store(found: Any) -> None:
        if full:
            raise NoSpace("full")

    network = SimpleNamespace(
        add_peer=lambda *what: done.append(("dialled", *what)), remove_peer=lambda node: done.append(("left", node))
    )
    places = Places({3: Place("c:3", "c:4")}, cast(Any, network), store, lambda *what: done.append(("told", *what)))
    with pytest.raises(NoSpace):
        await places.meet(2, "b:1", "b:2")
    with pytest.raises(NoSpace):
        await places.part(3)
    assert not done
    full = False
    for _ in range(2):
        await places.meet(2, "b:1", "b:2")
        await places.part(3)
    assert done == [("dialled", 2, ("b", 1)), ("told", 2, "b:2"), ("left", 3), ("told", 3, "")]


async def test_a_node_of_the_configuration_that_was_removed_is_gone_after_a_start_as_well() -> None:
    """It stands in [peers] still, or dials as none of the cluster, and is stored no more."""
    done: list[Any] = []

    async def store(found: Any) -> None:
        done.append("stored")

    network = SimpleNamespace(remove_peer=lambda node: done.append(("left", node)))
    places = Places({}, cast(Any, network), store, lambda *what: done.append(("told", *what)))
    for _ in range(2):
        await places.part(3)
    assert done == [("left", 3), ("told", 3, "")]


@pytest.mark.parametrize(
    ("text", "found"), [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:65535", ("[::1]", 65535)), ("n:7", ("n", 7))]
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert address(text) == found


def test_what_an_older_program_stored_is_not_dialled() -> None:
    assert reachable({1: Place("a:1", ""), 2: Place("b", "")}) == {1: ("a", 1)}


@pytest.mark.parametrize("key", ["peer", "client"])
@pytest.mark.parametrize("text", [*WRONG, *UNREAD, "b\xfccher.example:7000"])
async def test_nobody_tells_the_catalogue_what_is_no_address(key: str, text: str) -> None:
    told: list[Any] = []

    async def change(*what: Any) -> int:
        told.append(what)
        return 4

    nobody = cast(Any, None)
    keeper = SimpleNamespace(catalog=Catalog(), check=lambda: None)
    nodes_of(keeper.catalog).rows.put(1, Node(ACTIVE, 7, "n:3", "n:4", 0))
    verbs = CatalogVerbs(1, "c", cast(Any, keeper), cast(Any, SimpleNamespace(change=change)), nobody, nobody)
    values = {"peer": "n:1", "client": "n:2", key: text}
    with pytest.raises(BadRequest, match="HOST:PORT"):
        await verbs.change("nodes", "update", {"node": 2, **values})
    with pytest.raises(BadRequest, match="HOST:PORT"):
        await verbs.join(b"token", 1, values["peer"], values["client"], "", 0)
    assert not told
    await verbs.change("nodes", "update", {"node": 2, "zone": "a"})
    found = await verbs.join(b"token", 1, "n:1", "", "", 0)
    assert (found["node"], found["nodes"]) == (4, [[1, "n:3", "n:4"]]) and len(told) == 2


@pytest.mark.parametrize("catalog", [None, Catalog()], ids=["none", "empty"])
async def test_nobody_joins_by_a_node_that_knows_no_others(catalog: Catalog | None) -> None:
    """It was given a number and no addresses, kept both, and reached nobody from then on."""
    nobody = cast(Any, None)
    keeper = SimpleNamespace(catalog=catalog, trouble="not heard of yet", check=lambda: None)
    verbs = CatalogVerbs(1, "c", cast(Any, keeper), nobody, nobody, nobody)
    with pytest.raises(Busy, match="not heard of yet"):
        await verbs.join(b"token", 1, "n:1", "n:2", "", 0)
