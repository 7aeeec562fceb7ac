"""The group registry: which groups this node has, their creation and deletion, and how other nodes of a group learn of
both.

A group is in the meta store of every member's node before its first WAL record (invariant 6). A uid is random and
never used twice, so a deleted and re-created group reads nothing old. A node that was away asks for a definition when a
message names a group it does not know, and is told of a deletion when it speaks for a group that is gone. Called by
`inbound`, by `applier`, and by the service.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgpack
import trio

from logyard.protocol.errors import BadRequest, Busy, GroupExists, LogyardError, Refused

from ..log import checkpoint_rows as rows
from ..replica.member import Member
from ..transport.blobs import (
    DEFINE_GROUPS,
    DEFINED,
    DELETE_GROUPS,
    REFUSED_GROUPS,
    REMOVED_GROUPS,
    TAKE_BACK,
    UNKNOWN_GROUPS,
    SendBlob,
)
from ..types import BATCH_BITS, FORCED_TERMS, Spec, draw_batch, draw_uid
from .replica_gc import ReplicaGC

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
DEFINE_SECONDS = 15.0
ASK_AGAIN_SECONDS = 2.0
SETTLE_SECONDS = 1.0
"""Until a group that nobody led is born, or refused."""
LOOK_SECONDS = 0.05
SPEC_BYTES = 64
"""What a definition takes on its way, without its name, members and arguments, at most: a machine's name is short."""
SPECS_BLOB_BYTES = 512 << 10
"""Half of `control_frame_bytes`."""
SPECS_MAX = 1 << BATCH_BITS
"""Definitions of one question, of all its parts."""
PARTS_MAX = 8
"""Questions of which some parts are missing yet: each node has one under way, or a few that nobody waits for."""
GROWN = 100
"""Groups that come alive in one step: some milliseconds of the loop."""
FOUNDED = ("catalog",)
"""Machines of groups whose uid says nothing of who made them."""
TAKEN_BACK_MAX = 8000
"""Uids of failed creations that a node is told of on each new link: as many as a few large creations have."""


class Peers(NamedTuple):
    """The other nodes."""

    nodes: Callable[[], Set[int]]
    """Return those with an address."""
    live: Set[int]
    """Nodes that are up, this one among them."""
    send: SendBlob


class Groups(NamedTuple):
    """This node's groups, awake or not."""

    names: MutableMapping[str, int]
    """Uids by name: a name is taken before its group is durable, and so before there is a member."""
    find: Callable[[int], Member | None]
    """Return a group's member, woken if it hibernates."""
    has: Callable[[int], bool]
    """Return whether this node has a group."""
    spec: Callable[[int], Spec | None]
    """Return a group's definition; wakes nobody."""
    size: Callable[[], int]
    """Count them."""
    doubt: Callable[[int], None]
    """Have a group that sleeps, and of which nobody is known here to lead it, wake and ask who does: it may have been
    deleted while this node was away."""
    unsettled: Callable[[int], bool]
    """Return whether nobody is known here who ever led a group. One that sleeps is doubted, too: it soon is born or
    refused."""
    barred: Container[int]
    """Groups whose definition was lost here: a member under their uid has forgotten its votes, and is to be mended."""


class MetaBatch(Protocol):
    """What the registry needs of the meta store's batches."""

    async def store_specs(self, specs: Sequence[Spec], more: Sequence[rows.Put] = (), asleep: bool = False) -> None:
        """Make definitions durable, and some rows with them. `asleep`: the groups begin so."""
        ...


class Host(NamedTuple):
    """Whom the registry tells."""

    start: Callable[[Spec], object]
    """Let a group that was just registered come alive."""
    told: Callable[[Spec], object]
    """Let a group that this node made be led: the other members have it now, or a majority of them."""
    lay: Callable[[Sequence[Spec]], None]
    """Let groups that were just registered sleep until somebody uses them."""
    grown: Callable[[], None]
    """Many groups came."""
    detach: Callable[[Member, str], None]
    """End a replica that this node has no more, for a reason."""
    forget: Callable[[Sequence[Member], Mapping[int, Callable[[], Iterable[rows.Put]]]], Awaitable[None]]
    """Let replicas go, with the rows that say so; their payloads are dead."""
    spawn: Callable[..., None]


