"""What one reading gives is one log's: of another one that was made under its name meanwhile it has nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from logyard.client._async import log as log_verbs
from logyard.client._async.log import LogVerbs
from logyard.client.log import BODY_BYTES, POLL_BYTES
from logyard.machines.log import AppendLog
from logyard.protocol.errors import UnknownGroup
from logyard.service.embedded import EmbeddedLog, EmbeddedSystem, open_system

LONG = BODY_BYTES + 1
"""Bytes of a body that is read in two ranges."""


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[EmbeddedSystem]:
    async with open_system(tmp_path / "data") as found:
        yield found


async def made(system: EmbeddedSystem, body: bytes, count: int = 1) -> EmbeddedLog:
    """Make the log "l" of `count` records with that body, in place of one that is there."""
    if system.groups():
        await system.delete_group("l")
    log = await system.start_group("l", AppendLog())
    for _ in range(count):
        await log.append(b"", body)
    return log


@pytest.mark.parametrize("stop", [LONG, None])
async def test_a_body_in_ranges(system: EmbeddedSystem, stop: int | None) -> None:
    log = await made(system, b"a" * LONG)
    pieces = log.body_pieces(0, 0, stop)
    assert set(await anext(pieces)) == set(b"a")
    await made(system, b"b" * LONG)
    with pytest.raises(UnknownGroup, match="another one has its name"):
        await anext(pieces)
    assert set(await log.read_body(0)) == set(b"b")


async def test_a_body_of_a_page(system: EmbeddedSystem) -> None:
    log = await made(system, b"a" * LONG)
    page = await log.poll(0)
    await made(system, b"b" * LONG)
    with pytest.raises(UnknownGroup, match="another one has its name"):
        await log.read_body(0, 0, LONG, uid=page.uid)
    with pytest.raises(UnknownGroup, match="another one has its name"):
        await log.poll(0, uid=page.uid)


async def test_a_body_that_did_not_fit_into_its_page(system: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await made(system, b"a" * (POLL_BYTES + 1))
    plain = LogVerbs.read_body

    async def late(self: LogVerbs, *given: Any, **more: Any) -> bytes:
        await made(system, b"b" * (POLL_BYTES + 1))
        return await plain(self, *given, **more)

    monkeypatch.setattr(LogVerbs, "read_body", late)
    for reading in (log.records(), (record async for batch in log.tail(follow=False) for record in batch.records)):
        with pytest.raises(UnknownGroup, match="another one has its name"):
            await anext(reading)
    with pytest.raises(UnknownGroup, match="another one has its name"):
        await log.read(0)


async def test_records_of_several_pages(system: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_verbs, "POLL_RECORDS", 2)
    log = await made(system, b"a", 3)
    reading = log.records()
    assert (await anext(reading)).payload == b"a"
    await made(system, b"b", 3)
    with pytest.raises(UnknownGroup, match="another one has its name"):
        async for record in reading:
            assert record.payload == b"a"
