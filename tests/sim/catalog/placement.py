"""`python -m tests.sim.catalog.placement [--nodes N] [--logs L] [--story grow,...] [--seed S] [--json]`: where the
reconciler puts a hundred thousand logs on sixteen nodes.

The catalogue's machine, the reconciler and its planner and the steps of moves are the product's; groups are a
configuration and a leader each, which do what a move asks for, one step a second. Each story begins with logs on some
of the nodes and ends when a plan finds nothing. Exit 1 where members or leaders are not even (5 % above the mean), more
members moved than need be (1.1 times those above the even share), or a second run finds anything to do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from logyard.engine.machine import Context
from logyard.engine.raft.configuration import Change, Configuration, apply_changes
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.command import command, result_of
from logyard.machines.catalog.logs import LIVE, Logs
from logyard.machines.catalog.nodes import ACTIVE, DEAD, REMOVED, Nodes
from logyard.machines.catalog.plan import Move, Plan
from logyard.service.catalog.mover import WAIT, next_step
from logyard.service.catalog.planner import LEAD
from logyard.service.catalog.reconciler import Reconciler, Seen, planner_of

from ...service.catalog.steps import counted

BATCH = 1000
UNEVEN = 1.05
MOVES = 1.1
SECONDS_MAX = 20_000
PLAN_EVERY_S = 10.0


class Groups:
    """What the groups are: by uid, their members, who leads, and the index of their configuration."""

    def __init__(self) -> None:
        self.members: dict[int, Configuration] = {}
        self.leaders: dict[int, int] = {}
        self.index: dict[int, int] = {}

    def put(self, uid: int, voters: Sequence[int], leader: int) -> None:
        """Have a group."""
        self.members[uid], self.leaders[uid], self.index[uid] = Configuration(tuple(sorted(voters))), leader, 1

    def change(self, uid: int, changes: Sequence[tuple[str, int]]) -> None:
        """Change its members; a leader that goes hands over first."""
        made = apply_changes(self.members[uid], [Change(kind, node) for kind, node in changes])
        assert len(made.voters) >= len(self.members[uid].voters), f"{changes} makes {self.members[uid]} smaller"
        self.members[uid] = Configuration(made.voters, made.learners)
        self.index[uid] += 1

    def row(self, uid: int) -> list[Any]:
        """Return what its leader reports."""
        return [uid, self.index[uid], self.members[uid].voters, self.members[uid].learners]


class Placement:
    """A cluster; `seconds` and `moved` count while it settles."""

    def __init__(self, nodes: int, seed: int, zones: Sequence[str] = ("",)) -> None:
        self.draw = random.Random(seed)
        self.catalog = Catalog()
        self.groups = Groups()
        self.count = nodes
        self.seconds = self.moved = self.led = self.plan_steps = 0
        self.under_way = 0
        self._index = 0
        self.tell("nodes", "found", {"uid": 1, "nodes": [nodes]})
        for number in range(1, nodes + 1):
            said = {"peer": f"p{number}", "client": f"c{number}", "zone": zones[number % len(zones)]}
            self.tell("nodes", "hello", {"node": number, "directory": number, **said})

    def tell(self, section: str, name: str, values: Mapping[str, Any]) -> Any:
        """Apply a command. Raises what it is refused with."""
        self._index += 1
        context = Context(1, self._index, 1, 1000 * self._index, self.catalog.in_force)
        return result_of(self.catalog.apply(context, command(section, name, values), ()).reply)

    @property
    def logs(self) -> Logs:
        """The catalogue's logs."""
        found = self.catalog.sections["logs"]
        assert isinstance(found, Logs)
        return found

    @property
    def plan(self) -> Plan:
        """The catalogue's plan."""
        found = self.catalog.sections["plan"]
        assert isinstance(found, Plan)
        return found

    @property
    def nodes(self) -> Nodes:
        """The catalogue's nodes."""
        found = self.catalog.sections["nodes"]
        assert isinstance(found, Nodes)
        return found

    def fill(self, logs: int, place: Callable[[int], Sequence[int]]) -> None:
        """Make logs, each where `place` says, led by any of its members; reported by their leaders."""
        for first in range(1, logs + 1, BATCH):
            found = []
            for number in range(first, min(first + BATCH, logs + 1)):
                # Numbers as they are drawn: of many bytes, in no order.
                uid = self.draw.getrandbits(63) | 1
                voters = place(number)
                self.groups.put(uid, voters, self.draw.choice(voters))
                found.append(
                    {"name": f"log-{number:06d}", "uid": uid, "machine": "log", "created": number, "voters": voters,
                     "index": 1}
                )  # fmt: skip
            self.tell("logs", "import", {"logs": found})

    # Settling.

    def seen(self) -> Seen:
        """Return what the reconciler sees."""
        rows = dict(self.nodes.rows)
        living = {number for number, row in rows.items() if row.state not in (DEAD, REMOVED)}

        def leaders() -> dict[int, int]:
            return {uid: node for uid, node in self.groups.leaders.items() if node in living}

        return Seen(
            rows, self.logs, self.logs.of_uid, len(self.logs.rows), self.logs.revision, leaders, dict(self.plan.rows)
        )

    def settle(self) -> None:
        """Let the reconciler work until it finds nothing more."""
        reconciler = Reconciler(PLAN_EVERY_S)
        quiet = 0
        while quiet <= 3 * max(PLAN_EVERY_S, len(self.logs.rows) / 5000):
            self.seconds += 1
            assert self.seconds < SECONDS_MAX, f"it does not come to rest: {list(self.plan.rows)[:3]}"
            seen = self.seen()
            todo, steps = counted(reconciler.look(float(self.seconds), seen))
            self.plan_steps += steps
            for number in todo.undo:
                self.tell("plan", "step", {"number": number, "step": "undo"})
            for number in todo.end:
                self.tell("plan", "finish", {"number": number, "outcome": "its log is gone"})
            if todo.propose:
                self.tell("plan", "propose", {"moves": todo.propose})
            self.under_way = max(self.under_way, len(self.plan.rows))
            quiet = 0 if len(self.plan.rows) else quiet + 1
            self._do()

    def _do(self) -> None:
        """Take one step of each move."""
        rows = dict(self.nodes.rows)
        living = {number for number, row in rows.items() if row.state not in (DEAD, REMOVED)}
        for number, move in list(self.plan.rows):
            leader = self._leader(move, living)
            step = next_step(move, self.groups.members[move.uid], leader, living)
            if step.outcome:
                self.tell("logs", "report", {"logs": [self.groups.row(move.uid)]})
                self.tell("plan", "finish", {"number": number, "outcome": step.outcome})
                self.moved += move.kind != LEAD and step.outcome == "done"
                self.led += move.kind == LEAD and step.outcome == "done"
            elif step.transfer:
                self.groups.leaders[move.uid] = step.transfer
            elif step != WAIT:
                self.groups.change(move.uid, step.changes)

    def _leader(self, move: Move, living: set[int]) -> int:
        """Return who leads; somebody who lives is elected."""
        leader = self.groups.leaders[move.uid]
        if leader not in living:
            able = sorted(set(self.groups.members[move.uid].voters) & living)
            leader = self.groups.leaders[move.uid] = self.draw.choice(able)
        return leader

    # What came of it.

    def targets(self) -> list[int]:
        """Return the nodes that are to have logs."""
        return [number for number, row in self.nodes.rows if row.state == ACTIVE]

    def loads(self) -> tuple[Counter[int], Counter[int]]:
        """Return how many members, and how many leaders, each node has."""
        members = Counter(node for one in self.groups.members.values() for node in one.voters)
        return members, Counter(self.groups.leaders.values())

    def above(self) -> float:
        """Return how many members lie above the even share, on all nodes together."""
        members, _ = self.loads()
        targets = self.targets()
        share = sum(members.values()) / len(targets)
        return sum(max(0.0, count - (share if node in targets else 0)) for node, count in members.items())

    def complaints(self, allowed: float) -> Iterator[str]:
        """Yield what is not as it has to be."""
        targets = self.targets()
        for what, load in zip(("members", "leaders"), self.loads(), strict=True):
            mean = sum(load.values()) / len(targets)
            most = max(load.values())
            if most > max(UNEVEN * mean, mean + 2):
                yield f"a node has {most} {what}, {mean:.1f} in the mean"
            if strangers := set(load) - set(targets):
                yield f"nodes {sorted(strangers)} have {what}"
        if self.moved > allowed:
            yield f"{self.moved} members moved, {allowed:.0f} allowed"
        for uid, one in self.groups.members.items():
            row = self.logs.of_uid(uid)
            if row is None or row.state != LIVE or row.voters != one.voters or one.learners:
                yield f"{uid:016x} is {one}, and the catalogue has {row}"
                return
        planner = planner_of(self.seen())
        found = planner.plan()
        if found.moves or found.stuck:
            yield f"a second run finds {len(found.moves)} moves: {found.moves[:3]}, {found.stuck[:3]}"


