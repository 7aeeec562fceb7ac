"""Commands to the catalogue: which of them are taken where it is too full for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.replica.ring_room import RING
from logyard.engine.transport.blobs import CATALOG_ANSWER, CATALOG_ASK
from logyard.engine.transport.frame import BLOB_HEADER_BYTES_MAX, encode_blob
from logyard.engine.types import Buffer
from logyard.machines.catalog.command import command, done, result_of
from logyard.machines.catalog.cursors import Cursors
from logyard.machines.catalog.logs import LIVE, Logs
from logyard.machines.catalog.nodes import Nodes
from logyard.machines.catalog.plan import Plan
from logyard.protocol.errors import BadRequest, Busy, GroupStopped, LogyardError, Unknown, UnknownGroup
from logyard.service.catalog.calls import FREES, CatalogCalls, Network, frees
from logyard.service.catalog.keeper import catalog_uid
from logyard.service.group_verbs import ByCatalogue
from logyard.testing import cluster, until
from tests.notes import SLOTS

from ...engine.quiesce.doubles import member_of
from .test_running import founded, known

SECTIONS = (Logs, Nodes, Plan, Cursors)


async def test_what_frees_space_is_reserved_whoever_asks() -> None:
    sent: list[tuple[str, bool]] = []
    member = member_of({1}, name="_catalog")
    cast(Any, member.raft).leader = 1

    async def commit(member: Member, command: bytes, *, reserved: bool) -> bytes:
        sent.append((command.decode("latin-1"), reserved))
        return done(None)

    later: list[Any] = []
    calls = CatalogCalls(
        1, lambda: member, commit, Network({1, 2}, lambda *blob: True), lambda *call: later.append(call)
    )
    await calls.change("logs", "create", {"logs": []})
    await calls.change("logs", "delete", {"uid": 7})
    for data in (command("plan", "finish", {"number": 1}), command("nodes", "invite", {}), b"no command"):
        calls.on_blob(2, CATALOG_ASK, 1, {"command": data})
    for do, *arguments in later:
        await do(*arguments)
    assert [reserved for _, reserved in sent] == [False, True, True, False, False]


def test_what_frees_space_is_there_and_what_adds_to_the_catalogue_is_not_among_it() -> None:
    there = {(one.name, name) for one in SECTIONS for name in one.commands}
    assert there >= FREES
    for adds in (
        ("logs", "create"),
        ("logs", "import"),
        ("nodes", "invite"),
        ("nodes", "join"),
        ("cursors", "advance"),
    ):
        assert adds in there and not frees(command(*adds, {}))


async def test_an_answer_that_fits_in_no_message_is_told_so() -> None:
    """It ended the node that led the catalogue, and, asked for again, each that led it after that."""
    told: list[Mapping[str, Any]] = []

    def send(node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()) -> bool:
        encode_blob(kind, request, header)
        told.append(header)
        return True

    async def commit(member: Member, command: bytes, *, reserved: bool) -> bytes:
        return done(["x" * BLOB_HEADER_BYTES_MAX])

    member = member_of({1}, name="_catalog")
    later: list[Any] = []
    calls = CatalogCalls(1, lambda: member, commit, Network({1, 2}, send), lambda *call: later.append(call))
    calls.on_blob(2, CATALOG_ASK, 1, {"command": command("logs", "create", {"logs": []})})
    ((do, *arguments),) = later
    await do(*arguments)
    with pytest.raises(BadRequest, match="carried out, but its answer is too large"):
        result_of(told[0]["reply"])


async def test_a_full_catalogue_can_be_made_smaller(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, catalog=True, ring_slots=SLOTS, snapshot_entries=1 << 20) as run:
        await founded(run, 1)
        await run.create("a")
        await until(lambda: known(run, 1)["a"].state == LIVE and known(run, 1)["a"].seen, "it lives")
        node, uid = run.nodes[1], known(run, 1)["a"].uid
        assert node.keeper is not None
        calls = node.keeper._doors.calls
        member = node.system.members[catalog_uid("testing")]
        async with node.system.storage.janitor.lock:
            # Nobody takes a snapshot now.
            with pytest.raises(Busy):
                while member.raft.log.last_index - member.compactable < 2 * SLOTS:
                    await calls.change("cursors", "advance", {"name": "x", "by": 1}, patience_s=0.2)
            assert node.system.counters.busy[RING]
            await calls.change("nodes", "drain", {"node": 1})
            await calls.change("logs", "delete", {"uid": uid})
            row = known(run, 1).get("a")
            assert row is None or row.state != LIVE
            await until(lambda: "a" not in known(run, 1), "it is let go, and forgotten")


@pytest.mark.long
async def test_a_node_that_started_while_it_is_full_lets_go_all_the_same(tmp_path: Path) -> None:
    """What it says of itself is news after each start, has no room, and kept it from everything else."""
    async with cluster(tmp_path, 1, catalog=True, ring_slots=SLOTS, snapshot_entries=1 << 20) as run:
        await founded(run, 1)
        await run.create("a")
        await until(lambda: known(run, 1)["a"].state == LIVE and known(run, 1)["a"].seen, "it lives")
        node, uid = run.nodes[1], known(run, 1)["a"].uid
        keeper = node.keeper
        assert keeper is not None
        member, said = node.system.members[catalog_uid("testing")], keeper._here.said()
        async with node.system.storage.janitor.lock:
            with pytest.raises(Busy):
                while member.raft.log.last_index - member.compactable < 2 * SLOTS:
                    await keeper._doors.calls.change("cursors", "advance", {"name": "x", "by": 1}, patience_s=0.2)
            keeper._here = keeper._here._replace(said=lambda: {**said, "epoch": said["epoch"] + 1})
            await until(lambda: "busy" in keeper.trouble, "it can't say so")
            await keeper._doors.calls.change("logs", "delete", {"uid": uid})
            await until(lambda: "a" not in known(run, 1), "it is let go, and forgotten")
        await until(lambda: not keeper.trouble, "and said, when there is room")


async def test_who_is_told_to_ask_itself_asks_others_again() -> None:
    """Without a copy it asked nobody else from then on, until its restart."""
    asked: list[int] = []

    def send(node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()) -> bool:
        asked.append(node)
        # Node 2 takes node 1 for the leader; node 3 leads.
        answer = {"reply": None, "error": "", "leader": 1} if node == 2 else {"reply": done(7), "leader": 3}
        calls.on_blob(node, CATALOG_ANSWER, request, answer)
        return True

    nobody = cast(Any, None)
    calls = CatalogCalls(1, lambda: None, nobody, Network({1, 2, 3}, send), nobody)
    for _ in range(2):
        assert await calls.change("nodes", "hello", {}, patience_s=1.0) == 7
    assert asked.count(2) <= 1 and set(asked) <= {2, 3}


@pytest.mark.parametrize("error", [UnknownGroup("gone"), GroupStopped("deleted"), Unknown("asked, and gone")])
async def test_what_the_catalogue_let_go_is_deleted_though_its_own_command_was_not_answered(
    error: LogyardError,
) -> None:
    member = member_of({1}, name="log")
    cast(Any, member.raft).role = LEADER
    done: list[Any] = []

    class Births:
        create_batch = None

        async def delete(self, uid: int) -> None:
            done.append(("catalogue", uid))

    async def delete(name: str, force: bool, topic: int) -> None:
        done.append(name)
        raise error

    async def let_go(uids: Sequence[int]) -> None:
        done.append(("node", *uids))

    verbs = ByCatalogue(cast(Any, Births()), lambda name: member, delete, let_go, lambda nodes: None)
    await verbs.delete_group("log")
    assert done == [("catalogue", member.uid), "log", ("node", member.uid)]


async def test_a_deletion_lets_a_names_next_owner_be() -> None:
    """Between the catalogue's decision and the group's own command the name is free."""
    member = member_of({1}, name="log")
    cast(Any, member.raft).role = LEADER
    found: list[Any] = [member, SimpleNamespace(uid=member.uid + 1)]

    class Births:
        create_batch = None

        async def delete(self, uid: int) -> None:
            assert uid == member.uid

    async def delete(name: str, force: bool, topic: int) -> None:
        raise AssertionError("it is another's")

    async def let_go(uids: Sequence[int]) -> None:
        raise AssertionError("it is gone")

    verbs = ByCatalogue(cast(Any, Births()), lambda name: found.pop(0), delete, let_go, lambda nodes: None)
    await verbs.delete_group("log")
    assert not found
