"""Each step of a move, read off its group's configuration; and what of a plan is begun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.raft.configuration import Change, Configuration, apply_changes
from logyard.engine.raft.state import LEADER
from logyard.machines.catalog.logs import DELETING, LIVE, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, REMOVED, RETURNED, SILENT, Node
from logyard.machines.catalog.plan import REFUSED, Ended, Move
from logyard.protocol.errors import Refused
from logyard.service.catalog.mover import APART_S, REFUSALS_MAX, UNDO, WAIT, Mover, Step, next_step
from logyard.service.catalog.mover import AT_ONCE as MOVES
from logyard.service.catalog.planner import ROWS_AT_ONCE, Plan
from logyard.service.catalog.reconciler import (
    AT_ONCE,
    AVOID_S,
    PER_NODE,
    STEPS_MAX,
    Doing,
    Reconciler,
    Seen,
    planner_of,
)
from logyard.service.catalog.steps import ITEMS

from .steps import counted


def move(kind: str, source: int, target: int, step: str = "proposed", why: str = "node 3 is dead") -> Move:
    return Move(7, kind, source, target, why, 0, step)


@pytest.mark.parametrize("first", [1, 3], ids=["follower", "leader"])
@pytest.mark.parametrize("voters", [(3,), (1, 2, 3)])
def test_a_member_is_replaced_whoever_leads(first: int, voters: tuple[int, ...]) -> None:
    leader = first if first in voters else 3
    configuration, seen = Configuration(voters), []
    for _ in range(8):
        step = next_step(move("replace", 3, 4), configuration, leader, {1, 2, 3, 4})
        seen.append(step)
        if step.outcome:
            break
        if step.transfer:
            assert step.transfer in configuration.voters
            leader = step.transfer
            continue
        made = apply_changes(configuration, [Change(*change) for change in step.changes])
        assert len(made.voters) >= len(voters)
        configuration = Configuration(made.voters, made.learners)
    assert seen[-1].outcome == "done" and configuration == Configuration(tuple(sorted({*voters, 4} - {3})))
    if len(voters) == 3:
        assert Step((("promote", 4), ("remove", 3))) in seen, "in one joint change"


def test_nobody_votes_who_has_not_caught_up_and_a_joint_one_is_waited_for() -> None:
    learning = Configuration((1, 2, 3), (4,))
    assert next_step(move("replace", 3, 4), learning, 1, {1, 2}) == WAIT
    joint = Configuration((1, 2, 4), (), (1, 2, 3), auto_leave=True)
    assert next_step(move("replace", 3, 4), joint, 1, {1, 2, 4}) == WAIT


def test_what_is_given_up_takes_its_learner_back() -> None:
    learning = Configuration((1, 2, 3), (4,))
    given = move("replace", 3, 4, UNDO)
    assert next_step(given, learning, 1, {1, 2, 3, 4}) == Step((("remove", 4),))
    assert next_step(given, Configuration((1, 2, 3)), 1, set()) == Step(outcome="cancelled")
    assert next_step(given, Configuration((1, 2, 4)), 1, set()).outcome == "cancelled", "too late"


def test_leaderships_additions_and_removals() -> None:
    three = Configuration((1, 2, 3))
    assert next_step(move("lead", 1, 2), three, 1, {1, 2}) == Step(transfer=2)
    assert next_step(move("lead", 1, 2), three, 2, {1, 2}) == Step(outcome="done")
    assert next_step(move("lead", 1, 4), three, 1, {1, 2}).outcome == "its target has no vote"
    assert next_step(move("add", 0, 4), three, 1, set()) == Step((("add_learner", 4),))
    assert next_step(move("add", 0, 4), Configuration((1, 2, 3), (4,)), 1, {4}) == Step((("promote", 4),))
    assert next_step(move("remove", 3, 0), Configuration((1, 2), (3,)), 1, set()) == Step((("remove", 3),))
    assert next_step(move("remove", 3, 0), Configuration((1, 2)), 1, set()) == Step(outcome="done")


class Calls:
    """The catalogue: its answers wait for `open`; `refuses` says how many of the next are refused."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []
        self.open = trio.Event()
        self.refuses = 0

    async def change(self, section: str, name: str, values: Any) -> None:
        self.told.append((section, name, values["logs" if section == "logs" else "moves"]))
        await self.open.wait()
        if self.refuses:
            self.refuses -= 1
            raise Refused("no leader")


