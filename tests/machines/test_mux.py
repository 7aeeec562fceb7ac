"""Several machines in one group: whose a command is, what they do together, and their sections."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from logyard.engine.machine import (
    Append,
    Applied,
    Context,
    Machine,
    Monitor,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
    Send,
    Timer,
)
from logyard.engine.replica.log_clock import none_runs, renews
from logyard.engine.replica.machine_state import MachineState
from logyard.engine.snapshot.format import Snapshot, split
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.groups import Groups
from logyard.machines.ids import Ids
from logyard.machines.log import AppendLog
from logyard.machines.mux import OWN, THEN_MAX, Mux, envelope, then
from logyard.machines.queue import Queue
from logyard.protocol.errors import LogyardError
from logyard.testing import (
    Command,
    EndSession,
    Rehearsal,
    Step,
    Upgrade,
    Wait,
    check_deterministic,
    check_restore,
    cluster,
)
from tests.engine.replica.doubles import member_of

NAMES, TALLY, FILES = 1, 2, 3


class Names:
    """Names with the lowest free number: ``take NAME``, ``drop NAME``, ``boom`` (a bad follow-up). Each take is counted
    by the tally, in the same index. Version 2 has its names in capitals."""

    version = 2

    def __init__(self) -> None:
        self.ids = Ids()
        self.names: dict[str, int] = {}
        self.told: list[str] = []

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        verb, *rest = command.decode().split()
        dead = [Release(Position(ref.index, ref.ordinal), Position(ref.index, ref.ordinal + 1)) for ref in refs]
        if verb == "boom":
            return Applied(b"", [*dead, then(9, b"x"), then(TALLY, b"no"), then(TALLY, b"add boom")])
        name = rest[0].upper() if context.version == 2 else rest[0]
        if verb == "drop":
            if name not in self.names:
                raise Reject("unknown_name", name)
            self.ids.give(self.names.pop(name))
            return Applied(b"", dead)
        if name in self.names:
            raise Reject("taken", name)
        self.names[name] = self.ids.take()
        return Applied(b"%d" % self.names[name], [*dead, then(TALLY, f"add {name}".encode())])

    def on_then(self, context: Context, tag: int, outcome: bytes | Reject) -> None:
        self.told.append(f"{tag}: {outcome.code if isinstance(outcome, Reject) else outcome.decode()}")

    def upgrade(self, from_version: int, to_version: int) -> None:
        self.names = {name.upper(): number for name, number in self.names.items()}

    def snapshot(self) -> Sections:
        return {"names": json.dumps([self.names, self.told]).encode(), "ids": json.dumps(self.ids.pack()).encode()}

    def restore(self, sections: Sections) -> None:
        self.names, self.told = json.loads(sections["names"])
        self.ids = Ids.unpack(json.loads(sections["ids"]))

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()

    def query(self, request: bytes) -> bytes:
        return json.dumps(self.names).encode()


class Tally:
    """It counts; ``add X``, ``every MS`` (a timer that counts), ``greet N`` (a session), ``again`` (a follow-up)."""

    version = 1

    def __init__(self) -> None:
        self.count = 0

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        verb, *rest = command.decode().split()
        effects: list[Any] = [
            Release(Position(ref.index, ref.ordinal), Position(ref.index, ref.ordinal + 1)) for ref in refs
        ]
        if verb == "add":
            self.count += 1
        elif verb == "every":
            effects.append(Timer("every", context.timestamp + int(rest[0])))
        elif verb == "greet":
            effects += [Monitor(int(rest[0])), Send(int(rest[0]), b"hello")]
        elif verb == "again":
            effects.append(Append(b"add more"))
        elif verb == "loop":
            effects.append(then(TALLY, b"loop"))
            self.count += 1
        else:
            raise Reject("refused", verb)
        return Applied(b"%d" % self.count, effects)

    def on_timer(self, context: Context, name: str) -> Applied:
        self.count += 10
        return Applied(b"")

    def on_session_end(self, context: Context, session: int) -> Applied:
        self.count += 100
        return Applied(b"")

    def snapshot(self) -> Sections:
        return {"count": b"%d" % self.count}

    def restore(self, sections: Sections) -> None:
        self.count = int(sections["count"])

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()


class Files:
    """``put NAME`` keeps its payload in place of the one before; it has much state."""

    version = 1

    def __init__(self) -> None:
        self.files: dict[str, list[int]] = {}
        self.padding = "x" * 300_000

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        name = command.decode().split()[1]
        old = self.files.get(name)
        self.files[name] = [refs[0].index, refs[0].ordinal]
        return Applied(b"put", [Release(Position(*old), Position(old[0], old[1] + 1))] if old else ())

    def snapshot(self) -> Sections:
        return {"files": json.dumps([self.files, self.padding]).encode()}

    def restore(self, sections: Sections) -> None:
        self.files, self.padding = json.loads(sections["files"])

    def live_refs(self) -> Iterable[PayloadRange]:
        return [PayloadRange(Position(*at), Position(at[0], at[1] + 1)) for at in self.files.values()]


class Office(Mux):
    """Names and a tally; from version 2 on newer names, and files."""

    def __init__(self) -> None:
        super().__init__(
            {NAMES: Names, TALLY: Tally, FILES: Files},
            [{NAMES: 1, TALLY: 1}, {NAMES: 2, TALLY: 1, FILES: 1}],
        )


def names(run: Rehearsal) -> Any:
    return run.machine.parts[NAMES]  # type: ignore[attr-defined]


def tally(run: Rehearsal) -> Any:
    return run.machine.parts[TALLY]  # type: ignore[attr-defined]


SCRIPT: list[Step] = [
    *(Command(envelope(NAMES, f"take n{number}".encode())) for number in range(6)),
    Command(envelope(NAMES, b"drop n4"), (10,)),
    Command(envelope(NAMES, b"drop n1")),
    Command(envelope(NAMES, b"take again")),
    Command(envelope(9, b"what"), (7,)),
    Command(b"x"),
    Command(envelope(TALLY, b"every 500")),
    Command(envelope(TALLY, b"greet 5")),
    Command(envelope(TALLY, b"again")),
    Wait(400),
    Upgrade(2),
    Command(envelope(NAMES, b"take late", 2)),
    Command(envelope(FILES, b"put a"), (1000,)),
    Command(envelope(FILES, b"put a"), (2000,)),
    Wait(400),
    EndSession(5),
    Command(envelope(NAMES, b"boom")),
]


def test_three_machines_pass_the_checks_and_give_out_the_same_numbers() -> None:
    check_deterministic(Office, SCRIPT)
    run = check_restore(Office, SCRIPT)
    assert names(run).names == {"N0": 1, "N2": 3, "N3": 4, "N5": 6, "AGAIN": 2, "LATE": 5}
    assert list(run.live.values()) == [2000]


def test_whose_a_command_is() -> None:
    run = Rehearsal(Office)
    assert run.command(envelope(NAMES, b"take a")) == b"1"
    for command, code in [
        (envelope(FILES, b"put a"), "unknown_tag"),
        (envelope(99, b""), "unknown_tag"),
        (envelope(NAMES, b"take b", 2), "unknown_version"),
        (b"abc", "bad_envelope"),
        (envelope(NAMES, b"take a"), "taken"),
    ]:
        before = run.snapshot()
        with pytest.raises(Reject) as caught:
            run.command(command, 100)
        assert caught.value.code == code and run.snapshot() == before and not run.live
    run.step(Upgrade(2))
    assert run.command(envelope(FILES, b"put a"), 100) == b"put", "a part that a version adds"
    assert run.command(envelope(NAMES, b"take b", 2)) == b"2"
    assert json.loads(run.machine.query(envelope(NAMES, b""))) == {"A": 1, "B": 2}  # type: ignore[attr-defined]


def test_what_a_command_leads_to_happens_in_its_index() -> None:
    run = Rehearsal(Office)
    (seen,) = run.step(Command(envelope(NAMES, b"take a")))
    assert (seen.index, tally(run).count, names(run).told) == (1, 1, ["2: 1"])
    run.command(envelope(NAMES, b"boom"))
    assert names(run).told == ["2: 1", "9: unknown_tag", "2: refused", "2: 2"] and run.index == 2
    assert run.machine.overview()["refused"] == 2  # type: ignore[attr-defined]


def test_what_leads_to_itself_ends() -> None:
    run = Rehearsal(Office)
    run.command(envelope(TALLY, b"loop"))
    assert tally(run).count == 1 + THEN_MAX


def test_what_goes_out_says_whose_it_is() -> None:
    run = Rehearsal(Office)
    run.command(envelope(TALLY, b"greet 5"))
    run.command(envelope(TALLY, b"again"))
    run.command(envelope(TALLY, b"every 500"))
    assert run.effects(Send) == [Send(5, envelope(TALLY, b"hello"))]
    assert run.effects(Append) == [Append(envelope(TALLY, b"add more"))] and tally(run).count == 1
    assert list(run.timers) == ["2/every"]
    run.wait(500)
    run.step(EndSession(5))
    assert tally(run).count == 111 and run.machine.monitors == {}  # type: ignore[attr-defined]


def chunks(machine: Any, index: int) -> dict[str, tuple[bytes, ...]]:
    """The names under which sections are stored."""
    snapshot = Snapshot(1, index, 1, b"", 2, 0, 0, machine.snapshot(), b"", machine.section_versions)
    found, pieces = {}, split(snapshot)
    for name, data in snapshot.sections.items():
        found[name] = tuple(one for one, chunk in pieces.chunks.items() if bytes(chunk) in data and len(chunk) > 1000)
    return found


def test_a_part_that_nothing_happened_to_gives_the_same_sections() -> None:
    run = Rehearsal(Office)
    run.step(Upgrade(2))
    run.command(envelope(FILES, b"put a"), 5)
    machine: Any = run.machine
    first, stored = machine.snapshot(), chunks(machine, 2)
    run.command(envelope(NAMES, b"take a"))
    second = machine.snapshot()
    assert second["3.files"] is first["3.files"] and second["1.names"] != first["1.names"]
    assert chunks(machine, 3)["3.files"] == stored["3.files"] != (), "stored once, and named by both snapshots"
    assert machine.section_versions == {"1.names": 2, "1.ids": 2, "2.count": 1, "3.files": 1}


def test_a_section_of_an_older_version_is_upgraded_when_it_is_restored() -> None:
    run = Rehearsal(Office)
    run.command(envelope(NAMES, b"take a"))
    old = run.snapshot()
    run.step(Upgrade(2))
    machine: Any = run.machine
    now = run.snapshot()
    # Nothing happened to the names but the upgrade, so their section is the old one.
    assert now["1.names"] == old["1.names"] and machine.section_versions["1.names"] == 1
    again: Any = Office()
    again.restore(now)
    assert again.parts[NAMES].names == names(run).names == {"A": 1} and again.snapshot() == now
    run.command(envelope(NAMES, b"take b"))
    assert run.snapshot()["1.names"] != old["1.names"] and machine.section_versions["1.names"] == 2


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda sections: sections | {"2.count": b"many"}, ValueError),
        (lambda sections: sections | {"7.x": b""}, ValueError),
        (lambda sections: {name: data for name, data in sections.items() if name != "1.ids"}, KeyError),
        (lambda sections: sections | {OWN: b"\x94\x09\x00\x90\x90"}, ValueError),
        (lambda sections: sections | {OWN: b"\x94\x01\x00\x90\x91\x92\x01\x01"}, ValueError),
    ],
)
def test_a_restore_that_fails_leaves_everything_as_it_was(harm: Any, error: type[Exception]) -> None:
    run = Rehearsal(Office)
    run.command(envelope(NAMES, b"take a"))
    good = run.snapshot()
    other: Any = Office()
    other.apply(Context(1, 1, 1, 0, 1, 1), envelope(NAMES, b"take b"), ())
    before = dict(other.snapshot())
    with pytest.raises(error):
        other.restore(harm(good))
    assert dict(other.snapshot()) == before and other.parts[NAMES].names == {"b": 1}


def test_what_can_not_be_a_part() -> None:
    for make in (AppendLog, Queue, Groups, Catalog, TopicsAlone):
        with pytest.raises(ValueError, match="a group of its own"):
            Mux({1: make})
    with pytest.raises(ValueError, match="version 1, not 2"):
        Mux({1: Tally}, [{1: 2}])
    with pytest.raises(ValueError, match="no maker"):
        Mux({1: Tally}, [{2: 1}])


def test_only_a_mux_with_a_part_that_ticks_is_ticked() -> None:
    class Ticking(Tally):
        def on_tick(self, context: Context) -> list[Any]:
            return [Append(b"add tick"), Send(1, b"x")]

    assert not hasattr(Office(), "on_tick")
    mux: Any = Mux({4: Ticking, 2: Tally})
    context = Context(1, 1, 1, 0, 1)
    assert mux.on_tick(context) == [Append(envelope(4, b"add tick")), Send(1, envelope(4, b"x"))]


async def test_three_machines_in_one_group_of_three_nodes(tmp_path: Path) -> None:
    made: dict[str, type[Machine]] = {"office": Office}
    async with cluster(tmp_path, 3, machines=made) as run:
        await run.create("o", "office")
        for number in range(5):
            await run.command("o", envelope(NAMES, b"take n%d" % number))
        with pytest.raises(LogyardError) as caught:
            await run.command("o", envelope(99, b""), b"x" * 10_000)
        assert caught.value.code == "unknown_tag"
        for number in run.ids:
            await run.nodes[number].snapshot(["o"])
        leader = await run.leader("o")
        await run.crash(leader)
        await run.command("o", envelope(NAMES, b"drop n2"))
        await run.command("o", envelope(NAMES, b"take late"))
        await run.start(leader)
        await run.settled("o")
        states = [run.machine(number, "o").parts for number in run.ids]
        assert all(json.loads(one[NAMES].query(b"")) == json.loads(states[0][NAMES].query(b"")) for one in states)
        assert [one[TALLY].count for one in states] == [6, 6, 6]
        found = json.loads(await run.query("o", envelope(NAMES, b"")))
        assert {name.lower(): number for name, number in found.items()}["late"] == 3


class Unwilling(Tally):
    """Refuses what can't be refused any more."""

    def on_session_end(self, context: Context, session: int) -> Applied:
        raise Reject("refused", "a session's end")

    def on_then(self, context: Context, tag: int, outcome: bytes | Reject) -> None:
        raise Reject("refused", "what was asked for")


