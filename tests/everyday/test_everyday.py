"""Every cell of the everyday matrix: all verbs of all faces, together on one cluster for each situation."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import trio

from logyard.service.cli.root import cli
from logyard.service.etcd import app
from tests.source_tree import ROOT

from . import page
from .commands import COMMANDS, NO_CLIENT, PATHS
from .faces import EMBEDDED, STORE, SYNC, TRIO, Face, verbs
from .ground import EMBEDDED_SITUATIONS, Ground, embedded_face, ground
from .table import ROWS, SITUATIONS

CLIENTS = frozenset(("trio", "asyncio", "sync", "store", "gateway"))
CLI = frozenset(("cli",))


def commands(group: click.Group, above: tuple[str, ...] = ()) -> set[str]:
    found: set[str] = set()
    for name, one in group.commands.items():
        found |= commands(one, (*above, name)) if isinstance(one, click.Group) else {" ".join((*above, name))}
    return found


def test_every_public_verb_has_a_row_and_every_row_is_one() -> None:
    found = {verb for classes in (TRIO, SYNC, EMBEDDED, STORE) for verb in verbs(classes)}
    assert found == set(ROWS)
    asked = {name for name in commands(cli) if name.split()[0] not in NO_CLIENT}
    assert asked == set(COMMANDS)
    assert {*app.CALLS, *app.WAITING, *app.STREAMS} == set(PATHS)
    for row in (*ROWS.values(), *COMMANDS.values(), *PATHS.values()):
        assert {situation.rpartition("_")[2] for situation in row.expect} <= {*SITUATIONS, "embedded"}


def test_the_faces_are_one_but_for_what_has_a_reason() -> None:
    assert page.differing() == [verb for verb in page.told() if verb in page.WHY_NOT]
    assert set(page.WHY_NOT) <= set(page.told()) and set(page.COMMANDS_OF) <= set(page.told())
    assert {one for many in page.COMMANDS_OF.values() for one in many} == set(COMMANDS)


def test_the_page_is_what_the_faces_have() -> None:
    assert (ROOT / "docs" / "faces.md").read_text() == "\n".join(page.page()) + "\n", (
        "run: python -m tests.everyday.page > docs/faces.md"
    )


async def differences(face: Face, situation: str) -> list[str]:
    """The cells of a face that are not what the table says."""
    found = []
    for verb in face.rows():
        outcome, expected = await face.outcome(verb), face.row(verb).expected(face.told_as, situation)
        if outcome != expected:
            found.append(f"{face.face}: {verb}, {SITUATIONS[situation]}: {outcome}, expected {expected}")
    return found


async def everyday(of: Ground, situation: str) -> None:
    found: list[str] = []

    async def one(face: Face) -> None:
        found.extend(await differences(face, situation))

    async with trio.open_nursery() as nursery:
        for face in of.faces.values():
            nursery.start_soon(one, face)
    assert not found, "\n".join(sorted(found))


@pytest.mark.sample(2)
@pytest.mark.parametrize("situation", SITUATIONS)
async def test_clients(tmp_path: Path, situation: str) -> None:
    async with ground(tmp_path, situation, CLIENTS) as found:
        await everyday(found, situation)


@pytest.mark.long
@pytest.mark.parametrize("situation", SITUATIONS)
async def test_the_command_line(tmp_path: Path, situation: str) -> None:
    async with ground(tmp_path, situation, CLI) as found:
        await everyday(found, situation)


@pytest.mark.sample(2)
@pytest.mark.parametrize("situation", EMBEDDED_SITUATIONS)
async def test_a_system_of_ones_own_process(tmp_path: Path, situation: str) -> None:
    async with embedded_face(tmp_path, situation) as face:
        found = await differences(face, situation)
    assert not found, "\n".join(found)
