"""When a node looks at the catalogue: once in a while, at moves more often, and at once when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.state import FOLLOWER, LEADER
from logyard.engine.transport.handler import PeerStatus, was_removed
from logyard.engine.types import Spec
from logyard.machines.catalog.logs import MAKING, RESERVED, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, NODE_REMOVED, REMOVED, SILENT, Node
from logyard.machines.catalog.section import Table
from logyard.protocol.errors import LogyardError, Refused
from logyard.service.catalog import keeper as keeping
from logyard.service.catalog.keeper import SAY_LOOKS, Keeper
from logyard.service.catalog.sleepers import WOKEN_AT_ONCE
from logyard.service.catalog.steps import listed
from logyard.service.node import _denied
from tests.machines.catalog.told import Told, wanted


def a_node(state: str) -> Node:
    return Node(state, 1, "peer", "client", 0)


class Looking(Keeper):
    """Notes when it looks. `moving`: whether there are moves."""

    def __init__(self) -> None:
        here: Any = type("Here", (), {"cluster": "c"})
        super().__init__(here, None, look_s=1.0)  # type: ignore[arg-type]  # it does nothing but look
        self.moving = False
        self.looks: list[float] = []
        self.short: list[float] = []

    async def _look(self) -> None:
        self.looks.append(round(trio.current_time(), 6))

    def _is_moving(self) -> bool:
        return self.moving

    async def _look_at_moves(self) -> None:
        self.short.append(round(trio.current_time(), 6))


async def watched(keeper: Looking, seconds: float) -> tuple[list[float], list[float]]:
    """Let it look for some seconds from here on; return when it looked, and when at moves alone."""
    began = trio.current_time()
    keeper.looks.clear()
    keeper.short.clear()
    with trio.move_on_after(seconds):
        await keeper.run()
    return tuple([round(at - began, 6) for at in some] for some in (keeper.looks, keeper.short))  # type: ignore[return-value]


async def test_it_looks_at_moves_more_often_while_there_are_any(autojump_clock: trio.testing.MockClock) -> None:
    keeper = Looking()
    assert await watched(keeper, 2.5) == ([0, 1, 2], [])
    keeper.moving = True
    looks, short = await watched(keeper, 2.1)
    assert looks == [0, 1, 2]
    assert short == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0]


async def test_it_looks_at_once_when_it_is_told_to(autojump_clock: trio.testing.MockClock) -> None:
    for moving in (False, True):
        keeper = Looking()
        keeper.moving = moving
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await trio.sleep(0.3)
            keeper.stir()
            await trio.testing.wait_all_tasks_blocked()
            assert len(keeper.looks) == 2 and len(keeper.short) == moving
            nursery.cancel_scope.cancel()


async def test_a_look_at_moves_that_is_refused_is_a_complaint(autojump_clock: trio.testing.MockClock) -> None:
    class Refusing(Keeper):
        catalog = object()  # type: ignore[assignment]

        async def _lead(self, catalog: object) -> None:
            raise Refused("not now")

    here: Any = type("Here", (), {"cluster": "c"})
    keeper = Refusing(here, None)  # type: ignore[arg-type]
    await keeper._look_at_moves()
    assert keeper.trouble == "not now"


def test_moves_stand_still_while_too_many_nodes_are_silent_or_the_plan_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Table("rows", Node)
    catalog: Any = SimpleNamespace(plan=SimpleNamespace(paused=False))
    monkeypatch.setattr(keeping, "nodes_of", lambda catalog: SimpleNamespace(rows=rows))
    monkeypatch.setattr(keeping, "plan_of", lambda catalog: catalog.plan)
    keeper = Looking()
    for number in range(1, 6):
        rows.put(number, a_node(ACTIVE))
    assert keeper._may_move(catalog) and keeper._may_move(catalog)
    for number in range(1, 5):
        rows.put(number, a_node(SILENT))
    assert not keeper._may_move(catalog), "it counts anew when something of them has changed"
    rows.put(1, a_node(ACTIVE))
    rows.put(2, a_node(ACTIVE))
    rows.put(3, a_node(ACTIVE))
    assert keeper._may_move(catalog)
    catalog.plan.paused = True
    assert not keeper._may_move(catalog)
    catalog.plan.paused = False
    # Another copy of the table, as after a snapshot, though as much was done to it.
    other = Table("rows", Node)
    for _ in range(rows.changes - 4):
        other.put(9, a_node(SILENT))
    for number in range(1, 5):
        other.put(number, a_node(SILENT))
    assert other.changes == rows.changes
    rows = other
    assert not keeper._may_move(catalog)


def test_a_view_that_was_told_is_told_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been lost with its connection, which was made anew within a look."""
    told: list[tuple[int, dict[str, Any]]] = []
    now = 100.0
    monkeypatch.setattr(keeping, "time", SimpleNamespace(monotonic=lambda: now))

    def say(node: int, view: dict[str, Any]) -> bool:
        told.append((node, view))
        return True

    here: Any = SimpleNamespace(cluster="c", node_id=1, live={1, 2}, members={}, denied=lambda having: False)
    doors: Any = SimpleNamespace(say=say, sleepers=SimpleNamespace(led=list))
    keeper = Keeper(here, doors)
    for _ in range(SAY_LOOKS):
        keeper._tell()
        now += 1.0
    assert told == [(2, {"live": [1, 2], "founded": 0})]
    keeper._tell()
    assert told == [told[0]] * 2