def test_a_part_that_refuses_what_has_happened_hides_it_from_nobody() -> None:
    run = Rehearsal(lambda: Mux({1: Unwilling, TALLY: Tally}))
    mux = run.machine
    assert isinstance(mux, Mux)
    for tag in (1, TALLY):
        run.command(envelope(tag, b"greet 5"))
    run.step(EndSession(5))
    assert tally(run).count == 100 and mux.refused == 1 and not mux.monitors
    assert run.command(envelope(1, b"loop"), 7) == b"1" and not run.live
    assert tally(run).count == 100 + THEN_MAX, "what was asked for was done"


class Lease(Tally):
    """It grants something for a length of time, and sets no timer."""

    granted = False

    def has_terms(self) -> bool:
        return self.granted


class Wall(Tally):
    wall_time = True


class Renewing(Tally):
    renews_terms = True


def no_term_runs(*parts: type[Tally], lease: int = 0, timers: Iterable[str] = ()) -> bool:
    """Return whether log time may jump in a group of these parts, which are 1, 2 ...; `lease` has granted something."""
    machine = Mux({tag: make for tag, make in enumerate(parts, 1)})
    if lease:
        machine.parts[lease].granted = True  # type: ignore[attr-defined]
    member, _ = member_of(machine)
    member.kept = MachineState()
    for name in timers:
        member.kept.set_timer(name, 5, True)
    return none_runs(member)


