"""What a run of the cluster demo comes to: the judgement of its histories, its goals, and the tables for a human.

`account` is pure. Called by `service.demo.cluster` and `logyard demo --cluster`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..cli.output import Output
from .judge import Place
from .timeline import Journals, Span, holders, owners, table

SHOWN = 20
ROWS = (
    ("records acknowledged", "records"), ("consumed", "consumed"), ("lost", "lost"), ("skipped", "skipped"),
    ("read twice", "doubled"), ("of those, without a crash of their consumer", "doubled_without_crash"),
    ("members replaced of the dead node", "members_replaced"),
    ("members moved off the drained node", "members_drained"),
    ("members moved to even the nodes", "members_evened"), ("rebalances", "rebalances"),
    ("longest wait for an acknowledgement, s", "longest_send_s"), ("total time, s", "seconds"),
)  # fmt: skip


class Found(NamedTuple):
    """What a run left behind. `sent`: (key, number) of each acknowledged record, by topic and place; `killed`: when
    each consumer was killed; `moves`: those of the plan that ended; `voters` of each partition in the end, and the
    nodes that are there (`here`); `seen`: from then on, a partition's voters."""

    journals: Journals
    sent: Mapping[str, Mapping[Place, tuple[int, int]]]
    killed: Mapping[int, float]
    moves: Sequence[Mapping[str, Any]]
    voters: Mapping[tuple[str, int], Collection[int]]
    here: Collection[int]
    seen: Sequence[tuple[float, tuple[str, int], frozenset[int]]]
    began: float
    end: float
    problems: Sequence[str]


def account(found: Found, copies: int) -> dict[str, Any]:
    """Return the figures that are judged. `ok` needs every goal."""
    verdicts = [found.journals.judged(topic, sent, found.killed) for topic, sent in found.sent.items()]
    moved = [one["why"] for one in found.moves if one["outcome"] == "done" and one["kind"] == "replace"]
    fields = {
        "records": sum(one.records for one in verdicts),
        "consumed": sum(one.given for one in verdicts),
        "lost": sum(one.lost for one in verdicts),
        "skipped": sum(one.skipped for one in verdicts),
        "doubled": sum(one.doubled for one in verdicts),
        "doubled_without_crash": sum(one.doubled_without_cause for one in verdicts),
        "violations": sum(len(one.violations) for one in verdicts),
        "members_replaced": sum(why.endswith("is dead") for why in moved),
        "members_drained": sum(why.endswith("drains") for why in moved),
        "members_evened": sum("has more than" in why for why in moved),
    }
    whole = all(len(voters) == copies and set(voters) <= set(found.here) for voters in found.voters.values())
    goals = {
        "everything acknowledged was consumed": bool(fields["records"]) and not fields["lost"],
        "nothing was skipped": not fields["skipped"],
        "nothing was read twice but after a crash": not fields["doubled_without_crash"],
        "each key in order, by one owner at a time": not fields["violations"],
        "members of the dead node were replaced": fields["members_replaced"] > 0,
        "members of the drained node moved": fields["members_drained"] > 0,
        f"every partition has {copies} members on nodes that are there": whole,
        "all processes ended in order": not found.problems,
    }
    return {
        "ok": all(goals.values()), **fields, "goals": goals,
        "problems": [*found.problems, *(text for one in verdicts for text in one.violations[:SHOWN])],
        "owned": owners(found.journals, found.began, found.end), "held": holders(found.seen, found.began, found.end),
    }  # fmt: skip


def show_cluster(fields: Mapping[str, Any], output: Output) -> None:
    """Show who had what, the figures, what was done when, goals that were missed, and where the picture is."""
    owned: Sequence[Span] = fields["owned"]
    columns = ("partition", "consumers (from-to, seconds)", "nodes (from-to, seconds)")
    output.table("who had what", columns, table(owned, fields["held"]))
    output.table("logyard demo --cluster", ("what", "figure"), [(name, f"{fields[key]:,}") for name, key in ROWS])
    for at, text in fields["events"]:
        output.say(f"{at:7.1f} s  {text}")
    for goal, reached in fields["goals"].items():
        if not reached:
            output.say(f"MISSED: {goal}")
    for problem in fields["problems"]:
        output.say(f"  {problem}")
    output.say(fields["picture"] or "no picture: it is drawn with matplotlib (pip install 'logyard[spark]')")
    if fields["ok"]:
        output.say("Everything acknowledged was consumed; nothing was skipped, or read twice but after a crash.")
