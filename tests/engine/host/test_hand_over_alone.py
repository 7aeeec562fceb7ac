"""A slow disk's leaderships, handed over alone: to whom, how many at a time, and not again at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.host.hand_over import AGAIN_SECONDS, MOVES_PER_LOOK, HandOver
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.replica.member import RUNNING, STOPPED
from logyard.protocol.errors import Refused


class Bench:
    """Members that this node leads, whose heirs are nodes 2 and 3, in this order."""

    def __init__(self, count: int = 1) -> None:
        self.asked: list[tuple[int, int]] = []
        self.marked: list[Any] = []
        self.refused = False
        self.members: dict[int, Any] = {uid: self.led(uid) for uid in range(1, count + 1)}
        self.hand_over = HandOver(self.members, lambda doublings: None, self.marked.append)

    def led(self, uid: int) -> Any:
        def transfer(heir: int) -> None:
            if self.refused:
                raise Refused("a change of members is under way")
            self.asked.append((uid, heir))

        raft = SimpleNamespace(
            role=LEADER, stopped=False, transferring=0, commit=5, lead_index=5, transfer=transfer,
            heirs=lambda: [2, 3],
        )  # fmt: skip
        return SimpleNamespace(uid=uid, state=RUNNING, raft=raft, spec=SimpleNamespace(name=f"log-{uid}"))


def test_the_first_heir_with_a_faster_disk_is_asked() -> None:
    bench = Bench()
    assert bench.hand_over.hand_over({3, 4}, 0.0) == 1
    assert bench.asked == [(1, 3)] and bench.marked == [bench.members[1]]


def test_where_no_heir_is_faster_everything_stays() -> None:
    bench = Bench()
    assert bench.hand_over.hand_over({4}, 0.0) == 0 and not bench.asked


def test_so_many_at_a_time_and_each_again_only_after_a_while() -> None:
    bench = Bench(MOVES_PER_LOOK + 2)
    assert bench.hand_over.hand_over({2}, 0.0) == MOVES_PER_LOOK
    assert bench.hand_over.hand_over({2}, 1.0) == 2, "those that were asked have their time"
    assert bench.hand_over.hand_over({2}, AGAIN_SECONDS - 0.5) == 0
    assert bench.hand_over.hand_over({2}, AGAIN_SECONDS) == MOVES_PER_LOOK
    bench.hand_over.forget_tried()
    assert bench.hand_over.hand_over({2}, AGAIN_SECONDS) == MOVES_PER_LOOK


def test_what_is_refused_does_not_count_and_is_put_off_as_well() -> None:
    bench = Bench()
    bench.refused = True
    assert bench.hand_over.hand_over({2}, 0.0) == 0 and not bench.marked
    bench.refused = False
    assert bench.hand_over.hand_over({2}, 1.0) == 0 and bench.hand_over.hand_over({2}, AGAIN_SECONDS) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", FOLLOWER), ("stopped", True), ("transferring", 3), ("commit", 4)],
)
def test_who_is_not_whole_or_under_way_stays(field: str, value: Any) -> None:
    bench = Bench()
    setattr(bench.members[1].raft, field, value)
    assert bench.hand_over.hand_over({2}, 0.0) == 0


def test_a_member_that_is_stopped_is_nobodys_to_lead() -> None:
    bench = Bench()
    bench.members[1].state = STOPPED
    assert bench.hand_over.hand_over({2}, 0.0) == 0