class _Wanted:
    """Groups that one asks to have stored, and the error that it gets. `alone`: they share no commit."""

    __slots__ = ("specs", "admitted", "asleep", "alone", "error")

    def __init__(self, specs: Sequence[Spec], admitted: Mapping[int, int], asleep: bool) -> None:
        self.specs = specs
        self.admitted = admitted
        self.asleep = asleep
        # Of a founded group the name and the number say nothing: only what is stored tells an equal one.
        self.alone = asleep or any(spec.machine in FOUNDED for spec in specs)
        self.error: LogyardError | None = None

    def ends(self, error: LogyardError | None) -> None:
        """Take what it came to."""
        self.error = error


class GroupRegistry:
    """Names, uids and deletions of one node."""

    def __init__(
        self,
        node_id: int,
        groups_max: int,
        create_machine: Callable[[str, dict[str, Any]], object],
        groups: Groups,
        gc: ReplicaGC,
        meta_batch: MetaBatch,
        peers: Peers,
        host: Host,
    ) -> None:
        self.deleted: set[int] = set()
        self._node_id = node_id
        self._groups_max = groups_max
        self._create_machine = create_machine
        self._groups = groups
        self._gc = gc
        self._meta_batch = meta_batch
        self._peers = peers
        self._send = peers.send
        self._host = host
        self._rounds = Rounds(peers)
        # Of creations that failed, by node and how it is told: uids it may have stored.
        self._taken_back: dict[tuple[int, int], list[int]] = {}
        self._creating = trio.Lock()
        self._storing = trio.Lock()
        # What is to be stored and is in no commit yet.
        self._wanted: list[_Wanted] = []
        self._parts = _Parts()

    async def create(self, requests: Sequence[Mapping[str, Any]]) -> list[Spec]:
        """Create groups: each request has name, members (node ids), machine, arguments.

        Idempotent for an equal definition; one caller at a time, so that nobody is told of a group that may yet be
        taken back.
        Raises `BadRequest`, `GroupExists`, `Busy`; a group is then not created here.
        """
        async with self._creating:
            return await self._create(requests)

    async def _create(self, requests: Sequence[Mapping[str, Any]]) -> list[Spec]:
        specs: list[Spec] = []
        fresh: list[Spec] = []
        now = time.time_ns() // 1_000_000
        for request in requests:
            spec = self._spec(request, now)
            known = self._known(spec)
            if known is None:
                fresh.append(spec)
            else:
                self._groups.doubt(known.uid)
            specs.append(known or spec)
        self._check_number(len(fresh))
        if fresh:
            await self._define(fresh)
        return specs

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for what `create` would refuse as such: a name, members, a machine."""
        self._spec(request, 0)

    async def define(self, specs: Sequence[Spec], asleep: bool = False) -> None:
        """Make groups whose uids and definitions were agreed on, on a majority of their members each; those that are
        here already are told to the others again. Raises `GroupExists`, and `Busy` where no majority answers: what then
        becomes of them, who agreed on them decides, and until then they stay. `asleep`: nobody uses them yet."""
        for spec in specs:
            check_name(spec.name)
            self._check_foreign(spec)
            self._check_free(spec)
        async with self._creating:
            await self._define(specs, asleep, agreed=True)

    async def found(self, spec: Spec) -> str:
        """Make a group of this node alone, unless it or a live node has one of that name; return why not, or
        nothing."""
        async with self._creating:
            conflict = await self._rounds.room(set(self._peers.nodes()), spec)
            if conflict is None:
                await self._store([spec])
            return "" if conflict is None else f"node {conflict[0]}: {conflict[1]}"

    async def take_back(self, uids: Sequence[int]) -> None:
        """Let none of these groups be born here that was not yet; one that had a leader stays."""
        await self._refuse_unborn(uids)

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep: a node stores all of them in one commit, nothing is elected and
        nobody is built until somebody uses one. At most 2 ** `BATCH_BITS` names. Return how many are new.

        Idempotent, and raises, as `create`: of a batch that is refused nothing is created here.
        """
        if len(names) > 1 << BATCH_BITS:
            raise BadRequest(f"{len(names)} names; create at most {1 << BATCH_BITS} groups at once")
        async with self._creating:
            return await self._create_batch(names, {"members": members, "machine": machine, "arguments": arguments})

    async def _create_batch(self, names: Sequence[str], definition: Mapping[str, Any]) -> int:
        now = time.time_ns() // 1_000_000
        first = draw_batch()
        model = None
        fresh: list[Spec] = []
        left: list[Spec] = []
        # A name that comes twice is one group.
        for name in dict.fromkeys(names):
            check_name(name)
            model = model or self._spec({**definition, "name": name}, now)
            # Side by side, so that their rows are: a batch is a few pages of the meta store, and not one for each.
            spec = model._replace(uid=first + len(fresh), name=name)
            known = self._known(spec)
            if known is None:
                fresh.append(spec)
            elif len(spec.voters) > 1:
                left.append(known)
        self._check_number(len(fresh))
        if fresh:
            try:
                await self._define(fresh, asleep=True)
            except GroupExists as taken:
                if self._is_settling(self._node_id, fresh):
                    raise Busy(f"creation of what an earlier one left ({taken})", SETTLE_SECONDS) from taken
                raise
        if left:
            await self._confirm(left)
        return len(fresh)

    async def _confirm(self, specs: Sequence[Spec]) -> None:
        """Have a majority store what this node has of a batch: the creation that it is from may have been cut short.
        Raises as `create`; nothing is taken back, as others may use them."""
        round_ = self._rounds.begin({node for spec in specs for node in spec.voters} - {self._node_id})
        round_.stored.add(self._node_id)
        try:
            with trio.move_on_after(DEFINE_SECONDS):
                await self._rounds.ask_all(round_, specs, asleep=True)
        finally:
            self._rounds.end(round_)
        self._check_answers(round_, specs)

    def _check_answers(self, round_: _Round, specs: Sequence[Spec]) -> None:
        """Raise what a creation ends with, if it is not done."""
        if round_.conflict:
            node, why, again = round_.conflict
            if again:
                raise Busy(f"creation of what an earlier one left on node {node} ({why})", SETTLE_SECONDS)
            raise GroupExists(f"node {node}: {why}")
        short = round_.short_of(specs)
        if short is not None:
            raise Busy(
                f"creation of {short.name!r}: only nodes {sorted(round_.stored)} of {short.voters} answered; it", 1.0
            )

    def _check_number(self, more: int) -> None:
        if more and self._groups.size() + more > self._groups_max:
            raise Busy("the node's number of groups (groups_max)", 60.0)

    def _known(self, spec: Spec) -> Spec | None:
        """Return the group of that name, if there is one: it must be the same. Raises `GroupExists`, `Busy`."""
        known = self._groups.names.get(spec.name)
        if known is None:
            return None
        old = self._groups.spec(known)
        if old is None:
            raise Busy(f"group {spec.name!r}, which is being stored,", 1.0)
        if not _is_same(old, spec):
            self._groups.doubt(known)
            raise GroupExists(f"group {spec.name!r} exists with another definition", name=spec.name)
        return old

    def _spec(self, request: Mapping[str, Any], now: int) -> Spec:
        name = str(request["name"])
        check_name(name)
        voters = tuple(sorted({int(node) for node in request.get("members") or [self._node_id]}))
        unknown = [node for node in voters if node != self._node_id and node not in self._peers.nodes()]
        if unknown:
            raise BadRequest(f"group {name!r} names nodes {unknown}, which this node has no address for")
        machine, arguments = str(request.get("machine") or "log"), dict(request.get("arguments") or {})
        spec = Spec(draw_uid(), name, machine, arguments, voters, now)
        self._check_foreign(spec)
        return spec

    async def _define(self, specs: Sequence[Spec], asleep: bool = False, agreed: bool = False) -> None:
        """Have every member's node store the definitions; a majority must, the others learn later. `asleep`: nobody
        uses them yet. `agreed`: nothing is taken back of what fails."""
        here = self._node_id
        nodes = {node for spec in specs for node in spec.voters}
        round_ = self._rounds.begin(nodes - {here})
        try:
            await self._store([spec for spec in specs if here in spec.voters], asleep=asleep)
            if here in nodes:
                round_.stored.add(here)
            with trio.move_on_after(DEFINE_SECONDS):
                await self._rounds.ask_all(round_, specs, asleep)
        finally:
            self._rounds.end(round_)
        if round_.conflict and not agreed:
            # At once, so that hardly anybody can have used it: there would be two groups of a name.
            self._take_back(specs, DELETE_GROUPS)
            await self.delete([spec.uid for spec in specs])
        elif round_.short_of(specs) is not None and not agreed:
            # Who does not answer may have stored it, elected a leader and acknowledged what clients wrote.
            self._take_back(specs, TAKE_BACK)
            await self._refuse_unborn([spec.uid for spec in specs if here in spec.voters])
        self._check_answers(round_, specs)
        if asleep:
            return
        for at in range(0, len(specs), GROWN):
            if at:
                await trio.lowlevel.checkpoint()
            for spec in specs[at : at + GROWN]:
                self._host.told(spec)

    async def check_room(self, member: Member, nodes: set[int]) -> None:
        """Raise `Refused` if one of `nodes`, which are to become members, says that it can't have the group: it would
        count for the quorum and never store anything. Who does not answer is not waited for, unless the group's lineage
        was forced: a replica from before that may have gone on, and has to go first."""
        forced = member.raft.term >= FORCED_TERMS
        for node in nodes if forced else ():
            self._gc.tell(node, member)
        conflict = await self._rounds.room(nodes, member.spec, forced)
        if conflict is not None:
            raise Refused(f"node {conflict[0]} can't be a member: {conflict[1]}")

    async def _store(
        self, specs: Sequence[Spec], admitted: Mapping[int, int] = MappingProxyType({}), asleep: bool = False
    ) -> None:
        """Make groups durable first, then alive. Raises `GroupExists` when a name is another group's here.

        `admitted`: by uid, the configuration that makes this node a member (see `replica_gc`). One commit at a time:
        a definition that comes twice is answered when the first one is durable, and what came while another commit was
        under way is in the next one together.
        """
        wanted = _Wanted(specs, admitted, asleep)
        self._wanted.append(wanted)
        try:
            async with self._storing:
                if wanted in self._wanted:
                    await self._store_all([wanted] if wanted.alone else [one for one in self._wanted if not one.alone])
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        if wanted.error is not None:
            raise wanted.error

    async def _store_all(self, batch: Sequence[_Wanted]) -> None:
        """Store what several asked for, each as if it had been alone; what they ask for is done then. Where this is
        cancelled, the others still want theirs."""
        fresh: list[Spec] = []
        for one in batch:
            try:
                found = self._fresh(one)
            except LogyardError as error:
                one.ends(error)
            else:
                # Only now: of what is refused no name stays taken.
                self._groups.names.update((spec.name, spec.uid) for spec in found)
                fresh += found
        admitted = {uid: at for one in batch for uid, at in one.admitted.items()}
        asleep = batch[0].asleep
        try:
            if fresh:
                more = await self._gc.readmit([spec.uid for spec in fresh], admitted)
                await self._meta_batch.store_specs(fresh, more, asleep)
        except BaseException as error:
            for spec in fresh:
                if not self._groups.has(spec.uid):
                    self._groups.names.pop(spec.name, None)
            # Also who was refused: its name was perhaps taken by what is not stored.
            for one in batch:
                one.ends(error if isinstance(error, LogyardError) else None)
            if not isinstance(error, LogyardError):
                raise
        else:
            # What is stored lives, whoever of those who wanted it has gone.
            with trio.CancelScope(shield=True):
                await self._begin_all(fresh, asleep)
        self._wanted = [one for one in self._wanted if one not in batch]

    def _fresh(self, wanted: _Wanted) -> list[Spec]:
        """Return the groups that are to be made. Raises `GroupExists` for one of them."""
        gc, names, has, admitted = self._gc, self._groups.names, self._groups.has, wanted.admitted
        fresh = []
        taken: dict[str, int] = {}
        given: dict[int, Spec] = {}
        for spec in wanted.specs:
            if spec.uid in given:
                if given[spec.uid] != spec:
                    raise GroupExists(f"the number of {spec.name!r} is given twice", name=spec.name)
                continue
            given[spec.uid] = spec
            self._check_free(spec)
            known = names.get(spec.name)
            if taken.setdefault(spec.name, spec.uid) != spec.uid:
                raise GroupExists(f"the name {spec.name!r} is given twice", name=spec.name)
            if known is None and has(spec.uid):
                raise GroupExists(f"the number of {spec.name!r} is another group's", name=spec.name)
            if known is None and gc.refuses(spec.uid, admitted):
                raise GroupExists(f"{spec.name!r} was refused: its name was taken", name=spec.name)
            if known is None and spec.uid not in self.deleted and gc.admits(spec.uid, admitted):
                fresh.append(spec)
        return fresh

    async def _begin_all(self, fresh: Sequence[Spec], asleep: bool) -> None:
        for at in range(0, len(fresh), GROWN):
            if at:
                self._host.grown()
                await trio.lowlevel.checkpoint()
            self._begin([spec for spec in fresh[at : at + GROWN] if self._is_wanted(spec)], asleep)

    def _is_wanted(self, spec: Spec) -> bool:
        """Return whether a group that was stored is to live: taken back by its creator meanwhile, its rows go."""
        names = self._groups.names
        if spec.uid not in self.deleted:
            return True
        if names.get(spec.name) == spec.uid:
            del names[spec.name]
        return False

    def _begin(self, specs: Sequence[Spec], asleep: bool) -> None:
        """Let groups begin, whose definitions are stored. One that was here before, and left or lost its definition,
        made promises: it does not begin as one that nobody used."""
        gc, barred = self._gc, self._groups.barred
        laid = [spec for spec in specs if asleep and spec.uid not in gc.departed and spec.uid not in barred]
        if laid:
            self._host.lay(laid)
        for spec in specs if not laid else [spec for spec in specs if spec not in laid]:
            try:
                self._host.start(spec)
            except LogyardError as error:
                # One that lost records here and can't be mended now: as soon as it is offered again.
                log.warning("group %s does not begin yet: %s", spec.name, error)
                self._groups.names.pop(spec.name, None)

    def _take_back(self, specs: Sequence[Spec], kind: int) -> None:
        """Tell whoever stored the definitions of a creation that failed.

        Members ask each other about a group, and never a creator that is none of them: it tells them on each new link.
        """
        for node in {node for spec in specs for node in spec.voters} - {self._node_id}:
            uids = [*self._taken_back.get((node, kind), ()), *(spec.uid for spec in specs if node in spec.voters)]
            self._taken_back[node, kind] = uids[-TAKEN_BACK_MAX:]
            self.on_link_up(node)

    def on_link_up(self, node: int) -> None:
        """Tell `node` what it may not have heard."""
        for kind in (DELETE_GROUPS, TAKE_BACK):
            uids = self._taken_back.get((node, kind))
            if uids:
                self._send(node, kind, 0, {"uids": uids})

    async def delete(self, uids: Sequence[int], tell: bool = True) -> None:
        """Delete groups here and on every other member's node. A node that is away learns of it when it speaks for
        the group."""
        found = [member for uid in uids if (member := self._groups.find(uid)) is not None]
        # Whoever was a member by definition, is one by now, or was one until a change that is under way.
        nodes = {node for member in found for node in (*member.spec.voters, *member.raft.all_nodes())}
        self.deleted.update(uids)
        for member in found:
            self._host.detach(member, "deleted")
        for uid in uids:
            self._gc.forget(uid)
        await self._host.forget(found, {uid: partial(rows.deleted, uid) for uid in uids})
        if tell:
            for node in nodes - {self._node_id}:
                self._send(node, DELETE_GROUPS, 0, {"uids": list(uids)})

    def on_delete(self, member: Member, index: int) -> bytes:
        """Take an applied `delete`: the group is gone on every member that gets here, and on every other as
        soon as it speaks or is told. Returns the reply.

        Nothing after it is applied; the replica goes when the turn that applies it has answered the client.
        """
        member.is_to_go()
        log.info("group %s is deleted by entry %d", member.spec.name, index)
        self._host.spawn(self.delete, [member.uid])
        return b""

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Take definitions, questions for them, and deletions from other nodes."""
        spawn, find = self._host.spawn, self._groups.find
        if kind == DEFINE_GROUPS:
            specs = self._parts.whole(node, request, [_spec_from(row) for row in header["specs"]], header.get("of", 0))
            if specs is None:
                return
            admitted = {int(uid): int(index) for uid, index in header.get("admitted", ())}
            last, asleep = bool(header.get("last", True) or header.get("of")), bool(header.get("asleep", False))
            if header.get("ask"):
                self._send(node, DEFINED, request, {"error": self._why_not(specs, bool(header.get("absent")))})
                return
            spawn(self._defined_by, node, request, specs, last, admitted, asleep)
        elif kind == DEFINED:
            self._rounds.answered(request, node, header.get("error"), bool(header.get("again")))
        elif kind == UNKNOWN_GROUPS:
            gone = [uid for uid in header["uids"] if uid in self.deleted]
            members = [member for uid in header["uids"] if (member := find(uid)) is not None]
            members = [member for member in members if node in member.raft.configuration.nodes()]
            if members:
                known = [list(member.spec) for member in members]
                admission = [[member.uid, self._gc.admission(member)] for member in members]
                self._send(node, DEFINE_GROUPS, 0, {"specs": known, "admitted": admission})
            if gone:
                self._send(node, DELETE_GROUPS, 0, {"uids": gone})
        elif kind == TAKE_BACK:
            spawn(self._refuse_unborn, header["uids"])
        elif kind in (REMOVED_GROUPS, REFUSED_GROUPS):
            self._gc.on_blob(node, kind, header)
        elif kind == DELETE_GROUPS:
            spawn(self.delete, list(header["uids"]), False)

    async def _defined_by(
        self,
        node: int,
        request: int,
        specs: Sequence[Spec],
        last: bool,
        admitted: Mapping[int, int],
        asleep: bool,
    ) -> None:
        error, more = None, {}
        try:
            for spec in specs:
                self._check_foreign(spec)
            if not request:
                specs = await self._without_refused(node, specs, admitted)
            await self._store(specs, admitted, asleep)
        except LogyardError as refused:
            error = str(refused)
            with suppress(LogyardError):
                if asleep and self._is_settling(node, specs):
                    more = {"again": True}
        if request and (last or error):
            self._send(node, DEFINED, request, {"error": error, **more})

    async def _without_refused(self, node: int, specs: Sequence[Spec], admitted: Mapping[int, int]) -> list[Spec]:
        """Return those of an offer that may be stored; a member of an unborn group hears that the others may not."""
        names, gc = self._groups.names, self._gc
        async with self._storing:
            taken = {spec.uid for spec in specs if names.get(spec.name, spec.uid) != spec.uid}
            kept = [spec for spec in specs if spec.uid not in taken and gc.admits(spec.uid, admitted)]
            unborn = [spec.uid for spec in specs if spec not in kept and not admitted.get(spec.uid)]
            refused = await self._refuse(unborn)
        if refused:
            self._send(node, REFUSED_GROUPS, 0, {"uids": refused})
        return kept

    async def _refuse(self, uids: Sequence[int]) -> list[int]:
        """Let unborn groups get no replica here as long as they are that; return those that are refused, which is
        durable. Under `_storing`: none of them is being stored."""
        gc, groups = self._gc, self._groups
        gone = self.deleted
        await gc.refuse([uid for uid in uids if not groups.has(uid) and uid not in gone and uid not in groups.barred])
        return [uid for uid in uids if gc.refuses(uid, {})]

    async def _refuse_unborn(self, uids: Sequence[int]) -> None:
        """Take back a creation that failed for want of answers: groups must not be born of it, and stay if they
        were."""
        try:
            async with self._storing:
                await self._refuse(uids)
                for uid in uids:
                    await self._gc.drop_unborn(uid)
        except LogyardError as error:
            # It is said again on the next link; and who asks whether they are born hears that they are not.
            log.warning("groups that were taken back are not refused yet: %s", error)

    def _why_not(self, specs: Sequence[Spec], absent: bool = False) -> str | None:
        """Return why these groups can't live here, if they can't. `absent`: none of them may have a replica here."""
        try:
            for spec in specs:
                self._check_foreign(spec)
                self._check_free(spec)
            self._check_number(sum(spec.machine not in FOUNDED and not self._groups.has(spec.uid) for spec in specs))
        except LogyardError as error:
            return str(error)
        for spec in specs if absent else ():
            if self._groups.has(spec.uid):
                member = self._groups.find(spec.uid)
                if member is not None and member.raft.stopped:
                    return (
                        f"it has a replica from before, stopped ({member.reason}): start that node again, and try again"
                    )
                return "it has a replica from before, which goes when it has heard that it is out; try again"
        return None

    def _check_free(self, spec: Spec) -> None:
        known = self._groups.names.get(spec.name)
        if known is not None and known != spec.uid:
            self._groups.doubt(known)
            raise GroupExists(f"the name {spec.name!r} is taken", name=spec.name)
        if known is not None and spec.machine in FOUNDED and self._groups.spec(known) != spec:
            # Its number is the same wherever it is founded, and two founders make two of it.
            raise GroupExists(f"{spec.name!r} was founded by another node as well", name=spec.name)

    def _is_settling(self, node: int, specs: Sequence[Spec]) -> bool:
        """Return whether `node` may soon create these after all: the groups that have their names here are the same,
        left by a creation that was cut short. They are born now, and `node` hears of them, or are refused."""
        groups, found = self._groups, False
        for spec in specs:
            known = groups.names.get(spec.name, spec.uid)
            old = groups.spec(known) if known != spec.uid else None
            if old is not None and not _is_same(old, spec):
                return False
            found = (old is not None and (groups.unsettled(known) or node in spec.voters)) or found
        return found

    def _check_foreign(self, spec: Spec) -> None:
        """Raise a `LogyardError` unless this node can make the group of another node's definition. Once it is durable
        it is too late: no start would get past a machine that cannot be made."""
        if not spec.voters or len(set(spec.voters)) < len(spec.voters) or not all(0 < n < 1 << 32 for n in spec.voters):
            raise BadRequest(f"group {spec.name!r} has no sound list of members: {list(spec.voters)}")
        try:
            self._create_machine(spec.machine, spec.arguments)
        except LogyardError:
            raise
        except Exception as error:
            raise BadRequest(f"group {spec.name!r}: its machine cannot be made: {error!r}") from error


class _Parts:
    """Questions that came in parts: which is all of one, nobody can tell by the last of them, as links lose what they
    carry. By (node, its number of the question): the definitions so far."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], dict[int, Spec]] = {}

    def whole(self, node: int, request: int, specs: list[Spec], count: int) -> list[Spec] | None:
        """Return the definitions of a question when all `count` are there, None before; 0: this is all of it."""
        if not count:
            return specs
        found = self._found.setdefault((node, request), {})
        found.update((spec.uid, spec) for spec in specs)
        if len(found) >= min(count, SPECS_MAX):
            del self._found[node, request]
            return list(found.values()) if len(found) == count else None
        while len(self._found) > PARTS_MAX:
            del self._found[next(iter(self._found))]
        return None