async def test_ends_that_come_while_one_is_told_are_told_together(autojump_clock: trio.testing.MockClock) -> None:
    """Each is a move that has found its group as it is to be; none is taken up again before its end is told."""
    calls: Any = Calls()
    moves = {number: Move(number, "replace", 3, 4, "node 3 is dead", 0) for number in range(1, 6)}
    done = Configuration((1, 2, 4))
    members: Any = {
        uid: SimpleNamespace(
            uid=uid, leading=True, spec=SimpleNamespace(name=f"log-{uid}"),
            raft=SimpleNamespace(
                role=LEADER, node=1, commit=9, configuration=done, configuration_index=5, progress={}, base=(5, done),
                term=2,
            ),
        )
        for uid in moves
    }  # fmt: skip
    nothing: Any = None
    async with trio.open_nursery() as nursery:
        mover = Mover(calls, members, {1, 2, 4}, moves.get, nothing, nothing, nursery.start_soon)
        mover.look({1: moves[1]})
        await trio.sleep(1)
        mover.look(moves)
        mover.look(moves)
        await trio.sleep(1)
        row = (1, 5, done.voters, done.learners)
        assert calls.told == [("logs", "report", [row])]
        calls.refuses = 1
        calls.open.set()
        await trio.sleep(1)
    assert [(section, name, len(values)) for section, name, values in calls.told] == [
        ("logs", "report", 1), ("logs", "report", 4), ("plan", "finish", 4),
    ]  # fmt: skip
    async with trio.open_nursery() as nursery:
        mover._spawn = nursery.start_soon
        mover.look({1: moves[1]})
    assert calls.told[-1] == ("plan", "finish", [(1, "done")]), "what could not be told is found again"


async def test_moves_of_one_look_begin_one_after_the_other(autojump_clock: trio.testing.MockClock) -> None:
    """Sixty at once are a turn of the loop that everybody else would wait for."""
    began: list[float] = []

    def find(number: int) -> None:
        began.append(trio.current_time())

    members: Any = {
        uid: SimpleNamespace(leading=True, raft=SimpleNamespace(role=LEADER)) for uid in range(1, 2 * MOVES + 1)
    }
    nothing: Any = None
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        mover = Mover(nothing, members, set(), find, nothing, nothing, nursery.start_soon)
        mover.look({uid: Move(uid, "replace", 3, 4, "node 3 is dead", 0) for uid in members})
    assert [round((at - start) / APART_S) for at in began] == list(range(MOVES))


async def test_moves_that_do_not_go_on_do_not_keep_out_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """There are as many as places; each ends its task at once, and the next look begins behind them."""
    began: list[int] = []
    members: Any = {
        uid: SimpleNamespace(leading=True, raft=SimpleNamespace(role=LEADER)) for uid in range(1, 2 * MOVES + 1)
    }
    nothing: Any = None
    moves = {uid: Move(uid, "replace", 3, 4, "node 3 is dead", 0) for uid in members}
    async with trio.open_nursery() as nursery:
        mover = Mover(nothing, members, set(), began.append, nothing, nothing, nursery.start_soon)
        for _ in range(3):
            mover.look(moves)
            await trio.sleep(1)
    assert began[: 2 * MOVES] == [*moves] and began[2 * MOVES :] == [*moves][:MOVES]


async def test_a_node_that_refuses_is_not_asked_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    """A halted member takes no leadership over, and a node that lacks a machine's code is no member of its groups."""
    calls: Any = Calls()
    calls.open.set()
    three, asked = Configuration((1, 2, 3)), list[Any]()
    moves = {
        1: Move(1, "lead", 1, 3, "node 1 leads more than 3", 0), 2: Move(2, "replace", 2, 4, "node 2 drains", 0),
        3: Move(3, "remove", 1, 0, "node 1 drains", 0),
    }  # fmt: skip
    progress = {number: SimpleNamespace(match=9) for number in (2, 3)}
    members: Any = {
        uid: SimpleNamespace(
            uid=uid, leading=True, spec=SimpleNamespace(name=f"log-{uid}"),
            raft=SimpleNamespace(
                role=LEADER, node=1, commit=9, configuration=three, configuration_index=5, progress=progress,
                base=(5, three), term=2,
            ),
        )
        for uid in moves
    }  # fmt: skip

    async def refuses(name: str, what: object) -> None:
        asked.append((name, what))
        raise Refused(f"{name}: no")

    async with trio.open_nursery() as nursery:
        mover = Mover(calls, members, {1, 2, 3, 4}, moves.get, refuses, refuses, nursery.start_soon)
        for _ in range(2 * REFUSALS_MAX):
            over = {number for _, name, rows in calls.told if name == "finish" for number, _ in rows}
            for number in over:
                moves.pop(number, None)
            mover.look(moves)
            await trio.sleep(1)
    ends = dict(row for _, name, rows in calls.told if name == "finish" for row in rows)
    assert ends == {1: "refused: log-1: no", 2: "refused: log-2: no"}
    assert Counter(name for name, _ in asked) == {"log-1": 1, "log-2": REFUSALS_MAX, "log-3": 2}
    assert {what for name, what in asked if name == "log-3"} == {2, 3}, "each once in a while"