def here_of(node: int, live: set[int], denied: Callable[[Collection[int]], bool] = lambda having: False) -> Any:
    """What a keeper is told of its node, one of three."""
    return SimpleNamespace(
        cluster="c", node_id=node, live=live, members={}, names={}, configured={1, 2, 3}, said=dict, denied=denied
    )  # fmt: skip


async def test_a_node_that_was_removed_before_it_had_a_copy_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def change(*_: object) -> None:
        raise LogyardError("node 2 was removed", code=NODE_REMOVED)

    here = here_of(2, live={1, 2})
    doors: Any = SimpleNamespace(
        calls=SimpleNamespace(change=change), say=lambda node, view: True, sleepers=SimpleNamespace(led=list)
    )
    keeper = Keeper(here, doors)
    assert not keeper.removed
    for _ in range(3):
        await keeper._look()
    assert "node 2 was removed from this cluster" in keeper.removed and keeper.trouble == keeper.removed
    assert len(caplog.messages) == 1, "it is said once"
    with pytest.raises(Refused, match="was removed from this cluster"):
        keeper.check()


async def test_a_node_without_a_copy_that_all_others_refuse_as_removed_says_so() -> None:
    """Its copy had to go before it heard why, or it never had one and was started again."""
    denied = False
    here = here_of(3, live={3}, denied=lambda having: denied)
    keeper = Keeper(here, cast(Any, SimpleNamespace(calls=None)))
    await keeper._look()
    assert not keeper.removed
    denied = True
    await keeper._look()
    assert "node 3 was removed from this cluster" in keeper.trouble
    with pytest.raises(Refused, match="was removed from this cluster"):
        keeper.check()


def test_a_node_hears_that_it_was_removed_though_another_one_is_gone() -> None:
    """Its configuration names one that is down, or was removed as well: it said `not heard of yet` for good."""
    said = was_removed(3, 1)
    one, two = (PeerStatus(node, ("127.0.0.1", 1), False, False, 1, 0, 0, 0, "refused") for node in (1, 2))
    told = one._replace(error=f"bulk: {said}")
    assert _denied(3, [told, two], {2})
    assert not _denied(3, [one, two], {2})
    assert not _denied(3, [told, two._replace(up=True)], {2})
    assert _denied(3, [told, two._replace(up=True)], ()), "it was removed as well, and knows nothing any more"


