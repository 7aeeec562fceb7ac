"""Who is to say that no node has a group has to ask those that came later as well."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from logyard.client.admin import call_leader
from logyard.client.fork import HERE
from logyard.client.network import Network
from logyard.client.session import Retry, Routes, unreachable
from logyard.client.sync import Yard
from logyard.protocol.errors import NotLeader, UnknownGroup

OLD = {1: "a:1", 2: "b:1", 3: "c:1"}


class Net(Network):
    """A client of nodes 1 to 3, of which none has the group; `there`: whom a node names when it is asked."""

    def __init__(self, there: dict[int, str]) -> None:
        nobody = cast(Any, None)
        super().__init__(["a:1"], nobody, timeout=5.0, retry=True, window_bytes=1 << 20)
        self.routes.told(OLD)
        self.there = there
        self.down: Collection[str] = ""
        self.asked: list[str] = []

    async def _locate(self, address: tuple[str, int], names: list[str]) -> list[Any] | None:
        self.asked.append(address[0])
        return None if address[0] in self.down else []

    async def _ready(self, link: Any, deadline: float) -> Any:
        async def call(verb: str, values: Any, deadline: float) -> tuple[Any, bool]:
            assert verb == "cluster"
            return {"nodes": self.there}, False

        return SimpleNamespace(call=call)

    def _dial(self, *_: Any) -> Any:
        return None


async def test_nodes_that_came_later_are_asked_before_a_group_is_unknown() -> None:
    net = Net({**OLD, 4: "d:1"})
    wanted = net._want("_groups.0")
    await net._locate_round()
    assert wanted.error is None, "the fourth was not asked yet"
    await net._locate_round()
    assert "d" in net.asked and isinstance(wanted.error, UnknownGroup)


async def test_a_group_that_no_node_has_is_unknown() -> None:
    net = Net(OLD)
    wanted = net._want("_groups.0")
    await net._locate_round()
    assert isinstance(wanted.error, UnknownGroup)


# Which nodes are down, how many members the topics' log has (0: it is not known), and which groups no node can have.
EVERY = {"_groups-0", "other", "log"}
DOWN = [
    ("", 0, EVERY), ("", 3, EVERY), ("b", 3, {"_groups-0"}), ("b", 1, set()), ("b", 0, set()), ("bc", 3, set()),
    ("abc", 3, set()),
]  # fmt: skip


@pytest.mark.parametrize(("down", "copies", "nowhere"), DOWN)
async def test_one_node_that_is_down_keeps_nobody_from_making_a_coordinator(
    down: str, copies: int, nowhere: set[str]
) -> None:
    """A new consumer group read nothing for as long as one of three nodes was down. In a
    cluster that grew from one node that one may have all that there is of it."""
    net = Net(OLD)
    net.routes.groups["_topics"] = (9, 0, tuple(range(1, copies + 1)))
    net.down = down
    wanted = {name: net._want(name) for name in EVERY}
    for _ in range(3):
        await net._locate_round()
    found = {name: one.error for name, one in wanted.items() if one.error is not None}
    assert found.keys() == nowhere and all(isinstance(error, UnknownGroup) for error in found.values())
    assert all(("b:1" in str(error)) == bool(down) for error in found.values())
    if down in ("b", "bc"):
        with pytest.raises(NotLeader, match=r"no group .log. on any node that answers; .*b:1.* can.t be reached"):
            await net._leader_link("log", Retry(net.clock(), random.Random(1), False))


class Blocking(Yard):
    """The same for the blocking client."""

    def __init__(self, there: dict[int, str]) -> None:
        self._lock, self.closed, self._chance = threading.Lock(), False, random.Random(1)
        self._routes, self._idle, self._away, self._pid = Routes(["a:1"]), {}, set(), HERE.pid
        self._routes.told(OLD)
        self.there = there
        self.down: Collection[str] = ""
        self.asked: list[str] = []

    def _take(self, address: tuple[str, int], deadline: float) -> Any:
        if address[0] in self.down:
            raise unreachable(address, "refused")

        def call(verb: str, values: Any, deadline: float) -> Any:
            self.asked.append(f"{verb} {address[0]}")
            return SimpleNamespace(error=None, value={"nodes": self.there} if verb == "cluster" else [], was_cut=False)

        return SimpleNamespace(call=call)

    def _give(self, connection: Any, broken: bool) -> None:
        return None


def test_the_blocking_client_asks_them_as_well() -> None:
    yard, retry = Blocking({**OLD, 4: "d:1"}), Retry(time.monotonic() + 9, random.Random(1), False)
    with pytest.raises(NotLeader):
        yard._leader("_groups.0", retry)
    with pytest.raises(UnknownGroup):
        yard._leader("_groups.0", retry)
    assert "locate d" in yard.asked and yard.asked.count("locate a") == 2


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize(("down", "copies", "nowhere"), DOWN)
def test_nor_does_it_with_the_blocking_client(down: str, copies: int, nowhere: set[str], name: str) -> None:
    yard, retry = Blocking(OLD), Retry(time.monotonic() + 9, random.Random(1), False)
    yard.down = down
    yard._routes.groups["_topics"] = (9, 0, tuple(range(1, copies + 1)))
    with pytest.raises(UnknownGroup if name in nowhere else NotLeader) as raised:
        yard._leader(name, retry)
    if down in ("b", "bc"):
        assert all(f"{node}:1" in str(raised.value) for node in down), "it names whom it could not ask"


def test_the_blocking_client_says_what_it_was_told_before() -> None:
    class Told(Blocking):
        def _take(self, address: tuple[str, int], deadline: float) -> Any:
            connection = super()._take(address, deadline)

            def call(verb: str, values: Any, deadline: float) -> Any:
                if verb in ("locate", "cluster"):
                    return connection.call(verb, values, deadline)
                return SimpleNamespace(error=UnknownGroup("no group 'log' on node 1"), value=None, was_cut=False)

            return SimpleNamespace(call=call)

    yard = Told(OLD)
    yard.down = "b"
    yard._routes.groups["log"] = (9, 1, (1, 2, 3))
    with pytest.raises(NotLeader, match=r"b:1 can't be reached; told before: no group 'log' on node 1"):
        yard.run(call_leader("latest", "log"), 3.0)


def test_nobody_is_asked_behind_one_that_took_all_the_time() -> None:
    """Its deadline was over: they were said to be out of reach, and their connections were closed."""
    yard, retry = Blocking(OLD), Retry(time.monotonic() - 1, random.Random(1), False)
    yard._routes.groups["log"] = (9, 0, (1, 2, 3))
    yard.down = "abc"
    tried: list[str] = []
    taking = yard._take

    def take(address: tuple[str, int], deadline: float) -> Any:
        tried.append(address[0])
        return taking(address, deadline)

    yard._take = take  # type: ignore[method-assign]
    with pytest.raises(NotLeader, match="no leader known"):
        yard._leader("log", retry)
    assert len(tried) == 1


LEFT = {1: "a:1", 2: "b:1"}


async def test_a_node_that_was_removed_is_forgotten() -> None:
    """A client that had known it named it for every new group, which was refused, and waited for it before it said
    that there is no such group."""
    net = Net(LEFT)
    net.routes.seeds.append(("c", 1))
    net.down = "c"
    wanted = net._want("log")
    for _ in range(2):
        assert wanted.error is None
        await net._locate_round()
    assert isinstance(wanted.error, UnknownGroup) and "c:1" not in str(wanted.error)
    assert await net.nodes() == [1, 2] and net.routes.seeds == [("a", 1)]
    # Nobody but itself ever named the fourth: not all nodes know where the others are.
    net.routes.addresses[4] = ("d", 1)
    net.down = "cd"
    wanted = net._want("log")
    await net._locate_round()
    assert wanted.error is None and await net.nodes() == [1, 2, 4]


async def test_who_asks_for_the_nodes_is_not_told_of_one_that_was_removed() -> None:
    net = Net(OLD)
    net._down["c", 1] = (net.clock(), 0, unreachable(("c", 1), "refused"))
    assert await net.nodes() == [1, 2, 3]
    net.there = LEFT
    assert await net.nodes() == [1, 2]


def test_the_blocking_client_forgets_it_as_well() -> None:
    yard, retry = Blocking(LEFT), Retry(time.monotonic() + 9, random.Random(1), False)
    yard._idle["c", 1] = []
    yard.down = "c"
    with pytest.raises(NotLeader):
        yard._leader("log", retry)
    with pytest.raises(UnknownGroup):
        yard._leader("log", retry)
    assert yard.nodes() == [1, 2]


def test_nor_does_it_name_that_when_it_is_asked_for_the_nodes() -> None:
    yard = Blocking(LEFT)
    assert yard.nodes() == [1, 2, 3] and not yard.asked
    yard._away.add(("c", 1))
    assert yard.nodes() == [1, 2]


def test_it_is_forgotten_under_the_name_that_a_seed_has_for_it() -> None:
    yard, retry = Blocking(LEFT), Retry(time.monotonic() + 9, random.Random(1), False)
    yard._routes.seeds = [("a", 1), ("localhost-c", 1)]
    yard._routes.greeted(cast(Any, SimpleNamespace(cluster=None, clients=OLD, node=3)), ("localhost-c", 1))
    yard.down = ("c", "localhost-c")
    yard._away.add(("c", 1))
    assert yard.nodes() == [1, 2] and yard._routes.seeds == [("a", 1)]
    with pytest.raises(UnknownGroup):
        yard._leader("log", retry)


async def test_also_by_the_other_clients() -> None:
    net = Net(LEFT)
    net.routes.seeds += [("b", 1), ("localhost-c", 1)]
    net.routes.greeted(cast(Any, SimpleNamespace(cluster=None, clients=OLD, node=3)), ("localhost-c", 1))
    net.down = ("c", "localhost-c")
    wanted = net._want("log")
    for _ in range(3):
        await net._locate_round()
    assert isinstance(wanted.error, UnknownGroup) and ("localhost-c", 1) not in net.routes.seeds


async def test_groups_without_a_leader_do_not_keep_others_from_being_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.client.network.LOCATE_NAMES", 3)
    net = Net(OLD)

    async def locate(address: tuple[str, int], names: list[str]) -> list[Any]:
        return [[name, 7, 1 if name == "led" else 0, [1, 2, 3]] for name in names]

    monkeypatch.setattr(net, "_locate", locate, raising=False)
    monkeypatch.setattr(net, "_link", lambda node: SimpleNamespace() if node else None, raising=False)
    for number in range(5):
        net._want(f"leaderless-{number}")
    wanted = net._want("led")
    for _ in range(2):
        await net._locate_round()
    assert wanted.done and wanted.error is None and len(net._wanted) == 5


async def test_nobody_looks_for_a_leader_that_nobody_waits_for_any_more(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that lost its quorum was asked about until the client ended; next to a node that hangs each round took
    two seconds, and whatever else was looked for waited for that."""
    net = Net(OLD)
    asked: list[str] = []

    async def locate(address: tuple[str, int], names: list[str]) -> list[Any]:
        asked.extend(names)
        return [[name, 7, 0, [1, 2, 3]] for name in names]

    monkeypatch.setattr(net, "_locate", locate, raising=False)

    async def ask(seconds: float) -> None:
        with pytest.raises(NotLeader):
            await net._leader_link("lost", Retry(net.clock() + seconds, net.chance, False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(net._locator)
        nursery.start_soon(net._ticks)
        lane = net.lane("lost too")
        batch, _ = lane.add(b"", b"record", 20.0)
        net.kick(lane)
        nursery.start_soon(ask, 5.0)
        await ask(10.0)
        asked.clear()
        await trio.sleep(8)
        assert set(asked) == {"lost too"}, "its record still has time"
        await trio.sleep(10)
        assert isinstance(batch.pending.error, NotLeader)
        asked.clear()
        await trio.sleep(600)
        assert not net._wanted and not asked
        # Whoever comes later is looked for again.
        lane.add(b"", b"record", 20.0)
        net.kick(lane)
        nursery.start_soon(ask, 5.0)
        await trio.sleep(3)
        assert set(asked) == {"lost", "lost too"}
        nursery.cancel_scope.cancel()
