"""The real recovery on one crash state, and what it must bring back.

Expected is what the marks before the cut say: what was acknowledged is there, whole and in its place; what is there was
asked for; nothing is there twice; a group that was deleted stays away, one that was created is there. Then the node
must go on: a record is appended, the node stopped and started again, and everything holds still. Before all that, who
reads the stopped directory must find in it what a start does (`agree`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import trio

from logyard.machines.log import AppendLog
from logyard.protocol.errors import LogyardError
from logyard.service import embedded
from tests.inside import engine_of
from tests.notes import Notes, machines

from .agree import disagreements
from .events import MARK, Event
from .states import materialise
from .workload import CONFIG, MACHINES, body

PATIENCE_S = 20.0


class Expected:
    """What is known of every group when so many marks were written."""

    def __init__(self) -> None:
        self.asked: dict[str, set[int]] = {}
        self.acknowledged: dict[str, dict[int, int]] = {}
        self.start_least: dict[str, int] = {}
        self.start_most: dict[str, int] = {}
        self.made: set[str] = set()
        self.leaving: set[str] = set()
        self.gone: set[str] = set()
        self.batches: dict[int, set[str]] = {}

    def take(self, data: bytes) -> None:
        """A line of the workload's."""
        row = json.loads(data)
        log = row["log"]
        if row.get("do") == "create":
            # A name that was deleted may be made anew: until that is done it is there or not.
            for names in (self.made, self.leaving, self.gone):
                names.discard(log)
            self.asked[log], self.acknowledged[log] = set(), {}
            self.start_least[log] = self.start_most[log] = 0
            self.batches.setdefault(row.get("batch", 0), set()).add(log)
        elif row.get("done") == "create":
            self.made.add(log)
        elif row.get("do") == "delete":
            self.leaving.add(log)
        elif row.get("done") == "delete":
            self.gone.add(log)
        elif row.get("do") in ("append", "note"):
            self.asked[log].add(row["number"])
        elif row.get("done") == "append":
            self.acknowledged[log][row["offset"]] = row["number"]
        elif row.get("done") == "note":
            self.acknowledged[log][row["number"]] = row["number"]
        elif row.get("do") == "truncate":
            self.start_most[log] = max(self.start_most[log], row["before"])
        elif row.get("done") == "truncate":
            self.start_least[log] = max(self.start_least[log], row["before"])


def expectations(events: Iterable[Event], number: int) -> Expected:
    """What the first `number` events say."""
    found = Expected()
    for at, event in enumerate(events):
        if at >= number:
            break
        if event.kind == MARK:
            found.take(event.data)
    return found


async def contents(system: embedded.EmbeddedSystem, log: embedded.EmbeddedLog) -> tuple[int, list[bytes]]:
    """(start, payloads) of a log."""
    start, _ = log.bounds()
    return start, [bytes(record.payload or b"") async for record in log.records()]


async def examine(path: Path, want: Expected, again: bool, extra: dict[str, int]) -> list[str]:
    """Open the directory; what is wrong. `extra`: records that an earlier examination appended."""
    wrong: list[str] = []
    with trio.fail_after(PATIENCE_S):
        async with embedded.open_system(path, CONFIG, machines=MACHINES) as system:
            there = {str(row["name"]) for row in system.groups()}
            wrong += [f"{name} is not there" for name in sorted(want.made - want.leaving - there)]
            wrong += [f"{name} is there again" for name in sorted(want.gone & there)]
            for number, batch in want.batches.items():
                if number and batch & there and batch - there - want.leaving:
                    wrong.append(f"of batch {number} there is {sorted(batch & there)} alone")
            wrong += [f"{name} is there, which nobody created" for name in sorted(there - want.asked.keys())]
            for name in sorted(there & want.asked.keys()):
                if name in want.leaving:
                    continue
                if name.startswith("_"):
                    wrong += [f"{name}: {found}" for found in await examine_notes(system, name, want, again, extra)]
                    continue
                log = await system.start_group(name, AppendLog())
                start, payloads = await contents(system, log)
                wrong += [f"{name}: {found}" for found in judge(name, start, payloads, want, extra.get(name))]
                if not again:
                    extra[name] = await log.append(b"", b"after")
            if (damage := (await system.status())["damage"]) and any(damage.values()):
                wrong.append(f"damage after a mere crash: {damage}")
    return wrong


async def examine_notes(
    system: embedded.EmbeddedSystem, name: str, want: Expected, again: bool, extra: dict[str, int]
) -> list[str]:
    """What is wrong with a system group; one more command goes to it."""
    await system.start_group(name, Notes())
    machine = engine_of(system).member(name).machine
    assert isinstance(machine, Notes)
    wrong = judge_notes(machine.notes[: extra.get(name)], want.asked[name], want.acknowledged[name])
    if name in extra and machine.notes[extra[name] :] != [b"after"]:
        wrong.append("what the first recovery added is not there")
    if not again:
        extra[name] = len(machine.notes)
        await system.machine(name).command(b"after")
    return wrong


def judge_notes(notes: list[bytes], asked: set[int], acknowledged: dict[int, int]) -> list[str]:
    """What is wrong with the content of a system group. Its commands came one after the other."""
    numbers = [int(one.rstrip(b"\0")) for one in notes]
    wrong = [f"{number} is there, which nobody wrote" for number in sorted(set(numbers) - asked)]
    wrong += [f"{number} was acknowledged and is not there" for number in sorted(acknowledged.keys() - set(numbers))]
    return wrong if numbers == sorted(set(numbers)) else [*wrong, f"they are not in order: {numbers}"]


def judge(name: str, start: int, payloads: list[bytes], want: Expected, extra: int | None) -> list[str]:
    """What is wrong with a log's content."""
    wrong = []
    if not want.start_least[name] <= start <= want.start_most[name]:
        wrong.append(f"begins at {start}, not between {want.start_least[name]} and {want.start_most[name]}")
    seen: set[int] = set()
    for offset, payload in enumerate(payloads, start):
        if offset == extra:
            if payload != b"after":
                wrong.append(f"{offset} is not what the first recovery appended")
            continue
        number = int.from_bytes(payload[:8], "big")
        if payload != body(number) or number not in want.asked[name]:
            wrong.append(f"{offset} holds {len(payload)} bytes that nobody appended")
        elif number in seen:
            wrong.append(f"{number} is there twice")
        seen.add(number)
    for offset, number in want.acknowledged[name].items():
        if offset >= start and (offset - start >= len(payloads) or payloads[offset - start] != body(number)):
            wrong.append(f"{number} was acknowledged at {offset} and is not there")
    return wrong


def verify(state: dict[str, bytes | None], want: Expected, root: Path) -> list[str]:
    """Recover a state in a fresh directory, twice; what is wrong. The directory is left if something is."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o700)
    materialise(state, root)
    extra: dict[str, int] = {}
    wrong: list[str] = []
    for again in (False, True):
        try:
            if not again and (root / "meta").is_dir():
                wrong += trio.run(disagreements, root, root.with_name(f"{root.name}-copy"), CONFIG, machines)
            wrong += trio.run(examine, root, want, again, extra)
        except (LogyardError, ExceptionGroup, OSError, trio.TooSlowError, AssertionError) as error:
            inner = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            wrong.append(f"{'second' if again else 'first'} recovery: {type(inner).__name__}: {inner}")
        if wrong:
            return wrong
    shutil.rmtree(root)
    return []