def grow(one: Placement, logs: int) -> None:
    """All logs lie on all nodes but the last one, which is new."""
    one.fill(logs, lambda number: one.draw.sample(range(1, one.count), 3))


def double(one: Placement, logs: int) -> None:
    """Half of the nodes are new."""
    one.fill(logs, lambda number: one.draw.sample(range(1, one.count // 2 + 1), 3))


def dead(one: Placement, logs: int) -> None:
    """A node has died for good."""
    one.fill(logs, lambda number: one.draw.sample(range(1, one.count + 1), 3))
    one.tell("nodes", "declare_dead", {"node": 2})


def drain(one: Placement, logs: int) -> None:
    """A node is to be emptied."""
    one.fill(logs, lambda number: one.draw.sample(range(1, one.count + 1), 3))
    one.tell("nodes", "drain", {"node": 2})


def skew(one: Placement, logs: int) -> None:
    """Whoever made the logs liked low numbers."""

    def place(number: int) -> Sequence[int]:
        found: set[int] = set()
        while len(found) < 3:
            found.add(1 + int(one.count * one.draw.random() ** 2))
        return sorted(found)

    one.fill(logs, place)


STORIES: Mapping[str, Callable[[Placement, int], None]] = {
    "grow": grow, "double": double, "dead": dead, "drain": drain, "skew": skew,
}  # fmt: skip


def placed(story: str, nodes: int, logs: int, seed: int, zones: Sequence[str] = ("",)) -> dict[str, Any]:
    """Tell one story; return its figures, with `wrong`."""
    began = time.process_time()
    one = Placement(nodes, seed, zones)
    STORIES[story](one, logs)
    above = one.above()
    one.settle()
    members, leaders = one.loads()
    count = len(one.targets())
    # A plan is for whole members: what a share has behind the point is not to be had.
    wrong = list(one.complaints(max(MOVES * above, above + count)))
    return {
        "story": story, "nodes": nodes, "logs": logs,
        "members_max_mean": round(max(members.values()) * count / sum(members.values()), 4),
        "leaders_max_mean": round(max(leaders.values()) * count / sum(leaders.values()), 4),
        "above": round(above), "moved": one.moved, "moved_share": round(one.moved / above, 4) if above else 0.0,
        "leaders_moved": one.led, "under_way_max": one.under_way, "rounds": one.seconds, "plan_steps": one.plan_steps,
        "cpu_s": round(time.process_time() - began, 1), "wrong": wrong,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Tell them, print, judge."""
    parser = argparse.ArgumentParser("python -m tests.sim.catalog.placement", description=__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--logs", type=int, default=100_000)
    parser.add_argument("--story", default=",".join(STORIES), help=f"of {', '.join(STORIES)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    options = parser.parse_args(arguments)
    names = options.story.split(",")
    if unknown := sorted({*names} - {*STORIES}):
        parser.error(f"no story is called {', '.join(unknown)}; there are {', '.join(STORIES)}")
    rows = []
    for name in names:
        rows.append(placed(name, options.nodes, options.logs, options.seed))
        if not options.json:
            print(rows[-1], flush=True)
    failed = [row["story"] for row in rows if row["wrong"]]
    if options.json:
        print(json.dumps({"ok": not failed, "failed": failed, "stories": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
