"""Which groups this node has: creation, deletion, and how other nodes of a group learn of both.

A group is in the meta store of every member's node before its first WAL record (invariant 6). A uid is random and
never used twice, so a deleted and
re-created group reads nothing old. A node that was away asks for a definition when a message names a group it does not
know, and is told of a deletion when it speaks for a group that is gone.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import trio

from logyard.protocol.errors import BadRequest, Busy, GroupExists, LogyardError, Refused

from ..raft import membership
from ..raft.messages import LEADER_GONE
from ..replica.member import DELETED, Member
from ..transport.blobs import (
    DEFINE_GROUPS,
    DEFINED,
    DELETE_GROUPS,
    REFUSED_GROUPS,
    REMOVED_GROUPS,
    TAKE_BACK,
    UNKNOWN_GROUPS,
)
from ..types import Spec
from . import rows

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
DEFINE_SECONDS = 15.0
ASK_AGAIN_SECONDS = 2.0
LOOK_SECONDS = 0.05
SPECS_PER_BLOB = 2000
GROWN = 100
"""Groups that come alive in one step: some milliseconds of the loop."""
TAKEN_BACK_MAX = 8000
"""Uids of failed creations that a node is told of on each new link: as many as a few large creations have."""


class Directory:
    """Names, uids and deletions of one node."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.deleted: set[int] = set()
        # Groups whose definition was lost here: a member under their uid has forgotten its votes, and is to be mended.
        # Of creations that failed, by node and how it is told: uids it may have stored.
        self._taken_back: dict[tuple[int, int], list[int]] = {}
        self._requests: dict[int, _Round] = {}
        self._next = 0
        self._creating = trio.Lock()
        self.storing = trio.Lock()

    async def create(self, requests: Sequence[Mapping[str, Any]]) -> list[Spec]:
        """Create groups: each request has name, members (node ids), machine, arguments.

        Idempotent for an equal definition; one caller at a time, so that nobody is told of a group that may yet be
        taken back.
        Raises `BadRequest`, `GroupExists`, `Busy`; a group is then not created here.
        """
        async with self._creating:
            return await self._create(requests)

    async def _create(self, requests: Sequence[Mapping[str, Any]]) -> list[Spec]:
        system = self.system
        if system.group_count + len(requests) > system.config.groups_max:
            raise Busy("the node's number of groups (groups_max)", 60.0)
        specs: list[Spec] = []
        fresh: list[Spec] = []
        now = time.time_ns() // 1_000_000
        for request in requests:
            spec = self._spec(request, now)
            known = system.names.get(spec.name)
            if known is None:
                fresh.append(spec)
                specs.append(spec)
                continue
            old = system.spec(known)
            if old is None:
                raise Busy(f"group {spec.name!r}, which is being stored,", 1.0)
            if (old.machine, old.voters, old.arguments) != (spec.machine, spec.voters, spec.arguments):
                raise GroupExists(f"group {spec.name!r} exists with another definition", name=spec.name)
            specs.append(old)
        if fresh:
            await self._define(fresh)
        return specs

    def _spec(self, request: Mapping[str, Any], now: int) -> Spec:
        name = str(request["name"])
        check_name(name)
        voters = tuple(sorted({int(node) for node in request.get("members") or [self.system.node_id]}))
        unknown = [node for node in voters if node != self.system.node_id and node not in self.system.peers.nodes]
        if unknown:
            raise BadRequest(f"group {name!r} names nodes {unknown}, which this node has no address for")
        machine, arguments = str(request.get("machine") or "log"), dict(request.get("arguments") or {})
        self.system.create_machine(machine, arguments)
        return Spec(int.from_bytes(os.urandom(8), "little") | 1, name, machine, arguments, voters, now)

    async def _define(self, specs: Sequence[Spec]) -> None:
        """Have every member's node store the definitions; a majority must, the others learn later."""
        system = self.system
        nodes = {node for spec in specs for node in spec.voters}
        round_ = self._round(nodes - {system.node_id})
        try:
            await self._store([spec for spec in specs if system.node_id in spec.voters])
            if system.node_id in nodes:
                round_.stored.add(system.node_id)
            with trio.move_on_after(DEFINE_SECONDS):
                await self._ask_all(round_, specs)
        finally:
            del self._requests[round_.number]
        if round_.conflict:
            # At once, so that hardly anybody can have used it: there would be two groups of a name.
            self._take_back(specs, DELETE_GROUPS)
            await self.delete([spec.uid for spec in specs])
            raise GroupExists(f"node {round_.conflict[0]}: {round_.conflict[1]}")
        short = round_.short_of(specs)
        if short is not None:
            # Who does not answer may have stored it, elected a leader and acknowledged what clients wrote.
            self._take_back(specs, TAKE_BACK)
            await system.departures.take_back([spec.uid for spec in specs if system.node_id in spec.voters])
            raise Busy(
                f"creation of {short.name!r}: only nodes {sorted(round_.stored)} of {short.voters} answered; it", 1.0
            )

    async def _ask_all(self, round_: _Round, specs: Sequence[Spec]) -> None:
        """Ask until every node answered; a dead one is not waited for once there is a majority without it.

        A link that is not up yet drops what it is given, so the question is put again; the answer to it is always the
        same.
        """
        asked: dict[int, float] = {}
        while not round_.done.is_set():
            if round_.short_of(specs) is None and not round_.waiting & self.system.live:
                return
            now = trio.current_time()
            for node in round_.waiting:
                if now >= asked.get(node, 0.0) and self._ask(round_, node, specs):
                    asked[node] = now + ASK_AGAIN_SECONDS
            with trio.move_on_after(LOOK_SECONDS):
                await round_.done.wait()

    def _ask(self, round_: _Round, node: int, specs: Sequence[Spec]) -> bool:
        """Send the definitions to one node; False when the link did not take them."""
        for at in range(0, len(specs), SPECS_PER_BLOB):
            part = [list(spec) for spec in specs[at : at + SPECS_PER_BLOB] if node in spec.voters]
            last = at + SPECS_PER_BLOB >= len(specs)
            if not self.system.peers.send_blob(node, DEFINE_GROUPS, round_.number, {"specs": part, "last": last}):
                return False
        return True

    async def check_room(self, member: Member, nodes: set[int]) -> None:
        """Raise `Refused` if one of `nodes`, which are to become members, says that it can't have the group: it would
        count for the quorum and never store anything. Who does not answer is not waited for."""
        round_ = self._round(nodes & self.system.live)
        question = {"specs": [list(member.spec)], "ask": True}
        try:
            with trio.move_on_after(ASK_AGAIN_SECONDS):
                for node in tuple(round_.waiting):
                    self.system.peers.send_blob(node, DEFINE_GROUPS, round_.number, question)
                await round_.done.wait()
        finally:
            del self._requests[round_.number]
        if round_.conflict:
            raise Refused(f"node {round_.conflict[0]} can't be a member: {round_.conflict[1]}")

    async def _store(self, specs: Sequence[Spec], admitted: Mapping[int, int] = MappingProxyType({})) -> None:
        """Store the groups, durable first, then alive. Raises `GroupExists` when a name is another group's here.

        `admitted`: by uid, the configuration that makes this node a member (see `departures`). One at a time: a
        definition that comes twice is answered when the first one is durable.
        """
        async with self.storing:
            await self._store_alone(specs, admitted)

    async def _store_alone(self, specs: Sequence[Spec], admitted: Mapping[int, int]) -> None:
        system = self.system
        fresh = []
        for spec in specs:
            self._check_free(spec)
            known = system.names.get(spec.name)
            if known is None and system.has(spec.uid):
                raise GroupExists(f"the number of {spec.name!r} is another group's", name=spec.name)
            if known is None and system.departures.refuses(spec.uid, admitted):
                raise GroupExists(f"{spec.name!r} was refused: its name was taken", name=spec.name)
            if known is None and spec.uid not in self.deleted and system.departures.admits(spec.uid, admitted):
                system.names[spec.name] = spec.uid
                fresh.append(spec)
        try:
            more = await system.departures.readmit([spec.uid for spec in fresh], admitted)
            await system.storage.books.store_specs(fresh, more)
        except BaseException:
            for spec in fresh:
                if not system.has(spec.uid):
                    system.names.pop(spec.name, None)
            raise
        for number, spec in enumerate(fresh):
            if spec.uid in self.deleted:
                # Taken back by its creator while it was stored: its rows go, so it must not live.
                if system.names.get(spec.name) == spec.uid:
                    del system.names[spec.name]
                continue
            if spec.uid in system.damages.barred:
                system.enliven(system.damages.admit(spec))
            else:
                system.start_member(spec)
            if number % GROWN == GROWN - 1:
                system.grown()
                await trio.lowlevel.checkpoint()

    def _take_back(self, specs: Sequence[Spec], kind: int) -> None:
        """Take back a creation that failed: whoever stored the definitions hears of it.

        Members ask each other about a group, and never a creator that is none of them: it tells them on each new link.
        """
        for node in {node for spec in specs for node in spec.voters} - {self.system.node_id}:
            uids = [*self._taken_back.get((node, kind), ()), *(spec.uid for spec in specs if node in spec.voters)]
            self._taken_back[node, kind] = uids[-TAKEN_BACK_MAX:]
            self.on_link_up(node)

    def on_link_up(self, node: int) -> None:
        """Tell `node` what it may not have heard."""
        for kind in (DELETE_GROUPS, TAKE_BACK):
            uids = self._taken_back.get((node, kind))
            if uids:
                self.system.peers.send_blob(node, kind, 0, {"uids": uids})

    async def delete(self, uids: Sequence[int], tell: bool = True) -> None:
        """Delete groups here and on every other member's node. A node that is away learns of it when it speaks for
        the group."""
        system = self.system
        found = [member for uid in uids if (member := system.hibernation.find(uid)) is not None]
        # Whoever was a member by definition, is one by now, or was one until a change that is under way.
        nodes = {node for member in found for node in (*member.spec.voters, *membership.all_nodes(member.raft))}
        self.deleted.update(uids)
        for member in found:
            self.detach(member, "deleted")
        for uid in uids:
            system.departures.forget(uid)
        await system.storage.forget(found, lambda: (put for uid in uids for put in rows.deleted(uid)))
        if tell:
            for node in nodes - {system.node_id}:
                system.peers.send_blob(node, DELETE_GROUPS, 0, {"uids": list(uids)})

    def detach(self, member: Member, reason: str) -> None:
        """Detach a replica that this node has no more; what it led is told so. Its rows are the caller's business."""
        system = self.system
        self.silence(member, reason, DELETED)
        system.members.pop(member.uid, None)
        if system.names.get(member.spec.name) == member.uid:
            del system.names[member.spec.name]

    def silence(self, member: Member, reason: str, state: str) -> None:
        """Silence a replica, which takes no part from now on; what it led is told so, what it would write is not
        written."""
        system = self.system
        running = not member.raft.stopped
        member.stop(reason, state)
        ready = member.raft.ready() if running else None
        if ready is not None and ready.messages:
            # Nothing but farewells: whoever trusts in this leader would else sleep for good.
            system.peers.send([message for message in ready.messages if message.kind == LEADER_GONE])
        system.active.discard(member)
        system.durability.drop(member.uid)

    def on_delete(self, member: Member, index: int) -> bytes:
        """Apply the replicated `delete`: the group is gone on every member that gets here, and on every other as soon
        as it speaks or is told. Return the reply.

        Nothing after it is applied; the replica goes when the turn that applies it has answered the client.
        """
        member.state = DELETED
        log.info("group %s is deleted by entry %d", member.spec.name, index)
        self.system.nursery.start_soon(self.delete, [member.uid])
        return b""

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Take definitions, questions for them, and deletions from other nodes."""
        system = self.system
        if kind == DEFINE_GROUPS:
            specs = [_spec_from(row) for row in header["specs"]]
            admitted = {int(uid): int(index) for uid, index in header.get("admitted", ())}
            last = bool(header.get("last", True))
            if header.get("ask"):
                system.peers.send_blob(node, DEFINED, request, {"error": self._why_not(specs)})
                return
            system.nursery.start_soon(self._defined_by, node, request, specs, last, admitted)
        elif kind == DEFINED:
            round_ = self._requests.get(request)
            if round_ is not None:
                round_.answer(node, header.get("error"))
        elif kind == UNKNOWN_GROUPS:
            gone = [uid for uid in header["uids"] if uid in self.deleted]
            members = [member for uid in header["uids"] if (member := system.hibernation.find(uid)) is not None]
            members = [member for member in members if node in member.raft.configuration.nodes()]
            if members:
                known = [list(member.spec) for member in members]
                admission = [[member.uid, system.departures.admission(member)] for member in members]
                system.peers.send_blob(node, DEFINE_GROUPS, 0, {"specs": known, "admitted": admission})
            if gone:
                system.peers.send_blob(node, DELETE_GROUPS, 0, {"uids": gone})
        elif kind in (REMOVED_GROUPS, REFUSED_GROUPS, TAKE_BACK):
            system.departures.on_blob(node, kind, header)
        elif kind == DELETE_GROUPS:
            system.nursery.start_soon(self.delete, list(header["uids"]), False)

    async def _defined_by(
        self, node: int, request: int, specs: Sequence[Spec], last: bool, admitted: Mapping[int, int]
    ) -> None:
        error = None
        try:
            for spec in specs:
                self._check_foreign(spec)
            if not request:
                specs = await self._without_refused(node, specs, admitted)
            await self._store(specs, admitted)
        except LogyardError as refused:
            error = str(refused)
        if request and (last or error):
            self.system.peers.send_blob(node, DEFINED, request, {"error": error})

    async def _without_refused(self, node: int, specs: Sequence[Spec], admitted: Mapping[int, int]) -> list[Spec]:
        """Return those of an offer that may be stored here; a member of an unborn group hears that the others may
        not."""
        names, departures = self.system.names, self.system.departures
        async with self.storing:
            taken = {spec.uid for spec in specs if names.get(spec.name, spec.uid) != spec.uid}
            kept = [spec for spec in specs if spec.uid not in taken and departures.admits(spec.uid, admitted)]
            unborn = [spec.uid for spec in specs if spec not in kept and not admitted.get(spec.uid)]
            refused = await departures.refuse(unborn)
        if refused:
            self.system.peers.send_blob(node, REFUSED_GROUPS, 0, {"uids": refused})
        return kept

    def _why_not(self, specs: Sequence[Spec]) -> str | None:
        """Return why these groups can't live here, if they can't."""
        try:
            for spec in specs:
                self._check_foreign(spec)
                self._check_free(spec)
        except LogyardError as error:
            return str(error)
        return None

    def _check_free(self, spec: Spec) -> None:
        if self.system.names.get(spec.name, spec.uid) != spec.uid:
            raise GroupExists(f"the name {spec.name!r} is taken", name=spec.name)

    def _check_foreign(self, spec: Spec) -> None:
        """Raise a `LogyardError` unless this node can make the group of another node's definition. Once it is durable
        it is too late: no start would get past a machine that cannot be made."""
        if not spec.voters or len(set(spec.voters)) < len(spec.voters) or not all(0 < n < 1 << 32 for n in spec.voters):
            raise BadRequest(f"group {spec.name!r} has no sound list of members: {list(spec.voters)}")
        try:
            self.system.create_machine(spec.machine, spec.arguments)
        except LogyardError:
            raise
        except Exception as error:
            raise BadRequest(f"group {spec.name!r}: its machine cannot be made: {error!r}") from error

    def _round(self, nodes: set[int]) -> _Round:
        self._next += 1
        round_ = self._requests[self._next] = _Round(self._next, nodes)
        return round_


class _Round:
    """One question to several nodes; done when all answered, or one refused."""

    def __init__(self, number: int, nodes: set[int]) -> None:
        self.number = number
        self.waiting = set(nodes)
        self.stored: set[int] = set()
        self.conflict: tuple[int, str] | None = None
        self.done = trio.Event()
        if not nodes:
            self.done.set()

    def short_of(self, specs: Sequence[Spec]) -> Spec | None:
        """Return a group that no majority of its members has stored yet."""
        return next(
            (spec for spec in specs if len(self.stored.intersection(spec.voters)) * 2 <= len(spec.voters)), None
        )

    def answer(self, node: int, error: str | None) -> None:
        self.waiting.discard(node)
        if error:
            self.conflict = (node, error)
        else:
            self.stored.add(node)
        if error or not self.waiting:
            self.done.set()


def check_name(name: str) -> None:
    """Refuse a name that could become a path, which none does, or is not tame. Raises `BadRequest`."""
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise BadRequest(f"{name!r} is no group name: use 1 to 128 of A-Z a-z 0-9 . _ -")


def _spec_from(row: Sequence[Any]) -> Spec:
    uid, name, machine, arguments, voters, created = row
    check_name(name)
    return Spec(int(uid), name, machine, dict(arguments), tuple(voters), int(created))
