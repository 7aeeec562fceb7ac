"""A catalogue that is told commands one by one, each at an index of its own."""

from __future__ import annotations

from typing import Any

from logyard.engine.machine import Context
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.command import command, question, result_of
from logyard.machines.catalog.logs import Logs
from logyard.machines.catalog.nodes import Nodes
from logyard.machines.catalog.plan import Plan


class Told:
    """Applies commands, an index and a second each. Raises what they are refused with."""

    def __init__(self, machine: Catalog | None = None) -> None:
        self.machine = machine or Catalog()
        self.index = 0

    def __call__(
        self, section: str, name: str, request: bytes | None = None, version: int = 1, /, **values: Any
    ) -> Any:
        self.index += 1
        context = Context(1, self.index, 1, self.now, self.machine.in_force)
        return result_of(self.machine.apply(context, command(section, name, values, request, version), ()).reply)

    @property
    def now(self) -> int:
        return 1000 * self.index

    def ask(self, section: str, name: str, /, **values: Any) -> Any:
        return result_of(self.machine.query(question(section, name, values)))

    @property
    def logs(self) -> Logs:
        found = self.machine.sections["logs"]
        assert isinstance(found, Logs)
        return found

    @property
    def nodes(self) -> Nodes:
        found = self.machine.sections["nodes"]
        assert isinstance(found, Nodes)
        return found

    @property
    def plan(self) -> Plan:
        found = self.machine.sections["plan"]
        assert isinstance(found, Plan)
        return found


def wanted(name: str, uid: int, *members: int, **more: Any) -> dict[str, Any]:
    """What a create says of one log."""
    return {"name": name, "uid": uid, "machine": "log", "members": members or (1, 2, 3), **more}