class _Round:
    """One question to several nodes; done when all answered, or one refused."""

    def __init__(self, number: int, nodes: Set[int]) -> None:
        self.number = number
        self.waiting = set(nodes)
        self.stored: set[int] = set()
        self.conflict: tuple[int, str, bool] | None = None
        self.done = trio.Event()
        if not nodes:
            self.done.set()

    def short_of(self, specs: Sequence[Spec]) -> Spec | None:
        """Return a group that no majority of its members has stored yet."""
        return next(
            (spec for spec in specs if len(self.stored.intersection(spec.voters)) * 2 <= len(spec.voters)), None
        )

    def answer(self, node: int, error: str | None, again: bool) -> None:
        """Take a node's answer."""
        self.waiting.discard(node)
        if error:
            self.conflict = (node, error, again)
        else:
            self.stored.add(node)
        if error or not self.waiting:
            self.done.set()


class Rounds:
    """Questions under way to several nodes at a time, and who answered them."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._rounds: dict[int, _Round] = {}
        self._next = 0

    def begin(self, nodes: Set[int]) -> _Round:
        """Begin a question to these nodes."""
        self._next += 1
        round_ = self._rounds[self._next] = _Round(self._next, nodes)
        return round_

    def end(self, round_: _Round) -> None:
        """Hear no more answers."""
        del self._rounds[round_.number]

    def answered(self, number: int, node: int, error: str | None, again: bool) -> None:
        """Take an answer, if anybody still waits for it. `again`: it may be another one soon."""
        round_ = self._rounds.get(number)
        if round_ is not None:
            round_.answer(node, error, again)

    async def ask_all(self, round_: _Round, specs: Sequence[Spec], asleep: bool) -> None:
        """Ask until every node answered; a dead one is not waited for once there is a majority without it.

        A link that is not up yet drops what it is given, so the question is put again; the answer to it is always the
        same.
        """
        asked: dict[int, float] = {}
        while not round_.done.is_set():
            if round_.short_of(specs) is None and not round_.waiting & self._peers.live:
                return
            now = trio.current_time()
            for node in round_.waiting:
                if now >= asked.get(node, 0.0) and self._ask(round_, node, specs, asleep):
                    asked[node] = now + ASK_AGAIN_SECONDS
            with trio.move_on_after(LOOK_SECONDS):
                await round_.done.wait()

    def _ask(self, round_: _Round, node: int, specs: Sequence[Spec], asleep: bool) -> bool:
        """Send the definitions to one node; return False when the link did not take them."""
        parts = list(_blobs([spec for spec in specs if node in spec.voters])) or [[]]
        more: dict[str, object] = {"asleep": True} if asleep else {}
        if len(parts) > 1:
            more["of"] = sum(map(len, parts))
        for number, part in enumerate(parts, 1):
            header = {"specs": part, "last": number == len(parts), **more}
            if not self._peers.send(node, DEFINE_GROUPS, round_.number, header):
                return False
        return True

    async def room(self, nodes: Set[int], spec: Spec, absent: bool = False) -> tuple[int, str, bool] | None:
        """Ask live nodes whether they could have a group; return one that could not, and why. Who does not answer is
        not waited for. `absent`: one that has a replica of it could not, and each has to answer."""
        round_ = self.begin(nodes & self._peers.live)
        question: dict[str, object] = {"specs": [list(spec)], "ask": True}
        if absent:
            question["absent"] = True
        try:
            with trio.move_on_after(ASK_AGAIN_SECONDS):
                for node in tuple(round_.waiting):
                    self._peers.send(node, DEFINE_GROUPS, round_.number, question)
                await round_.done.wait()
        finally:
            self.end(round_)
        silent = nodes - round_.stored
        if absent and silent and round_.conflict is None:
            return min(silent), "it does not answer, and may have a replica from before; try again when it runs", True
        return round_.conflict


def check_name(name: str) -> None:
    """Raise `BadRequest` unless a name is one: names never become paths, and are tame anyway."""
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise BadRequest(f"{name!r} is no group name: use 1 to 128 of A-Z a-z 0-9 . _ -")


def _is_same(one: Spec, other: Spec) -> bool:
    """Return whether two groups have the same definition."""
    return (one.machine, one.voters, one.arguments) == (other.machine, other.voters, other.arguments)


def _blobs(specs: Sequence[Spec]) -> Iterator[list[list[Any]]]:
    """Yield definitions in parts that are a blob each."""
    part: list[list[Any]] = []
    size = 0
    for spec in specs:
        own = SPEC_BYTES + len(spec.name) + 5 * len(spec.voters)
        own += len(msgpack.packb(spec.arguments)) if spec.arguments else 0
        if part and size + own > SPECS_BLOB_BYTES:
            yield part
            part, size = [], 0
        part.append(list(spec))
        size += own
    if part:
        yield part


def _spec_from(row: Sequence[Any]) -> Spec:
    uid, name, machine, arguments, voters, created = row
    check_name(name)
    return Spec(int(uid), name, machine, dict(arguments), tuple(voters), int(created))
