"""Whatever a machine does when it is asked something, its group alone has to do with it (law 7)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from logyard.engine.machine import (
    Append,
    Applied,
    Aux,
    Checkpoint,
    Context,
    Deliver,
    Effect,
    Monitor,
    PayloadRange,
    PayloadRef,
    Sections,
    Timer,
)
from logyard.engine.replica.member import HALTED, RUNNING, STOPPED
from logyard.testing import cluster, until
from tests.machines.faulty import Sound

SESSION = 7
HOUR_NS = 3600 * 1_000_000_000


class Whole:
    """A machine with all that a machine may have."""

    version = 2
    upgrade_on_demand = True
    wall_time = renews_terms = stays_awake = False
    inline_bytes = 1000
    section_versions: Mapping[str, int] = MappingProxyType({})

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        effects: list[Effect] = [Timer("now", context.timestamp), Timer("later", context.timestamp + 86_400_000)]
        return Applied(b"did", [*effects, Aux(b"a"), Monitor(SESSION)])

    def on_timer(self, context: Context, name: str) -> Applied:
        return Applied(b"")

    def on_session_end(self, context: Context, session: int) -> Applied:
        return Applied(b"")

    def upgrade(self, from_version: int, to_version: int) -> None:
        pass

    def on_role(self, role: str) -> Sequence[Effect]:
        return ()

    def on_listen(self, session: int) -> Sequence[Effect]:
        return ()

    def on_tick(self, context: Context) -> Sequence[Effect]:
        return ()

    def on_aux(self, data: bytes) -> None:
        pass

    def has_terms(self) -> bool:
        return True

    def jumped(self, ms: int) -> bytes:
        return b"on"

    def overview(self) -> dict[str, Any]:
        return {}

    def query(self, request: bytes) -> bytes:
        return b""

    def freeze(self) -> None:
        return None

    def snapshot(self) -> Sections:
        return {"s": b""}

    def restore(self, sections: Sections) -> None:
        pass

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()


ATTRIBUTES = (
    "version", "upgrade_on_demand", "wall_time", "renews_terms", "stays_awake", "inline_bytes", "section_versions",
)  # fmt: skip
NOWHERE = Deliver(SESSION, [SimpleNamespace(uid="?")])  # type: ignore[list-item]
NO_REPLY = ("on_aux", "upgrade", "restore", "upgrade_on_demand", "wall_time", "renews_terms", "stays_awake")
"""What they give is not looked at, or may be anything."""
ODD: dict[str, Sequence[Any]] = {
    "version": ("2", 1 << 70),
    "inline_bytes": ("a lot",),
    "section_versions": ({"s": "1"},),
    "snapshot": ({"s": "text"}, {7: b""}),
    "jumped": ("text", 1 << 70),
    "on_role": (3, [NOWHERE], [Append("text")]),  # type: ignore[arg-type]
    "on_listen": (3, [NOWHERE]),
    "on_tick": (3, [NOWHERE], [Timer("\ud800", 0)], [Checkpoint(), 3]),
    "on_timer": (None, Applied(b"", [Timer("\ud800", 0)]), Applied(b"", [3])),  # type: ignore[list-item]
}
HALTS = ("on_timer", "on_session_end", "upgrade", "version", "restore")
"""A machine that says no version is of the first one, and waits at the upgrade for a newer program."""
STOPS = ("inline_bytes", "section_versions", "snapshot", "freeze", "live_refs")
HOOKS = [name for name in vars(Whole) if not name.startswith("_") and name != "apply"]
FAULT = ZeroDivisionError()
CASES = [(name, FAULT) for name in HOOKS] + [
    (name, odd) for name in HOOKS if name not in NO_REPLY for odd in ODD.get(name, (3j,))
]


def machine(name: str, does: Any, asked: set[str]) -> type[Any]:
    """Return a class that is whole but for this one."""

    def hook(self: Any, *arguments: Any) -> Any:
        asked.add(name)
        if does is FAULT:
            raise ZeroDivisionError("a fault of this machine's own")
        return does

    return type("Odd", (Whole,), {name: property(hook) if name in ATTRIBUTES else hook})


@pytest.mark.parametrize(("name", "does"), CASES, ids=lambda one: one if type(one) is str else type(one).__name__)
async def test_a_fault_in_whatever_is_asked_of_a_machine_is_its_groups_alone(
    tmp_path: Path, name: str, does: Any
) -> None:
    asked: set[str] = set()
    limits: dict[str, Any] = {"machine_tick_ms": 20, "hibernate_after_ms": 100}
    async with cluster(tmp_path, 1, machines={"odd": machine(name, does, asked)}, **limits) as run:
        sink: Any = SimpleNamespace(push=lambda *what: None)
        run.nodes[1].system.replicas.delivery.sinks[SESSION] = sink
        await run.create("other", "kv")
        await run.create("odd", "odd")
        node, member = run.nodes[1], run.member(1, "odd")
        system = node.system
        replicas, snapshots = system.replicas, system.transfers.snapshots
        with suppress(Exception):  # a caller is told
            replicas.commands.propose(member, "register", SESSION, 1, 60_000)
            await run.command("odd", b"x")
            await replicas.commands.commit(member, "upgrade", 2)
            replicas.commands.propose(member, "expire", SESSION)
            await run.query("odd", b"", node=1)
        replicas.effects.on_listening(member, SESSION)
        node.describe("odd")
        system.clocks.wall_ns = lambda: time.time_ns() + HOUR_NS
        replicas.versions.look()
        replicas.log_clock.catch_up([member])
        await node.snapshot(["odd"])
        if member.state == RUNNING:
            await snapshots.renew(member)
        if name == "restore":
            node = await run.restart(1)
            member = run.member(1, "odd")
        await until(lambda: name in asked, "it was asked")
        await run.command("other", b"")
        state = HALTED if name in HALTS else STOPPED if name in STOPS else RUNNING
        await until(lambda: member.state == state, f"it is {state}, not {member.state}: {member.reason}")
        assert not run.failures


async def test_a_snapshot_that_is_written_anew_stops_the_group_whose_machine_fails(tmp_path: Path) -> None:
    asked: set[str] = set()
    async with cluster(tmp_path, 1, machines={"odd": machine("snapshot", FAULT, asked)}) as run:
        await run.create("odd", "odd")
        assert not await run.nodes[1].system.transfers.snapshots.renew(run.member(1, "odd"))
        assert asked and run.member(1, "odd").state == STOPPED


class Race(Sound):
    """A machine with everyday words for what is its own."""

    end = frozenset({"lap"})
    partition = groups = leases = keys = object()

    def start(self) -> int:
        return self.count


async def test_a_group_sleeps_whatever_its_machine_calls_what_is_its_own(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, machines={"race": Race}, hibernate_after_ms=200) as run:
        await run.create("race", "race")
        assert await run.command("race", b"add a") == b"1"
        await until(lambda: not any(node.system.members for node in run.nodes.values()), "all sleep")
        assert not run.failures and await run.command("race", b"add b") == b"2"