def node(state: str = ACTIVE) -> Node:
    return Node(state, 1, "", "", 0)


class World:
    """What a reconciler sees; it is looked at once a second."""

    def __init__(self, nodes: int, logs: int) -> None:
        self.nodes = {number: node() for number in range(1, nodes + 1)}
        self.logs = {
            uid: Log(f"log-{uid}", uid, "log", {}, (1, 2, 3), 0, LIVE, 1, seen=1, voters=(1, 2, 3), copies=3)
            for uid in range(1, logs + 1)
        }
        self.moves: dict[int, Move] = {}
        self.reconciler = Reconciler(10.0)
        self.now = 0.0
        self.revision = 0
        self.planned = self.steps = 0
        self.ended: list[Ended] = []

    def seen(self, logs: Iterable[Log]) -> Seen:
        return Seen(
            self.nodes, logs, self.logs.get, len(self.logs), self.revision, dict, self.moves, self.ended
        )  # fmt: skip

    def plan(self) -> Plan:
        return planner_of(self.seen(self.logs.values()), self.reconciler.avoided).plan()

    def look(self) -> Doing:
        self.now += 1.0

        def iterated() -> Iterator[Log]:
            self.planned += 1
            yield from self.logs.values()

        class Logs:
            def __iter__(self) -> Iterator[Log]:
                return iterated()

        found, steps = counted(self.reconciler.look(self.now, self.seen(Logs())))
        self.steps += steps
        return found

    def take(self, doing: Doing) -> None:
        """Have its moves under way."""
        for row in doing.propose:
            number = max(self.moves, default=0) + 1
            self.moves[number] = Move(row["uid"], row["kind"], row["source"], row["target"], row["why"], 0)

    def finish(self) -> None:
        """Do what is under way."""
        for one in self.moves.values():
            voters = tuple(sorted({*self.logs[one.uid].voters, one.target} - {one.source}))
            self.logs[one.uid] = self.logs[one.uid]._replace(voters=voters)
            self.revision += 1
        self.moves.clear()


def test_what_is_begun_is_bounded_and_the_rest_follows() -> None:
    world = World(4, 1000)
    world.nodes[3] = node(DEAD)
    first = world.look()
    assert len(first.propose) == PER_NODE, "all of it goes to node 4"
    world.take(first)
    assert world.look().propose == [] and world.planned == 1
    counts = []
    for _ in range(8):
        world.finish()
        world.take(world.look())
        counts.append(len(world.moves))
    assert counts[:5] == [PER_NODE] * 4 + [1000 - 5 * PER_NODE] and world.planned == 1, "of the one plan"
    assert {row.voters for row in world.logs.values()} == {(1, 2, 4)}
    for _ in range(40):
        assert world.look() == Doing([], [], [])
    assert world.planned == 2, "where nothing changes, nothing is planned again"


def test_what_a_node_refused_it_is_not_offered_again_for_a_while() -> None:
    world = World(5, 8)
    world.nodes[3] = node(DEAD)
    world.take(world.look())
    first = {move.uid: move.target for move in world.moves.values()}
    assert {*first.values()} == {4, 5}
    world.ended = [Ended(number, tuple(move), f"{REFUSED}no", 0) for number, move in world.moves.items()]
    world.moves.clear()
    world.now += 10
    world.take(world.look())
    second = {move.uid: move.target for move in world.moves.values()}
    assert second == {uid: 9 - target for uid, target in first.items()}
    ended = [Ended(100 + number, tuple(move), f"{REFUSED}no", 0) for number, move in world.moves.items()]
    world.ended += ended
    world.moves.clear()
    for _ in range(20):
        assert world.look().propose == [], "nobody takes them"
    stuck = world.plan().stuck
    assert len(stuck) == 8 and stuck[0].why.endswith("; node 4 refused it; node 5 refused it")
    world.now += AVOID_S
    assert len([*world.look().propose, *world.look().propose]) == 8


