"""Rings of system groups in running nodes."""

from __future__ import annotations

from pathlib import Path

from .rings import NAME, note, noted, notes, said


async def test_the_log_of_a_system_group_lies_in_its_ring_and_is_read_from_there(tmp_path: Path) -> None:
    async with noted(tmp_path) as c:
        await c.lead(1, NAME)
        await note(c, 1, *said(1, 8))
        await c.applied(NAME)
        for number in c.ids:
            await c.roll(number)
            member = c.member(number, NAME)
            print(member.ring, member.segments, member.flushed)
            assert not member.segments and member.ring[-1].last == member.flushed
        await note(c, 1, *said(9, 12))
        await c.applied(NAME)
        await c.close()
        for number in c.ids:
            await c.start(number)
        await c.applied(NAME)
        assert all(notes(c, number) == said(1, 12) for number in c.ids)
