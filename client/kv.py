"""A KV group of the asynchronous client: gets, puts, transactions, leases; watches are in `kv_watch`.

What is asked in one turn of the loop travels together: commands as one frame, which is applied exactly once also over a
leader change, and reads as one question with one ReadIndex round. Made by `aio.Yard.kv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

from logyard.protocol.errors import BadRequest, LogyardError, Unknown
from logyard.protocol.kv import (
    Bodies,
    Compare,
    Delete,
    DeleteResult,
    Get,
    GetResult,
    KeyValue,
    Lease,
    Operation,
    Put,
    PutResult,
    Txn,
    TxnResult,
    bodies_of,
    range_of,
)

from . import kv_requests
from .kv_lane import KvLane
from .kv_requests import Command, Steps, T, check_consistency
from .kv_watch import Flow, Watch, Watcher
from .log import of_kind, read_call
from .pending import finished
from .runtime import Event

if TYPE_CHECKING:
    from .network import Network

QUESTIONS_MAX = 1000
QUESTION_BYTES = 128 << 10
"""Of one call's questions; a call has a limit of its own."""


class _Round:
    """The questions of one turn, and their answers. `bodies`: the payloads of all of them."""

    __slots__ = ("questions", "answers", "bodies", "event", "error", "deadline")

    def __init__(self, event: Event, deadline: float) -> None:
        self.questions: list[bytes] = []
        self.answers: list[bytes] = []
        self.bodies: Bodies = {}
        self.event = event
        self.error: LogyardError | None = None
        self.deadline = deadline


