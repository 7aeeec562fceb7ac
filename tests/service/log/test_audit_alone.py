"""An audit of one copy, alone: what is missing, what is damaged, and that nothing of a peer is asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from logyard.engine.entry import Entry
from logyard.engine.replica.reader import Located
from logyard.machines.log.machine import AppendLog
from logyard.protocol.errors import Gone
from logyard.service.log.audit import LogAudit, Stored

from ..rig import Group

LARGE = b"L" * 9000


class Rig(Group):
    """Its entries lie in WAL file 3; `rotten` are those whose bytes changed, `gone` those whose file is no more."""

    def __init__(self) -> None:
        super().__init__(AppendLog())
        self.rotten: set[int] = set()
        self.gone: set[int] = set()
        self.pinned: list[tuple[str, int]] = []
        self.needed = 0
        store: Any = self
        stored = Stored(store, self.in_the_wal, self.read_wal, self)
        self.audits = LogAudit(7, self.find, stored, lambda member, index: self.needed)

    def home(self, uid: int, index: int) -> None:
        return None

    def homes(self, uid: int) -> list[Any]:
        return []

    def in_the_wal(self, member: Any, first: int, last: int) -> Any:
        for located in self.payload_entries(member, first, last):
            entry = cast(Entry, located.entry)
            away = Entry(entry.index, entry.term, entry.kind, entry.data, None, entry.body_bytes)
            away.file, away.offset = 3, 1_000_000 * entry.index
            yield Located(located.index, located.term, located.data, away, None)

    def read_wal(self, file: int, offset: int, length: int) -> bytes:
        assert self.pinned and file == 3, "a home is not destroyed while it is read"
        index, at = divmod(offset, 1_000_000)
        if index in self.gone:
            raise Gone("it is")
        data = bytearray(b"".join(bytes(body) for body in self.entries.entries[index - 1].bodies or ()))
        if index in self.rotten:
            data[at] ^= 1
        return bytes(data[at : at + length])

    def pin(self, home: tuple[str, int]) -> None:
        self.pinned.append(home)

    def unpin(self, home: tuple[str, int]) -> None:
        self.pinned.remove(home)

    async def audit(self, index: int = 0, offset: int = 0, size: int = 1 << 30) -> dict[str, Any]:
        found = await self.audits.audit("a", 0, index, offset, size)
        assert not self.pinned and not self.fetched
        return found


async def test_a_sound_copy_has_all_its_records() -> None:
    rig = Rig()
    rig.append(b"0", LARGE)
    rig.append(b"2")
    found = await rig.audit()
    assert (found["entries"], found["units"], found["offset"], found["end"]) == (2, 3, 3, 3)
    assert not found["problems"] and found["bytes"] > 9000 and any(found["digest"])


async def test_copies_are_equal_by_their_digests() -> None:
    one, same, other = Rig(), Rig(), Rig()
    for rig, last in ((one, b"1"), (same, b"1"), (other, b"2")):
        rig.append(LARGE)
        rig.append(last)
    first, second, third = [(await rig.audit())["digest"] for rig in (one, same, other)]
    assert first == second != third


@pytest.mark.parametrize(("what", "kind"), [("rotten", "corrupt"), ("gone", "missing")])
async def test_what_can_not_be_read_is_said_by_kind(what: str, kind: str) -> None:
    rig = Rig()
    rig.append(b"0")
    rig.append(b"1")
    getattr(rig, what).add(2)
    found = await rig.audit()
    assert found[kind] == 1 == len(found["problems"]) and found["problems"][0].startswith(f"{kind}: unit 0 of entry 2")


async def test_a_lost_entry_shows_by_itself() -> None:
    rig = Rig()
    for number in range(3):
        rig.append(b"%d" % number)
    rig.lost = {3}
    found = await rig.audit()
    assert found["missing"] == 1 and "end at offset 2, not 3" in found["problems"][0]


async def test_what_is_released_is_dead_and_not_read() -> None:
    rig = Rig()
    rig.append(b"0")
    rig.append(b"1")
    rig.liveness.released, rig.gone = 1, {1}
    found = await rig.audit()
    assert found["units"] == 1 and found["dead"] > 0 and not found["problems"]


async def test_what_the_machine_needs_and_released_is_a_mismatch_of_the_first_step_only() -> None:
    rig = Rig()
    rig.append(b"0")
    rig.needed = 2
    assert (await rig.audit())["mismatches"] == 2 and not (await rig.audit(index=1))["mismatches"]


async def test_below_the_payload_floor_it_is_asked_again_later() -> None:
    rig = Rig()
    rig.member.raise_floor(99)
    with pytest.raises(Gone, match="audit it again later"):
        await rig.audit()