@pytest.mark.parametrize("asked", [False, True], ids=["it looked", "it was asked"])
async def test_what_its_own_copy_said_holds_when_that_has_to_go(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said so, and then nothing for as long as not all others refused it."""

    async def nothing(catalog: object) -> None:
        return None

    def say(node: int, view: dict[str, Any]) -> bool:
        told.append(view["founded"])
        return True

    rows = Table("rows", Node)
    rows.put(2, a_node(REMOVED))
    copies: list[object] = [object()]
    monkeypatch.setattr(keeping, "catalog_of", lambda member: copies[-1])
    monkeypatch.setattr(keeping, "nodes_of", lambda catalog: SimpleNamespace(rows=rows))
    here = here_of(2, live={2})
    keeper = Keeper(here, cast(Any, SimpleNamespace(calls=None)))
    for part in ("_acquaint", "_lead", "_report", "_let_go", "_move"):
        monkeypatch.setattr(keeper, part, nothing)
    told: list[object] = []
    keeper._doors = cast(Any, SimpleNamespace(calls=None, say=say, sleepers=SimpleNamespace(led=list)))
    here.live.add(1)
    keeper._tell()
    assert told == [0], "it hears no more of what its copy is of"
    here.live.remove(1)
    if asked:
        with pytest.raises(Refused, match="was removed from this cluster"):
            keeper.check()
    else:
        await keeper._look()
    copies.append(None)
    await keeper._look()
    assert "node 2 was removed from this cluster" in keeper.trouble


async def test_creations_whose_members_are_away_wait_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was asked for 15 s in the look of the catalogue's leader, and then taken back: an import, too, whose members
    were away for a minute."""
    told: list[Any] = []

    async def change(*what: Any) -> None:
        told.append(what)

    async def finish(rows: Sequence[Any]) -> None:
        told.append(("finish", [row.uid for row in rows]))

    states = {1: ACTIVE, 2: ACTIVE, 3: SILENT, 4: DEAD, 5: REMOVED, 6: ACTIVE, 8: DEAD}
    members = {11: (3, 6, 7), 12: (1, 3, 6), 13: (1, 4, 5), 14: (1, 4), 15: (1, 2, 4), 16: (1, 4, 8)}
    rows = [Log(f"g{uid}", uid, "log", {}, some, 0, MAKING, 1) for uid, some in members.items()]
    monkeypatch.setattr(keeping, "FINISH_S", -1.0)
    monkeypatch.setattr(keeping, "logs_of", lambda catalog: SimpleNamespace(going_on=lambda: rows))
    monkeypatch.setattr(
        keeping, "nodes_of", lambda catalog: SimpleNamespace(rows=Rows({n: a_node(one) for n, one in states.items()}))
    )
    # Of the dead, 8 has returned.
    here: Any = SimpleNamespace(cluster="c", node_id=1, live={1, 2, 6, 8})
    calls = SimpleNamespace(change=change, leads=lambda: True)
    keeper = Keeper(here, cast(Any, SimpleNamespace(calls=calls, registry=None, finish=finish)))
    await keeper._let_go(cast(Any, None))
    assert told == [("logs", "undo", {"uids": [13, 14]}), ("finish", [12, 15, 16])]


class Leading:
    """A keeper that leads, of three nodes whose third is silent, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.told = 100.0, list[tuple[str, int]]()
        here: Any = SimpleNamespace(cluster="c", node_id=1, live={1, 2}, members={}, denied=lambda having: False)
        doors: Any = SimpleNamespace(calls=SimpleNamespace(leads=lambda: True, change=self.change))
        self.keeper = Keeper(here, doors, replace_after_s=600.0)
        raft = SimpleNamespace(
            configuration_index=1, commit=1, progress={}, configuration=Configuration((1, 2)), leader=1
        )
        here.members[self.keeper.uid] = SimpleNamespace(spec=SimpleNamespace(name=RESERVED), raft=raft)
        rows = [(number, a_node(state)) for number, state in enumerate((ACTIVE, ACTIVE, SILENT), 1)]
        self.keeper.views[2] = frozenset({1, 2})
        monkeypatch.setattr(keeping, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(keeping, "nodes_of", lambda catalog: SimpleNamespace(uid=self.keeper.uid, rows=rows))
        monkeypatch.setattr(keeping, "plan_of", lambda catalog: SimpleNamespace(paused=True))
        monkeypatch.setattr(keeping, "next_step", lambda *_: ())

    async def change(self, section: str, name: str, values: dict[str, Any]) -> None:
        self.told.append((name, values["node"]))

    async def run(self, seconds: int, looks: bool = True) -> None:
        """Go on for so long, without looks where one of them takes that long."""
        for _ in range(seconds):
            self.now += 1.0
            self.keeper._note_time()
            if looks:
                await self.keeper._lead(cast(Any, None))


@pytest.mark.parametrize("looks_first", [False, True])
async def test_time_in_which_the_leader_stood_still_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, looks_first: bool
) -> None:
    """Who was silent for seconds was declared dead as the leader's process went on after an hour."""
    leading = Leading(monkeypatch)
    await leading.run(5)
    leading.now += 3600.0
    if looks_first:
        await leading.keeper._lead(cast(Any, None))
    await leading.run(599)
    assert not leading.told
    await leading.run(2)
    assert leading.told[0] == ("declare_dead", 3)


async def test_a_look_that_takes_long_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creations that nobody finished are looked at one by one, and each may wait for the dead node."""
    leading = Leading(monkeypatch)
    await leading.run(5)
    await leading.run(600, looks=False)
    await leading.run(1)
    assert leading.told == [("declare_dead", 3)]


async def test_it_notes_the_time_also_while_it_looks(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    class Long(Looking):
        async def _look(self) -> None:
            await trio.sleep(100.0)

    keeper = Long()
    monkeypatch.setattr(keeping, "time", SimpleNamespace(monotonic=trio.current_time))
    silence = keeper._silence = cast(Any, object())
    await watched(keeper, 90.0)
    keeper._note_time()
    assert keeper._silence is silence


def led(uid: int) -> Any:
    """A group that is led here and that the catalogue does not know."""
    raft = SimpleNamespace(role=LEADER, term=1, base=(1, Configuration((1, 2, 3))))
    return SimpleNamespace(uid=uid, leading=True, raft=raft, spec=Spec(uid, f"g{uid}", "log", {}, (1, 2, 3), 0))


async def test_others_have_their_turn_while_it_looks_at_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what goes, or is made anew, meanwhile is not reported as it was."""
    members = {uid: led(uid) for uid in range(1, 3 * keeping.LOOKED_AT)}
    last = max(members)
    told: list[str] = []

    async def change(section: str, name: str, values: dict[str, Any]) -> None:
        told.extend(row["name"] for row in values["logs"])

    async def remove() -> None:
        turns.append(len(told))
        del members[last]
        members[last - 1] = led(last - 1)
        members[last - 1].raft.role = FOLLOWER

    turns: list[int] = []
    monkeypatch.setattr(keeping, "logs_of", lambda catalog: SimpleNamespace(of_uid=lambda uid: None))
    here: Any = SimpleNamespace(cluster="c", members=members)
    sleepers = SimpleNamespace(begin=lambda: None, look=lambda logs: listed(()))
    doors: Any = SimpleNamespace(calls=SimpleNamespace(change=change), sleepers=sleepers)
    keeper = Keeper(here, doors)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(remove)
        await keeper._report(cast(Any, None))
    assert turns == [0], "it was not looked at to the end at once"
    assert told == [f"g{uid}" for uid in range(1, last - 1)]


async def test_what_an_operator_removed_before_the_first_look_stays_removed() -> None:
    """The report of what was left was the first one, and the planner added what it missed."""
    told = Told()
    told("logs", "create", logs=[wanted("g7", 7), wanted("g8", 8)])
    members = {uid: led(uid) for uid in (7, 8)}
    members[7].raft.base = 5, Configuration((1, 2))

    async def change(section: str, name: str, values: dict[str, Any]) -> None:
        told(section, name, **values)

    here: Any = SimpleNamespace(cluster="c", members=members)
    sleepers = SimpleNamespace(begin=lambda: None, look=lambda logs: listed(()))
    keeper = Keeper(here, cast(Any, SimpleNamespace(calls=SimpleNamespace(change=change), sleepers=sleepers)))
    for _ in range(2):
        await keeper._report(told.machine)
    assert {log.name: (log.copies, log.voters) for log in told.logs} == {"g7": (2, (1, 2)), "g8": (3, (1, 2, 3))}


async def test_others_have_their_turn_while_many_groups_are_woken_to_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    roused: list[int] = []
    looked: list[dict[int, Any]] = []
    moves = {number: SimpleNamespace(uid=100 + number) for number in range(1, 101)}
    plan = SimpleNamespace(rows=Rows(moves), of={move.uid: number for number, move in moves.items()})
    monkeypatch.setattr(keeping, "plan_of", lambda catalog: plan)
    here: Any = SimpleNamespace(cluster="c", members={101: None})
    sleepers, mover = SimpleNamespace(rouse=roused.append), SimpleNamespace(look=looked.append)
    keeper = Keeper(here, cast(Any, SimpleNamespace(sleepers=sleepers, mover=mover)))
    monkeypatch.setattr(keeper, "_may_move", lambda catalog: True)

    class Steps(trio.abc.Instrument):
        """How many were roused by the end of each step of a task."""

        def __init__(self) -> None:
            self.ends = [0]

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            self.ends.append(len(roused))

    trio.lowlevel.add_instrument(steps := Steps())
    await keeper._move(cast(Any, None))
    trio.lowlevel.remove_instrument(steps)
    assert sorted(roused) == list(range(102, 201)) and looked == [moves]
    at_once = [after - before for before, after in pairwise([*steps.ends, len(roused)])]
    assert max(at_once) <= WOKEN_AT_ONCE, "a few at a time"


class Rows:
    """A table of the catalogue, as it is read."""

    def __init__(self, rows: dict[int, Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(self.rows.items())
