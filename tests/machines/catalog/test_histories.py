"""Random histories of the catalogue, judged by what must hold of every one; the judge is tried on planted bugs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from logyard.engine.machine import Reject
from logyard.machines.catalog import At, Catalog, Section
from logyard.machines.catalog.compose import make_sections
from logyard.machines.catalog.logs import CONFLICTING, DELETING, LIVE, MAKING, NAMED, UNDOING, Logs
from logyard.machines.catalog.nodes import Nodes
from logyard.protocol.errors import LogyardError

from .told import Told, wanted

SEEDS = range(40)
STEPS = 120


class Judged:
    """A random history; `run` returns what was wrong with it."""

    def __init__(self, seed: int, make: Callable[[], Sequence[Section]] = make_sections) -> None:
        self.draw = random.Random(seed)
        self.make = make
        self.told = Told(Catalog(make))
        self.reports: dict[int, int] = {}
        self.founders: set[int] = set()
        self.numbers: set[int] = set()
        self.wrong: list[str] = []

    def run(self) -> list[str]:
        for step in range(STEPS):
            request = self.draw.randbytes(16)
            command = self.draw.choice(
                [self.create, self.decide, self.report, self.gone, self.delete, self.rename, self.take, self.found,
                 self.join]
            )()  # fmt: skip
            before = self.told.machine.snapshot() if step % 10 == 0 else None
            first = self.tell(request, *command)
            if before is not None and self.tell(request, *command) != first:
                self.wrong.append(f"{command} has two answers")
            self.note(command, first)
            self.hold()
            if step % 25 == 24:
                self.restore()
        return self.wrong

    def tell(self, request: bytes, section: str, name: str, values: Mapping[str, Any]) -> Any:
        try:
            return self.told(section, name, request, **values)
        except (LogyardError, Reject) as error:
            return error.code, str(error)

    def uid(self) -> int:
        return self.draw.randrange(1, 16)

    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted(self.draw.sample(range(1, 8), 3)))

    def create(self) -> tuple[str, str, dict[str, Any]]:
        return "logs", "create", {"logs": [wanted(self.draw.choice("abcd"), self.uid(), *self.nodes())]}

    def decide(self) -> tuple[str, str, dict[str, Any]]:
        return "logs", self.draw.choice(["live", "undo"]), {"uids": [self.uid()]}

    def report(self) -> tuple[str, str, dict[str, Any]]:
        return "logs", "report", {"logs": [(self.uid(), self.draw.randrange(0, 30), self.nodes(), ())]}

    def gone(self) -> tuple[str, str, dict[str, Any]]:
        return "logs", "gone", {"uids": list(range(1, 16)), "node": self.draw.randrange(1, 8)}

    def delete(self) -> tuple[str, str, dict[str, Any]]:
        return "logs", "delete", {"name": self.draw.choice("abcd")}

    def rename(self) -> tuple[str, str, dict[str, Any]]:
        return "logs", "rename", {"uid": self.uid(), "name": self.draw.choice("abcd")}

    def take(self) -> tuple[str, str, dict[str, Any]]:
        row = {"name": self.draw.choice("abcd"), "uid": self.uid(), "machine": "log", "voters": self.nodes()}
        return "logs", "import", {"logs": [{**row, "index": 1, "created": self.draw.randrange(9)}]}

    def found(self) -> tuple[str, str, dict[str, Any]]:
        return "nodes", "found", {"uid": self.draw.randrange(1, 3)}

    def join(self) -> tuple[str, str, dict[str, Any]]:
        if self.draw.random() < 0.5:
            return "nodes", "invite", {"hash": bytes([self.uid()] * 32), "until": 10**9}
        place = str(self.draw.random())
        return "nodes", "join", {
            "hash": bytes([self.uid()] * 32), "directory": self.uid(), "peer": place, "client": place,
        }  # fmt: skip

    def note(self, command: tuple[str, str, Mapping[str, Any]], result: Any) -> None:
        """Keep what the catalogue was told, apart from it."""
        _, name, values = command
        logs = self.told.logs
        rows = values.get("logs", ())
        if name in ("report", "import"):
            told = [(row["uid"], row["index"]) for row in rows] if name == "import" else [row[:2] for row in rows]
            for uid, index in told:
                if logs.of_uid(uid) is not None and index > 0:
                    self.reports[uid] = max(index, self.reports.get(uid, 0))
        if name == "found" and isinstance(result, int):
            self.founders.add(result)
        for uid in list(self.reports):
            if logs.of_uid(uid) is None:
                # Deleted and let go: a random number does not come again, only this history's does.
                del self.reports[uid]

    def hold(self) -> None:
        """Look at what must always hold."""
        logs = self.told.logs
        rows = list(logs)
        names = Counter(row.name for row in rows if row.state in NAMED)
        self.wrong += [f"{name!r} is {count} logs'" for name, count in names.items() if count > 1]
        self.wrong += [f"{row} is not found" for row in rows if row.state in NAMED and logs.find(row.name) != row]
        self.wrong += [
            f"{row.uid} had a leader, and is {row.state}"
            for row in rows
            if row.state in (UNDOING, MAKING) and row.uid in self.reports
        ]
        self.wrong += [
            f"{row.uid} was seen at {row.seen}, not {self.reports.get(row.uid, 0)}"
            for row in rows
            if row.seen != self.reports.get(row.uid, 0)
        ]
        held = Counter(
            node for row in rows for node in (set(row.waiting) if row.waiting else row.nodes())
        )  # fmt: skip
        self.wrong += [f"node {node} holds {held[node]}" for node in range(1, 8) if logs.held(node) != held[node]]
        for state in (MAKING, LIVE, UNDOING, DELETING, CONFLICTING):
            told = [row["uid"] for row in self.told.ask("logs", "list", state=state)]
            if sorted(told) != sorted(row.uid for row in rows if row.state == state):
                self.wrong.append(f"{state} are {told}")
        if len(self.founders) > 1:
            self.wrong.append(f"founders {sorted(self.founders)}")

    def restore(self) -> None:
        """Go on with a copy that was restored."""
        before = self.told.machine.snapshot()
        copy = Catalog(self.make)
        copy.restore(before)
        if copy.snapshot() != before:
            self.wrong.append("a restored catalogue is another one")
        self.told.machine = copy


@pytest.mark.parametrize("seed", SEEDS)
def test_what_holds_of_every_history(seed: int) -> None:
    assert Judged(seed).run() == []


class OldReportWins(Logs):
    def _report(self, at: At, uid: int, seen: int, voters: Sequence[int], learners: Sequence[int]) -> bool:
        number = self.uids.get(uid)
        row = None if number is None else self.rows.get(number)
        if number is not None and row is not None and row.seen > seen > 0 and row.state == LIVE:
            self._put(number, row._replace(seen=seen, voters=tuple(voters)))
            return True
        return super()._report(at, uid, seen, voters, learners)


class UndoesWhatHadALeader(Logs):
    def _report(self, at: At, uid: int, seen: int, voters: Sequence[int], learners: Sequence[int]) -> bool:
        number = self.uids.get(uid)
        row = None if number is None else self.rows.get(number)
        if row is not None and row.state == UNDOING:
            return False
        return super()._report(at, uid, seen, voters, learners)


class TwoFounders(Nodes):
    def _found(self, at: At, values: Mapping[str, Any]) -> Any:
        self.uid = int(values["uid"])
        return self.uid


class NamesTwice(Logs):
    def check_free(self, name: str, members: Any, system: bool = False) -> None:
        if name not in self.names or self.find(name).state == MAKING:  # type: ignore[union-attr]
            return
        super().check_free(name, members, system)


@pytest.mark.parametrize("bug", [OldReportWins, UndoesWhatHadALeader, TwoFounders, NamesTwice])
def test_a_planted_bug_is_found(bug: type[Logs] | type[Nodes]) -> None:
    def make() -> Sequence[Section]:
        if issubclass(bug, Logs):
            logs: Section = bug()
            return [logs, *(one for one in make_sections() if one.name != "logs")]
        return [bug(lambda node: 0, lambda node: 0) if one.name == "nodes" else one for one in make_sections()]

    assert any(Judged(seed, make).run() for seed in SEEDS), f"nobody noticed {bug.__name__}"
