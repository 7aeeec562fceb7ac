"""A daemon's own machines: the table [machines] of its configuration, and nothing that a client says, names code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from logyard.engine.machine import Batch, Context, Frame
from logyard.machines.log import AppendLog
from logyard.protocol.errors import BadRequest
from logyard.service.config import load_config
from logyard.service.own_machines import machine_factory
from tests.chaos.register import Registers

PLACE = "tests.chaos.register:Registers"


class Batches:
    """Has `apply_batch` alone: its group would halt at the first follow-up."""

    version = 1
    snapshot = Registers.snapshot
    restore = Registers.restore
    live_refs = Registers.live_refs

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        return Batch([b""] * len(frames))


def test_names_of_the_configuration_make_machines_beside_the_built_in_ones() -> None:
    made = machine_factory({"registers": PLACE})
    assert isinstance(made("registers", {}), Registers) and isinstance(made("log", {"start": 5}), AppendLog)
    with pytest.raises(BadRequest, match="no machine"):
        made(PLACE, {})
    with pytest.raises(BadRequest, match="registers"):
        made("registers", {"colour": "red"})


@pytest.mark.parametrize(
    ("name", "place", "why"),
    [
        ("log", PLACE, "has a machine of that name"),
        ("mine", "tests.chaos.nowhere:Registers", "nowhere"),
        ("mine", "tests.chaos.register:Nothing", "Nothing"),
        ("mine", "collections:OrderedDict", "not a machine"),
        ("mine", "os:getpid", "not a machine"),
        ("mine", f"{__name__}:Batches", "not a machine's class, it lacks apply "),
    ],
)
def test_what_is_no_machine_refuses_the_start(name: str, place: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        machine_factory({name: place})


def test_the_configurations_table(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    node = '[node]\nid = 1\ndirectory = "data"\n[machines]\n'
    path.write_text(f'{node}registers = "{PLACE}"\n')
    assert load_config(path, {}).machines == {"registers": PLACE}
    for wrong in ('registers = "no place"', 'registers = "os.system"', "registers = 5", '"a b" = "a:B"'):
        path.write_text(node + wrong)
        with pytest.raises(BadRequest, match=r"machines\."):
            load_config(path, {})
