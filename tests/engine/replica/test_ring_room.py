"""Back-pressure before a ring wraps: who waits, who goes on, and how often a snapshot is asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.replica.ring_room import RING, RingRoom
from logyard.protocol.errors import Busy

from ..quiesce.doubles import member_of
from .doubles import Admission


class Rig:
    """A system group with so many entries above its snapshot; `did` is what was counted and asked for."""

    def __init__(self, slots: int = 16, **limits: Any) -> None:
        self.did: list[str] = []
        self.books = Admission()
        config = SystemConfig(ring_slots=slots, **limits)
        self.room = RingRoom(self.books, config, self.did.append, lambda: self.did.append("look"))
        self.member = member_of(set(), name="_s", last=0)
        self.room.watch(self.member)

    def admit(self, used: int, reserved: bool = False) -> None:
        log: Any = self.member.raft.log
        log.last_index = self.member.compactable + used
        self.room.admit(self.member.proposals, 10, reserved)


def test_from_seven_eighths_on_ordinary_commands_wait_and_what_frees_space_does_not() -> None:
    rig = Rig()
    rig.admit(13)
    with pytest.raises(Busy, match=RING) as refused:
        rig.admit(14)
    assert refused.value.cause == RING and refused.value.retry_after and rig.did == ["look", RING]
    rig.admit(14, reserved=True)
    rig.member.need_log_above(8)
    rig.admit(13)


def test_a_snapshot_is_asked_for_once_for_each_that_there_is() -> None:
    rig = Rig()
    for used in (7, 8, 9, 12):
        rig.admit(used)
    assert rig.did == ["look"]
    rig.member.need_log_above(9)
    rig.admit(7)
    assert rig.did == ["look"]
    rig.admit(8)
    assert rig.did == ["look", "look"]


def test_with_many_slots_it_is_as_for_everybody() -> None:
    rig = Rig(1024, snapshot_entries=100)
    rig.admit(99)
    assert not rig.did
    rig.admit(100)
    assert rig.did == ["look"]


def test_the_books_of_the_node_are_kept_as_ever() -> None:
    rig = Rig()
    books = cast(Any, rig.books)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for name in ("admit", "unqueue", "drop", "settle"):
        setattr(books, name, lambda *what, name=name: calls.append((name, what)))
    rig.admit(1)
    rig.room.unqueue(3)
    rig.room.drop(4)
    rig.room.settle(5)
    assert calls == [
        ("admit", (rig.member.proposals, 10, False)), ("unqueue", (3,)), ("drop", (4,)), ("settle", (5,)),
    ]  # fmt: skip
