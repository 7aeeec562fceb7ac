"""The questions of a node, alone: each ends with an answer, a lost link or a time-out."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.config import SystemConfig
from logyard.engine.raft.membership import Configuration
from logyard.engine.transfer.pull import Pulls
from logyard.engine.transport.blobs import SNAPSHOT_PULL
from logyard.protocol.errors import Corrupt, LogyardError

UID = 5


class Rig:
    """Pulls of node 3; `taken` False: the link does not take what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, Any]] = []
        self.taken = True
        self.live = {1, 3}
        self.pulls = Pulls(SystemConfig(), 3, self.live, self.send)

    def send(self, node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        assert kind == SNAPSHOT_PULL
        self.sent.append((node, request, header))
        return self.taken

    def answer(self, node: int, request: int, **odd: Any) -> None:
        header = {"uid": UID, "entries": [], "through": 4, "release": 0, "live": 0, "chunks": [], "error": None}
        self.pulls.on_piece(node, request, {**header, **odd}, b"")


async def asked(rig: Rig, odd: dict[str, Any], node: int = 1) -> int:
    """What a question to node 1 brings, when `node` answers it."""
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            await trio.testing.wait_all_tasks_blocked()
            rig.answer(node, rig.sent[-1][1], **odd)
            if node != 1:
                rig.pulls.on_link_lost(1)

        nursery.start_soon(answer)
        return (await rig.pulls.ask(1, UID, 0, [(1, 4)])).through


async def test_an_answer_is_its_questions() -> None:
    rig = Rig()
    assert await asked(rig, {}) == 4 and rig.pulls.pieces == 1
    assert rig.sent[0][2]["ranges"] == [[1, 4]]
    rig.answer(1, 1)  # nobody waits for it any more


@pytest.mark.parametrize("odd", [{"error": "no"}, {"uid": 6}, {"through": 1 << 62}, {"chunks": [[b"x", 1]]}])
async def test_what_does_not_add_up_is_an_error(odd: dict[str, Any]) -> None:
    rig = Rig()
    with pytest.raises((LogyardError, Corrupt)):
        try:
            await asked(rig, odd)
        except* (LogyardError, Corrupt) as group:
            raise group.exceptions[0] from None
    assert rig.pulls.failed == 1 and not rig.pulls.pieces


async def test_the_word_of_another_node_counts_for_nothing_and_a_lost_link_ends_it() -> None:
    rig = Rig()
    with pytest.raises(ExceptionGroup) as found:
        await asked(rig, {}, node=2)
    assert "does not answer" in str(found.value.exceptions[0]) and rig.pulls.failed == 1


async def test_a_silent_node_is_waited_for_so_long(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    began = trio.current_time()
    with pytest.raises(LogyardError, match="does not answer"):
        await rig.pulls.ask(1, UID, 0, [(1, 4)])
    assert trio.current_time() > began
    rig.taken = False
    with pytest.raises(LogyardError, match="down or full"):
        await rig.pulls.ask(1, UID, 0, [(1, 4)])
    assert rig.pulls.failed == 2


def test_those_who_live_are_asked_first() -> None:
    rig = Rig()
    rig.live |= {4}
    assert rig.pulls.others(Configuration((1, 2, 3, 4))) == [1, 4, 2] and rig.pulls.neighbours() == [1, 4]
