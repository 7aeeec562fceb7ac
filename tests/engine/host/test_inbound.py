"""What peers say, alone: to whom it goes, and what is made of lies, a full disk and links that were lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.entry import Entry, build_commands
from logyard.engine.host.inbound import ASK_UNKNOWN_MAX, Groups, Inbound, Links, Windows
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.messages import APPEND, APPEND_REPLY, VOTE, Message
from logyard.engine.raft.progress import Window
from logyard.engine.transport.blobs import DELETE_GROUPS, READ_ASK, UNKNOWN_GROUPS
from logyard.protocol.errors import BadRequest, Corrupt, Refused
from logyard.protocol.frame import encode_frame

UID = 7


def entry(index: int) -> Entry:
    frame = memoryview(b"".join(encode_frame([(b"", b"payload of %d" % index)], command=b"")))
    return build_commands(UID, index, 2, 0, [frame])


def append(*entries: Entry, uid: int = UID) -> Message:
    first, last = (entries[0].index, entries[-1].index) if entries else (1, 0)
    return Message(APPEND, uid, 1, 2, 2, first - 1, 2, 0, 0, False, list(entries), first, last)


class Member(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


class Core:
    """A core that remembers what it was told; `lie` is what it says of it."""

    def __init__(self) -> None:
        self.role, self.leader, self.stopped, self.dirty = FOLLOWER, 2, False, True
        self.voter = self.may_lead = True
        self.limits = SimpleNamespace(patience=0)
        self.progress: dict[int, object] = {}
        self.configuration = SimpleNamespace(nodes=lambda: {1, 2, 3})
        self.steps: list[Message] = []
        self.heard: list[Any] = []
        self.held: dict[int, Entry] = {}
        self.log = SimpleNamespace(entry=self.held.get)
        self.lie: str | None = None

    def step(self, message: Message) -> str | None:
        self.steps.append(message)
        self.held.update((one.index, one) for one in message.entries or ())
        return self.lie

    def on_link_reset(self, node: int) -> None:
        self.heard.append(node)

    def on_liveness(self) -> None:
        self.heard.append("liveness")


class Bench:
    """A handler, and all who hear of what it takes in: `told` says what they heard."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.core = Core()
        self.member: Any = Member(raft=self.core, spec=SimpleNamespace(name="log"), uid=UID)
        self.members: dict[int, Any] = {UID: self.member}
        self.asleep: dict[int, Any] = {}
        self.active: set[Any] = set()
        self.live = {1}
        self.deleted: set[int] = set()
        self.window = Window(1000)
        self.room = 1 << 30
        self.space: Any = SimpleNamespace(full=False, accepts=lambda entries: min(self.room, len(entries)))
        self.loop: Any = SimpleNamespace(
            over=False, mark=self.says("marked"), hold=lambda: self.told.append("hold"),
            release=lambda: self.told.append("release"),
        )  # fmt: skip
        self.handlers: dict[int, Any] = {}
        groups = Groups(
            1, self.members, self.live, self.active, lambda uid, node: self.asleep.get(uid), self.deleted, self.walk,
            self.says("stranger"), self.says("stopped"),
        )  # fmt: skip
        links = Links((self.says("up"),), (self.says("down"),), self.says("live"), self.says("outdated"))
        self.inbound = Inbound(
            groups, self.loop, self.says("kept"), self.space, Windows({2: self.window}, self.says("resume")), links,
            self.handlers, self.send_blob,
        )  # fmt: skip

    def says(self, what: str) -> Any:
        return lambda *arguments: self.told.append(what)

    def walk(self, act: Any) -> None:
        for member in self.members.values():
            act(member)

    def send_blob(self, node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        self.told.append((node, kind, header["uids"]))
        return True

    def take(self, *messages: Message, node: int = 2) -> list[Any]:
        self.told.clear()
        self.inbound.on_messages(node, messages)
        return self.told


def test_messages_of_a_frame_share_a_turn_and_their_payloads_are_kept() -> None:
    bench = Bench()
    assert bench.take(append(entry(1)), append(entry(2))) == [
        "hold", "kept", "marked", "kept", "marked", "release"
    ]  # fmt: skip
    assert [one.first for one in bench.core.steps] == [1, 2]


def test_what_no_log_holds_is_not_kept() -> None:
    bench = Bench()
    bench.core.log.entry = lambda index: None
    assert "kept" not in bench.take(append(entry(1)))


def test_a_payload_that_is_not_what_its_entry_says_reaches_no_core_and_the_turn_comes_all_the_same() -> None:
    bench = Bench()
    bad = entry(1)
    bad.bodies = tuple(bytes(len(body)) for body in bad.bodies or ())
    with pytest.raises((BadRequest, Corrupt)):
        bench.take(append(bad))
    assert not bench.core.steps and bench.told == ["hold", "release"]


def test_what_ends_a_replica_ends_no_connection() -> None:
    bench = Bench()

    def step(message: Message) -> str | None:
        bench.core.stopped = True
        return "another lineage"

    bench.core.step = step  # type: ignore[method-assign]
    assert bench.take(append(entry(1)), append(entry(2))) == ["hold", "stopped", "marked", "release"]


def test_a_lie_is_told_when_the_other_groups_messages_are_taken() -> None:
    bench = Bench()
    bench.core.lie = "two leaders of a term"
    with pytest.raises(BadRequest, match="group log: two leaders of a term"):
        bench.take(append(entry(1)), append(entry(2)))
    assert len(bench.core.steps) == 2 and bench.told[-1] == "release"


def test_a_full_disk_takes_what_it_can_and_the_rest_is_as_lost() -> None:
    bench = Bench()
    bench.space.full, bench.room = True, 2
    bench.take(append(entry(1), entry(2), entry(3)))
    (step,) = bench.core.steps
    assert [one.index for one in step.entries or ()] == [1, 2] and (step.first, step.last) == (1, 2)
    bench.room = 0
    bench.take(append(entry(4)), append())
    assert len(bench.core.steps) == 2 and not bench.core.steps[-1].entries, "a probe says that somebody leads"


def test_a_group_that_sleeps_is_woken_and_one_that_is_unknown_is_asked_for_once() -> None:
    bench = Bench()
    bench.asleep[8] = bench.member
    bench.deleted.add(10)
    told = bench.take(append(uid=8), append(uid=9), append(uid=9), append(uid=10))
    assert bench.core.steps[0].uid == 8
    assert [one for one in told if isinstance(one, tuple)] == [(2, UNKNOWN_GROUPS, [9]), (2, DELETE_GROUPS, [10])]
    assert (2, UNKNOWN_GROUPS, [9]) not in bench.take(append(uid=9))
    bench.inbound.forget_asked()
    assert (2, UNKNOWN_GROUPS, [9]) in bench.take(append(uid=9))
    for uid in range(100, 101 + ASK_UNKNOWN_MAX):
        bench.inbound.ask(2, uid)
    assert (2, UNKNOWN_GROUPS, [100 + ASK_UNKNOWN_MAX]) not in bench.told, "a peer can't make it remember more"


def test_who_is_no_member_is_told_so() -> None:
    bench = Bench()
    for kind, node, told in ((VOTE, 4, True), (VOTE, 3, False), (APPEND_REPLY, 4, True), (APPEND, 4, False)):
        assert ("stranger" in bench.take(Message(kind, UID, 1, node, 2), node=node)) == told
    bench.core.role, bench.core.progress = LEADER, {2: object()}
    assert "stranger" not in bench.take(Message(APPEND_REPLY, UID, 1, 2, 2))
    assert "stranger" in bench.take(Message(APPEND_REPLY, UID, 1, 3, 2), node=3)


def test_room_in_a_window_lets_those_go_on_that_wait_for_it() -> None:
    bench = Bench()
    assert "resume" not in bench.take(append())
    bench.window.waiting[UID] = None
    assert "resume" in bench.take(append())


def test_a_link_that_comes_or_goes_concerns_the_groups_of_both_ends() -> None:
    bench = Bench()
    bench.inbound.on_link_up(2)
    assert bench.told == ["up", "marked"] and bench.core.heard == [2]
    bench.inbound.on_link_down(3)
    assert bench.told[2:] == ["down"], "node 3 neither leads nor follows here"
    bench.core.leader = 0
    bench.core.may_lead = False
    bench.inbound.on_link_up(3)
    assert bench.core.heard == [2, 3], "who can't lead waits for whoever does"


def test_the_table_of_live_nodes_stays_the_same_object() -> None:
    bench = Bench()
    live = bench.live
    bench.inbound.on_liveness({2, 3})
    assert bench.live is live == {1, 2, 3}
    assert bench.core.heard == ["liveness"] and bench.told == ["marked", "live"] and bench.active


def test_a_blob_goes_to_whom_its_kind_names_and_a_refusal_closes_no_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.inbound.hear([READ_ASK], bench.says("asked"))
    bench.inbound.on_blob(2, READ_ASK, 1, {"uid": 7}, b"")
    assert bench.told == ["asked"]
    bench.inbound.on_blob(2, 9999, 1, {}, b"")

    def refuse(*_: object) -> None:
        raise Refused("not here")

    bench.inbound.hear([READ_ASK], refuse)
    bench.inbound.on_blob(2, READ_ASK, 1, {"uid": 7}, b"")
    assert f"blob kind {READ_ASK} from node 2 refused: not here" in caplog.messages
    with pytest.raises(BadRequest):
        bench.inbound.on_blob(2, READ_ASK, 1, {"uid": "seven"}, b"")


def test_a_node_that_ends_hears_nothing_more() -> None:
    bench = Bench()
    bench.inbound.on_outdated(2, "a newer life is known")
    assert bench.told == ["outdated"]
    bench.inbound.hear([READ_ASK], bench.says("asked"))
    bench.loop.over = True
    bench.told.clear()
    bench.inbound.on_messages(2, [append(entry(1))])
    bench.inbound.on_blob(2, READ_ASK, 1, {"uid": 7}, b"")
    bench.inbound.on_outdated(2, "a newer life is known")
    assert not bench.told and not bench.core.steps