def test_a_term_of_any_part_is_heard() -> None:
    assert no_term_runs(Lease, Tally)
    assert not no_term_runs(Lease, Tally, lease=1) and not no_term_runs(Tally, Lease, lease=2)
    assert not no_term_runs(Tally, Lease, timers=["1/every"]), "a part without has_terms goes by its timers"
    assert no_term_runs(Tally, Lease, timers=["2/every"]), "a part with it does not"
    assert no_term_runs(Wall, Lease, timers=["1/every"]), "and one that grants no lengths of time has no term"

    class Inner(Mux):
        def __init__(self) -> None:
            super().__init__({1: Lease})
            self.parts[1].granted = True  # type: ignore[attr-defined]

    assert not none_runs(member_of(Mux({1: Tally, 2: Inner}))[0])


def test_what_is_said_of_time_is_said_of_all_parts() -> None:
    for parts, wall, renewing in (
        ((Wall, Wall), True, True), ((Wall, Tally), False, False), ((Renewing, Renewing), False, True),
        ((Renewing, Wall), False, True), ((Renewing, Tally), False, False),
    ):  # fmt: skip
        member, _ = member_of(Mux({tag: make for tag, make in enumerate(parts, 1)}))
        assert (member.wall_time, renews(member)) == (wall, renewing), parts