class KV:
    """See the module. `consistency` of reads: linearizable (default), leader (its own view, without asking the others),
    local (any member's, perhaps old; `node` chooses which)."""

    def __init__(self, yard: Network, name: str) -> None:
        self.yard = yard
        self.name = name
        self._lane = cast(KvLane, yard.lane(name, KvLane))
        self._rounds: dict[tuple[str, int | None], _Round] = {}
        self._watcher: Watcher | None = None
        # The newest term in which a question was answered, and who led then.
        self.term = 0
        self._term_of = 0

    @property
    def same_leader(self) -> bool:
        """Whether commands go to the node that led when `term` was learned."""
        return self._lane.leader == self._term_of

    # Reads

    async def get(
        self,
        key: bytes,
        *,
        revision: int = 0,
        consistency: str = "linearizable",
        node: int | None = None,
        timeout: float | None = None,
    ) -> KeyValue | None:
        """A key's value, now or as of a revision; None if it is not there. Raises `Compacted`, a `LogyardError`."""
        timeout = self.yard.timeout if timeout is None else timeout
        consistency = consistency if node is None else "local"
        packed, bodies = await self.ask(kv_requests.question_of(key, revision), timeout, consistency, node)
        return kv_requests.only(packed, bodies)

    async def range(
        self,
        key: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bool = False,
        revision: int = 0,
        limit: int = 0,
        sort: str = "key",
        descending: bool = False,
        keys_only: bool = False,
        bounds: tuple[int, int, int, int] = (0, 0, 0, 0),
        consistency: str = "linearizable",
        node: int | None = None,
        timeout: float | None = None,
    ) -> GetResult:
        """Keys from `key` up to, but without, `end`, or all that begin with `key`; all of it as of one revision."""
        key, end = range_of(key, end, prefix)
        get = Get(key, end, revision, limit, sort, descending, keys_only, False, bounds)
        return await self.run(kv_requests.read(get), timeout, consistency, node)

    async def count(self, key: bytes = b"", end: bytes | None = None, *, prefix: bool = False) -> int:
        """How many keys there are of a range."""
        key, end = range_of(key, end, prefix)
        return (await self.run(kv_requests.read(Get(key, end, count_only=True)))).count

    # Writes

    async def put(
        self,
        key: bytes,
        value: bytes | None,
        *,
        lease: int = 0,
        previous: bool = False,
        keep_lease: bool = False,
        timeout: float | None = None,
    ) -> PutResult:
        """Set a key; None keeps the value that it has (and changes its lease)."""
        found = await self.run(kv_requests.write(Put(key, value, lease, previous, keep_lease)), timeout)
        return cast(PutResult, found)

    async def delete(
        self,
        key: bytes,
        end: bytes | None = None,
        *,
        prefix: bool = False,
        previous: bool = False,
        timeout: float | None = None,
    ) -> DeleteResult:
        """Delete a key, or a range of keys, at one revision."""
        key, end = range_of(key, end, prefix)
        return cast(DeleteResult, await self.run(kv_requests.write(Delete(key, end, previous)), timeout))

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        """Do `then` if all compares hold, else `otherwise`: all of it or nothing, at one revision."""
        return cast(TxnResult, await self.run(kv_requests.write(Txn(compares, then, otherwise)), timeout))

    async def compact(self, revision: int) -> int:
        """Forget the history before `revision`; the revision there is now."""
        return await self.run(kv_requests.compact(revision))

    # Leases

    async def grant(self, ttl: float, *, lease: int = 0) -> Lease:
        """A lease of `ttl` seconds; `lease`: its number, by default a new one."""
        return await self.run(kv_requests.grant(ttl, lease))

    async def keep_alive(self, lease: int) -> float:
        """Begin a lease's time anew; the seconds that it has."""
        return await self.run(kv_requests.keep(lease))

    async def revoke(self, lease: int) -> int:
        """End a lease; how many keys went with it."""
        return await self.run(kv_requests.revoke(lease))

    async def time_to_live(self, lease: int, *, keys: bool = False) -> Lease:
        """What is left of a lease, and with `keys` what is attached to it."""
        return await self.run(kv_requests.time_to_live(lease, keys))

    async def leases(self) -> tuple[int, ...]:
        """The numbers of all leases."""
        return await self.run(kv_requests.leases())

    async def status(self) -> Mapping[str, int]:
        """Revision, compacted revision, keys, leases, history."""
        return await self.run(kv_requests.status())

    # Watches

    def watch(
        self,
        key: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bool = False,
        start: int = 0,
        previous: bool = False,
        values: bool = True,
        puts: bool = True,
        deletes: bool = True,
        progress: bool = False,
        node: int | None = None,
    ) -> AbstractAsyncContextManager[Watch]:
        """``async with kv.watch(b"jobs/", prefix=True) as changes: async for change in changes``: see `kv_watch`.

        `start`: the first revision to see (0: from now on); `values` False: keys and revisions only; `progress`: also
        empty `Changes`, now and then, that say how far it has come. `node`: that member, whatever its role.
        """
        key, end = range_of(key, end, prefix)
        if self._watcher is None:
            self._watcher = Watcher(self)
        flow = Flow(key, end, start, previous, values, puts, deletes, progress)
        return self._watcher.open(flow, node)

    # How it is asked

    async def run(
        self,
        steps: Steps[T],
        timeout: float | None = None,
        consistency: str = "linearizable",
        node: int | None = None,
    ) -> T:
        """What `kv_requests` wants to ask, step by step; its result."""
        if node is not None:
            consistency = "local"
        timeout = self.yard.timeout if timeout is None else timeout
        try:
            step = next(steps)
            while True:
                if isinstance(step, Command):
                    step = steps.send(await self._command(step, timeout))
                else:
                    step = steps.send(await self.ask(step.data, timeout, consistency, node))
        except StopIteration as stop:
            return cast(T, stop.value)

    async def _command(self, command: Command, timeout: float) -> Any:
        yard = self.yard
        while yard.window.used >= yard.window.limit:
            await yard.freed()
        batch, position = self._lane.add_operation(command.data, command.bodies, timeout)
        if not self._lane.dirty:
            yard.kick(self._lane)
        await finished(batch)
        return batch.answer(position)

    async def ask(
        self, data: bytes, timeout: float, consistency: str = "linearizable", node: int | None = None
    ) -> tuple[bytes, Bodies]:
        """One question: its packed answer, and payloads, those that it names among them."""
        key = (consistency, node)
        found = self._rounds.get(key)
        if found is None:
            check_consistency(consistency)
            found = self._rounds[key] = _Round(self.yard.runtime.event(), inf)
            # By the time it runs, everything that is asked in this turn is there.
            self.yard.spawn(partial(self._round, key))
        number = len(found.questions)
        found.questions.append(data)
        found.deadline = min(found.deadline, self.yard.clock() + timeout)
        await found.event.wait()
        if number >= len(found.answers):
            assert found.error is not None
            raise found.error.again()
        return found.answers[number], found.bodies

    async def _round(self, key: tuple[str, int | None]) -> None:
        found = self._rounds.pop(key)
        consistency, node = key
        questions, answers = found.questions, found.answers
        found.error = Unknown("the client was closed before the answer")
        try:
            while len(answers) < len(questions):
                some = _bounded(questions[len(answers) :])
                arguments: dict[str, object] = {"consistency": consistency, "requests": some}
                call = read_call("fetch", self.name, node, of_kind(arguments, "kv"), _answers, "kv")
                wait = found.deadline - self.yard.clock()
                more, bodies, term = await self.yard.run(call, max(0.0, wait))
                if term >= self.term:
                    self.term, self._term_of = term, self._lane.leader
                answers += more
                found.bodies |= bodies
        except LogyardError as error:
            found.error = error
        finally:
            found.event.set()


class KvYard:
    """What an asynchronous client has for KV groups; its network is the client itself."""

    __slots__ = ()

    def kv(self, name: str) -> KV:
        """The KV group `name`; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a group has a name")
        yard = cast("Network", self)
        found = yard.kvs.get(name)
        if found is None:
            found = yard.kvs[name] = KV(yard, name)
        return cast(KV, found)


def _bounded(questions: list[bytes]) -> list[bytes]:
    size = 0
    for number, one in enumerate(questions[:QUESTIONS_MAX]):
        size += len(one)
        if size > QUESTION_BYTES and number:
            return questions[:number]
    return questions[:QUESTIONS_MAX]


def _answers(value: Any) -> tuple[list[bytes], Bodies, int]:
    header, data = value
    try:
        answers = header["answers"]
        if not answers:
            raise LogyardError("a question got no answer")
        return answers, bodies_of(header["places"], data), header.get("term", 0)
    except (KeyError, TypeError, ValueError) as error:
        raise LogyardError(f"the answer to a question cannot be read: {error!r}") from None
