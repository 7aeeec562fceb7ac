"""Planted bugs of the catalogue, each of which stories have to show: one override of product code each.

`python -m tests.sim.catalog.planted [--bug NAME] [--seed S] [--cases N] [--json] [--record]` tells cases of the stories
that a bug names, drawn by the seed, until one complains. Exit 1 for a bug that nobody noticed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from logyard.client._async.topics import Topic
from logyard.engine.host.groups import GroupRegistry
from logyard.machines.catalog.logs import Logs
from logyard.machines.log.partition import PartitionFence
from logyard.service.catalog import planner, silence
from logyard.service.catalog.births import Births
from logyard.service.catalog.keeper import Keeper

from ..bugs import Bug, edited, planted
from .cases import Case, cases_of, tell
from .stories import STORIES, Told, told

CASES = 400
RECORDED = Path(__file__).with_name("planted.json")
"""By bug: the case, or the story without a fault, that showed it when this was written."""


class Planted(NamedTuple):
    """A bug, and the stories that are to show it."""

    bug: Bug
    stories: Sequence[str]


def _none(old: Any) -> Any:
    return lambda states, zones: ""


PLANTED = (
    Planted(
        Bug(
            "no_rule_for_a_third", "while two are silent that are a third, nobody is declared dead",
            [(silence, "too_many", _none), (planner, "too_many", _none)],
        ),
        ["third"],
    ),
    Planted(
        Bug(
            "delete_for_an_orphan", "a group that the catalogue does not know is imported, never removed",
            [(Keeper, "_report", edited((
                "imports.append(_imported(member.spec, *found[1:]))",
                "await self._doors.registry.delete([uid])",
            )))],
        ),
        ["import"],
    ),
    Planted(
        Bug(
            "old_report_wins", "a report with a lower configuration index changes nothing",
            [(Logs, "_report", edited(("news = seen > row.seen", "news = seen != row.seen")))],
        ),
        ["drain", "dead", "returned"],
    ),
    Planted(
        Bug(
            "undo_of_what_had_a_leader", "what had a leader is finished, and never taken back",
            [(Logs, "_decide", edited((' and row.state == MAKING and not row.seen', ' and row.state == MAKING'))),
             (Logs, "_report", edited(("if row.state in (MAKING, UNDOING):", "if row.state == MAKING:"))),
             (GroupRegistry, "_refuse_unborn", edited((
                 "await self._gc.drop_unborn(uid)", "await self.delete([uid])"
             )))],
        ),
        ["undo"],
    ),
    Planted(
        Bug(
            "two_founders", "the catalogue is founded by the lowest configured number only, and others are refused",
            [(Keeper, "_find", edited(("here.node_id != min(here.configured)", "False"))),
             (GroupRegistry, "_check_free", edited(("spec.machine in FOUNDED", "False")))],
        ),
        ["found", "founders"],
    ),
    Planted(
        Bug(
            "a_name_is_free_at_once", "no node that has not let a deleted log go gets another one of its name",
            [(Logs, "check_free", edited(("left := set(row.waiting) & set(members)", "left := set()")))],
        ),
        ["undo", "delete"],
    ),
    Planted(
        Bug(
            "another_group_is_finished", "who finishes an intent makes the group of its number",
            [(Births, "finish", edited((
                "await self._make([row._asdict()])",
                "await self._registry.define([spec_of(row._asdict())._replace(uid=row.uid ^ 2)])",
            )))],
        ),
        ["create"],
    ),
    Planted(
        Bug(
            "gone_is_said_too_early", "a node says that it has let a log go when it has",
            [(Keeper, "_let_go", edited(("if not here.has(row.uid):", "if True:"),
                                        ("await registry.delete([row.uid])", "pass")))],
        ),
        ["delete"],
    ),
    Planted(
        Bug(
            "a_layout_before_its_fence", "a partition takes nothing of a layout before it is fenced for it",
            [(PartitionFence, "refusal", edited(("if epoch > self.epoch:", "if False:")))],
        ),
        ["shrink"],
    ),
    Planted(
        Bug(
            "nothing_is_adopted", "what producers wrote to a partition that ends is known where its slots go",
            [(Topic, "_remove", edited(("adopt_command(row.id, epoch, some)", "adopt_command(row.id, epoch, [])")))],
        ),
        ["shrink"],
    ),
)  # fmt: skip


def cases_for(one: Planted, seed: int, count: int) -> Iterator[Case | str]:
    """Yield stories without faults, then cases of those that have some, in an order that the seed draws."""
    yield from one.stories
    draw = random.Random(f"{one.bug.name} {seed}")
    found = [case for name in one.stories if STORIES[name].faults for case in cases_of(name, seed)]
    yield from draw.sample(found, min(count, len(found)))


def hunt(one: Planted, seed: int, count: int = CASES) -> tuple[Case | str | None, Told | None, int]:
    """Tell cases until one complains; return that, what it came to, and how many were told."""
    cases = list(cases_for(one, seed, count))
    with planted(one.bug):
        for number, case in enumerate(cases, 1):
            found = told(case, seed) if isinstance(case, str) else tell(case)
            if found.wrong:
                return case, found, number
    return None, None, len(cases)


def main(arguments: Sequence[str]) -> int:
    """Hunt, print, judge."""
    parser = argparse.ArgumentParser("python -m tests.sim.catalog.planted", description=__doc__)
    parser.add_argument("--bug", default="", help="only these, comma-separated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=CASES, help="so many of each at most")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write what found them for the replay")
    options = parser.parse_args(arguments)
    rows = []
    for one in PLANTED:
        if options.bug and one.bug.name not in options.bug.split(","):
            continue
        case, found, tried = hunt(one, options.seed, options.cases)
        first = found.wrong[0].splitlines()[0] if found is not None else ""
        rows.append({"bug": one.bug.name, "case": str(case) if case else None, "cases": tried, "found": first})
        if not options.json:
            print(f"{one.bug.name:28} {tried:4} cases  {case}  {first[:160] or 'NOT FOUND'}", flush=True)
    caught = sum(row["case"] is not None for row in rows)
    if options.record:
        found_by = {str(row["bug"]): row["case"] for row in rows if row["case"] is not None}
        known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        RECORDED.write_text(json.dumps({**known, **found_by}, indent=1) + "\n")
    if options.json:
        print(json.dumps({"bugs": rows, "caught": caught}))
    return 0 if caught == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
