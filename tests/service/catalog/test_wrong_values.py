"""What operators' verbs make of values that are of another kind: refused with the reason, and the catalogue goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from logyard.protocol.errors import BadRequest
from logyard.service.catalog.keeper import catalog_uid
from logyard.testing import cluster

from .test_running import founded

WRONG: list[tuple[str, str, Mapping[str, Any]]] = [
    ("nodes", "drain", {}),
    ("nodes", "drain", {"node": "x"}),
    ("nodes", "drain", {"node": float("inf")}),
    ("nodes", "update", {"node": 1, "labels": ["a"]}),
    ("nodes", "update", {"node": 1, "space": 7}),
    ("nodes", "invite", {"hash": 1 << 62, "until": 1 << 50}),
    ("nodes", "invite", {"hash": bytes(32), "until": "9" * 40}),
    ("plan", "step", {"number": None, "step": "undo"}),
]
ASKED: list[tuple[str, str, Mapping[str, Any]]] = [
    ("logs", "find", {}),
    ("logs", "find", {"uid": "x"}),
    ("logs", "list", {"limit": []}),
    ("logs", "boom", {}),
    ("boom", "list", {}),
]


async def test_a_wrong_value_is_refused_and_the_catalogue_goes_on(tmp_path: Path) -> None:
    """Some halted it on every node; the others were asked for again and again, and then `busy`."""
    async with cluster(tmp_path, 1, catalog=True) as run:
        await founded(run, 1)
        node = run.nodes[1]
        member = node.system.members[catalog_uid("testing")]
        for section, change, values in WRONG:
            with pytest.raises(BadRequest):
                await node.catalog_change(section, change, values)
            assert member.shown_state == "running", (section, change, values)
        for section, question, values in ASKED:
            with pytest.raises(BadRequest):
                await node.catalog(section, question, values, "local")
        assert await node.catalog_change("nodes", "drain", {"node": 1}) == "draining"
        assert len((await node.catalog("nodes", "list", {}, "local"))["result"]) == 1