def test_a_refusal_that_ends_after_a_later_move_counts_too() -> None:
    """Moves end as their groups let them: only those with a higher number than the last one were looked at."""
    world = World(5, 2)
    world.nodes[3] = node(DEAD)
    world.take(world.look())
    slow, quick = world.moves[1], world.moves.pop(2)
    voters = tuple(sorted({1, 2, quick.target}))
    world.logs[quick.uid] = world.logs[quick.uid]._replace(voters=voters)
    world.ended = [Ended(2, tuple(quick), "done", 0)]
    world.look()
    world.moves.clear()
    world.ended.append(Ended(1, tuple(slow), f"{REFUSED}no", 0))
    world.now += 10
    (row,) = world.look().propose
    assert (row["uid"], row["target"]) == (slow.uid, 9 - slow.target)


def test_many_nodes_share_what_is_begun() -> None:
    world = World(40, 1000)
    world.nodes[3] = node(DEAD)
    assert len(world.look().propose) == AT_ONCE


def test_a_plan_is_made_in_steps() -> None:
    world = World(4, STEPS_MAX * ROWS_AT_ONCE // 2)
    world.nodes[3] = node(DEAD)
    counts = [len(world.look().propose) for _ in range(4)]
    assert counts[0] == 0 and counts[-1] == PER_NODE and STEPS_MAX < world.steps < 3 * STEPS_MAX


def test_few_logs_are_looked_up_in_a_step() -> None:
    """What is begun, and what is under way: hundreds at once would hold up everybody's appends."""
    world = World(40, 4 * AT_ONCE)
    world.nodes[3] = node(DEAD)
    asked: list[int] = []
    for _ in range(3):
        found = 0

        def find(uid: int) -> Log | None:
            nonlocal found
            found += 1
            return world.logs.get(uid)

        seen = Seen(world.nodes, world.logs.values(), find, len(world.logs), 0, dict, world.moves)
        steps = world.reconciler.look(world.now, seen)
        try:
            while True:
                found = 0
                next(steps)
                asked.append(found)
        except StopIteration as end:
            asked.append(found)
            world.take(end.value)
        world.now += 1.0
    assert len(world.moves) == AT_ONCE and max(asked) <= ITEMS and sum(asked) >= 3 * AT_ONCE


def test_a_move_is_begun_only_where_it_is_still_needed() -> None:
    world = World(4, 600)
    world.nodes[3] = node(DEAD)
    world.take(world.look())
    left = [uid for uid in world.logs if uid not in {move.uid for move in world.moves.values()}]
    moved, gone = left[:10], left[10:20]
    for uid in moved:
        world.logs[uid] = world.logs[uid]._replace(voters=(1, 2, 4))
    for uid in gone:
        del world.logs[uid]
    while world.moves:
        assert not {move.uid for move in world.moves.values()} & {*moved, *gone}
        world.finish()
        world.take(world.look())


def test_what_changes_among_the_nodes_is_planned_for_at_once() -> None:
    world = World(5, 600)
    world.nodes[3] = node(DEAD)
    world.take(world.look())
    world.finish()
    world.nodes[4] = node(DRAINING)
    found = world.look().propose
    assert found and {row["target"] for row in found} == {5} and world.planned == 2


def test_nothing_is_begun_while_a_third_is_silent() -> None:
    world = World(6, 600)
    world.nodes[3] = node(DEAD)
    assert world.look().propose
    for number in (5, 6):
        world.nodes[number] = node(SILENT)
    assert world.look().propose == []


def test_what_is_in_vain_is_given_up() -> None:
    world = World(4, 1)
    world.nodes[3] = node(DEAD)
    world.moves[1] = move("replace", 3, 4)._replace(uid=1)
    assert world.look() == ([], [], []), "it moves already"
    world.nodes[3] = node(RETURNED)
    assert world.look().undo == [1]
    world.nodes[3], world.nodes[4] = node(DEAD), node(DEAD)
    assert world.look().undo == [1]
    world.logs.clear()
    assert world.look().end == [1]


def test_a_move_ends_with_its_log_though_that_waits_for_the_dead() -> None:
    """It was under way for ever: of these so many, and nothing was begun any more for any log."""
    world = World(4, 2 * PER_NODE)
    world.nodes[3] = node(DEAD)
    world.take(world.look())
    for one in world.moves.values():
        world.logs[one.uid] = world.logs[one.uid]._replace(state=DELETING, waiting=(3,))
    found = world.look()
    assert found.end == list(world.moves) and not found.propose
    world.moves.clear()
    assert len(world.look().propose) == PER_NODE


def test_a_move_to_who_was_removed_is_given_up() -> None:
    world = World(4, 1)
    world.nodes[3], world.nodes[4] = node(DEAD), node(REMOVED)
    world.moves[1] = move("replace", 3, 4)._replace(uid=1)
    assert world.look().undo == [1]
