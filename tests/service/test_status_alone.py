"""What a node says of itself, alone: sums over what is awake and asleep, a row a group, and who says what."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.host.leader_cache import LeaderCache
from logyard.engine.raft.core import LEADER
from logyard.engine.raft.state import FOLLOWER
from logyard.engine.replica.member import HALTED, RUNNING, STOPPED
from logyard.machines.log import AppendLog
from logyard.protocol.errors import LogyardError
from logyard.service import status
from logyard.service.door.dispatch import serve_call
from logyard.service.status import Groups, GroupStatus, NodeStatus, Stored

SHAPE = SimpleNamespace(machine="log", voters=(1, 2), learners=(3,))


def awake(uid: int, name: str, role: int = FOLLOWER, state: str = RUNNING, applied: int = 10, pending: int = 0) -> Any:
    log = SimpleNamespace(last_index=12, last_term=3, stable=11, first_index=1)
    configuration = SimpleNamespace(voters=(1, 2, 3), learners=(), outgoing=())
    raft = SimpleNamespace(
        role=role, applied=applied, commit=applied + 1, leader=1, term=4, log=log, configuration=configuration,
        voter=True,
    )  # fmt: skip
    return SimpleNamespace(
        uid=uid, raft=raft, state=state, shown_state=state, reason="", machine=AppendLog(5),
        spec=SimpleNamespace(name=name, machine="log"), snapshot_index=8, snapshot_bytes=100,
        proposals=SimpleNamespace(bytes=pending),
    )  # fmt: skip


class Asleep(dict[int, Any]):
    """Rows of the groups that hibernate."""

    def __init__(self) -> None:
        super().__init__()
        self.led = self.entries = self.bytes = 0

    def sleep(self, uid: int, name: str, leader: int) -> None:
        self[uid] = SimpleNamespace(
            name=name, shape=SHAPE, leader=leader, term=3, last=20, start=4, end=9, size=50, since_ms=77
        )
        self.led, self.entries, self.bytes = self.led + (leader == 1), self.entries + 20, self.bytes + 50

    def row(self, uid: int) -> Any:
        return self[uid]

    def rows(self) -> Any:
        return self.items()


class Table(dict[str, int]):
    def behind(self, after: str, limit: int) -> list[str]:
        return sorted(name for name in self if name > after)[:limit]


class Rig:
    def __init__(self) -> None:
        self.names, self.asleep, self.leaders = Table(), Asleep(), LeaderCache()
        self.members: dict[int, Any] = {}
        self.groups = Groups(
            1, cast(Any, self.names), self.members, cast(Any, self.asleep), self.leaders, lambda uid: []
        )
        self.rows = GroupStatus(self.groups)

    def add(self, member: Any) -> None:
        self.members[member.uid] = member
        self.names[member.spec.name] = member.uid

    def sleep(self, uid: int, name: str, leader: int) -> None:
        self.asleep.sleep(uid, name, leader)
        self.names[name] = uid


@pytest.fixture
def rig() -> Rig:
    """Node 1: `a` it leads, `b` halted, `c` stopped; `d` and `e` sleep, led by 1 and 2."""
    found = Rig()
    found.add(awake(1, "a", LEADER, pending=300))
    found.add(awake(2, "b", state=HALTED, applied=6))
    found.add(awake(3, "c", state=STOPPED, applied=0))
    found.sleep(4, "d", 1)
    found.sleep(5, "e", 2)
    return found


def test_sums_are_over_the_awake_and_the_asleep(rig: Rig) -> None:
    generations = [SimpleNamespace(id=1, total=900, live=400, sealed=True)]
    store = SimpleNamespace(generations=lambda: generations, disk_bytes=lambda: 1000)
    wal = SimpleNamespace(allocated_bytes=lambda: 500)
    stored = Stored(cast(Any, wal), cast(Any, store), lambda: 70)
    found = NodeStatus(rig.groups, stored, {"forks": lambda: 3}).read()
    assert (found["groups"], found["hibernating"], found["led"]) == (5, 2, 2)
    assert (found["stopped"], found["halted"]) == (2, 1)
    assert (found["applied"], found["commit"]) == (16 + 40, 19 + 40)
    assert (found["snapshots"], found["snapshot_bytes"], found["inflight_bytes"]) == (5, 400, 300)
    assert (found["payload_live_bytes"], found["payload_disk_bytes"]) == (470, 1500)
    assert (found["node"], found["pid"], found["forks"]) == (1, os.getpid(), 3) and found["memory_rss"] > 1 << 20


def test_a_node_without_a_descriptor_left_says_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what it is asked for then."""

    def refuse(*_: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", refuse)
    assert status._resident_bytes() == 0


def test_a_group_has_the_same_row_awake_and_asleep(rig: Rig) -> None:
    rows = {row["name"]: row for row in rig.rows.rows()}
    assert list(rows) == ["a", "b", "c", "d", "e"] and rows["a"].keys() == rows["d"].keys()
    assert [rows[name]["role"] for name in "abde"] == ["leader", "follower", "leader", "follower"]
    assert (rows["a"]["start"], rows["d"]["start"], rows["d"]["end"]) == (5, 4, 9)
    assert (rows["b"]["state"], rows["d"]["state"]) == (HALTED, "hibernating")


def test_the_board_goes_on_behind_a_name(rig: Rig) -> None:
    rig.leaders.led(1, 1, 4, 55)
    rig.names["taken, and not durable yet"] = 99
    board = rig.rows.board("", 9)
    assert [row[0] for row in board] == ["a", "b", "c", "d", "e"]
    assert board[0][2:6] == [1, 4, 55, "leader"] and board[3][4:7] == [77, "leader", "hibernating"]
    assert [row[0] for row in rig.rows.board("b", 2)] == ["c", "d"]


def test_a_page_of_groups_is_full_unless_it_is_the_last(rig: Rig) -> None:
    """Who asks page by page stopped, with the board, at one that names without a group had made short."""
    for number in range(3):
        rig.names[f"b{number} is not durable yet"] = 90 + number
    assert (
        [row["name"] for row in rig.rows.page(" ", 3)] == ["a", "b", "c"] == [row[0] for row in rig.rows.board("", 3)]
    )
    assert [row["name"] for row in rig.rows.page("c", 3)] == ["d", "e"] == [row[0] for row in rig.rows.board("c", 3)]
    whole = {row["name"]: row for row in rig.rows.rows()}
    assert all(row == whole[row["name"]] for row in rig.rows.page("", 99))


async def test_a_list_without_pages_is_refused_where_no_answer_could_hold_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients ask that know no pages."""
    node: Any = SimpleNamespace(group_page=rig.rows.page)
    rows: Any = await serve_call(node, "list", {})
    assert [row["name"] for row in rows] == ["a", "b", "c", "d", "e"]
    rows = await serve_call(node, "list", {"after": "b", "limit": 2})
    assert [row["name"] for row in rows] == ["c", "d"]
    monkeypatch.setattr("logyard.service.door.dispatch.LIST_WHOLE", 4)
    with pytest.raises(LogyardError) as refused:
        await serve_call(node, "list", {})
    assert refused.value.code == "too_large"


def test_key_metrics_ask_nobody_and_leave_out_strangers(rig: Rig) -> None:
    found = {row["name"]: row for row in rig.rows.key_metrics(["d", "none", "c"])}
    assert set(found) == {"c", "d"} and found["c"].keys() == found["d"].keys()
    assert (found["c"]["state"], found["c"]["membership"]) == (STOPPED, "voter")
    assert (found["d"]["leader_since_ms"], found["d"]["stable"], found["d"]["pending_bytes"]) == (77, 20, 0)
