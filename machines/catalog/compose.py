"""Which sections the catalogue has, in which versions: the one list.

A section comes after those that it needs. One that a later version adds is named there first; what has been released
is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .cursors import Cursors
from .logs import Logs
from .nodes import Nodes
from .plan import Plan
from .section import Section

VERSIONS: Sequence[Mapping[str, int]] = (MappingProxyType({"logs": 1, "nodes": 1, "plan": 1, "cursors": 1}),)


def make_sections() -> Sequence[Section]:
    """Return fresh sections, each given what it needs of those before it."""
    plan = Plan()
    logs = Logs(plan.has)
    return plan, logs, Nodes(logs.held, logs.awaited), Cursors()
