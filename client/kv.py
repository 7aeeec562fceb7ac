"""A KV group of the asynchronous client: gets, puts, transactions, leases; watches are in `kv_watch`.

What is asked in one turn of the loop travels together: commands as one frame, which is applied exactly once also over a
leader change, and reads as one question with one ReadIndex round. Made by `aio.Yard.kv`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeAlias, cast

from logyard.protocol.errors import LogyardError, Unknown
from logyard.protocol.kv import Bodies, bodies_of, check_watch, range_of

from ._async.kv import KVVerbs
from .kv_lane import KvLane
from .kv_requests import Command, check_consistency, fetch_call
from .kv_watch import Flow, Watch, Watcher
from .network import Network
from .runtime import Event
from .yards import Yard

QUESTIONS_MAX = 1000
QUESTION_BYTES = 128 << 10
"""Of one call's questions; a call has a limit of its own."""


_Kind: TypeAlias = tuple[str, int | None, float]
"""Of questions that travel together: consistency, node, and the seconds that they may take."""


class _Round:
    """The questions of one turn, and their answers. `bodies`: the payloads of all of them."""

    __slots__ = ("questions", "answers", "bodies", "over", "error")

    def __init__(self, over: Event) -> None:
        self.questions: list[bytes] = []
        self.answers: list[bytes] = []
        self.bodies: Bodies = {}
        # All of them; those that have an answer need no more when it failed.
        self.over = over
        self.error: LogyardError | None = None

    def wanted(self, question: bytes) -> int:
        """Take another question; return its number."""
        questions = self.questions
        questions.append(question)
        return len(questions) - 1

    def end(self, error: LogyardError | None = None) -> None:
        """Wake who waits."""
        self.error = error
        self.over.set()

    def more(self, answers: list[bytes], bodies: Bodies) -> None:
        """Take the answers to the next questions."""
        self.answers += answers
        self.bodies |= bodies


class Watches(KVVerbs):
    """A KV group whose watches are pushed."""

    yard: Yard

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name
        self._watcher: Watcher | None = None

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
        """Watch keys: ``async with kv.watch(b"jobs/", prefix=True) as changes: async for change in changes``: see
        `kv_watch`.

        `start`: the first revision to see (0: from now on); `values` False: keys and revisions only; `progress`: also
        empty `Changes`, now and then, that say how far it has come. `node`: that member, whatever its role. Raises
        `BadRequest` for a key or a revision that can't be.
        """
        key, end = range_of(key, end, prefix)
        check_watch(key, end, start)
        if self._watcher is None:
            self._watcher = Watcher(self)
        flow = Flow(key, end, start, previous, values, puts, deletes, progress)
        return self._watcher.open(flow, node)


class KV(Watches):
    """See the module; its verbs are in `_async.kv`."""

    yard: Network

    def __init__(self, yard: Network, name: str) -> None:
        super().__init__(yard, name)
        self._lane = cast(KvLane, yard.lane(name, KvLane))
        self._rounds: dict[_Kind, _Round] = {}
        # The newest term in which a question was answered, and who led then.
        self.term = 0
        self._term_of = 0

    @property
    def same_leader(self) -> bool:
        """Whether commands go to the node that led when `term` was learned."""
        return self._lane.leader == self._term_of

    # How it is asked

    async def _command(self, command: Command, timeout: float) -> Any:
        yard = self.yard
        if yard.closed or yard.window.used >= yard.window.limit:
            await yard.room()
        batch, position = self._lane.add_operation(command.data, command.bodies, timeout, command.long)
        if not self._lane.dirty:
            yard.kick(self._lane)
        return batch.answer(position, await batch.pending.wait(yard.runtime.event))

    async def ask(
        self, data: bytes, timeout: float, consistency: str = "linearizable", node: int | None = None
    ) -> tuple[bytes, Bodies]:
        """Ask one question: return its packed answer, and payloads, those that it names among them."""
        key = (consistency, node, timeout)
        found = self._rounds.get(key)
        if found is None:
            if self.yard.closed:
                raise LogyardError("the client is closed")
            check_consistency(consistency)
            found = self._rounds[key] = _Round(self.yard.runtime.event())
            # By the time it runs, everything that is asked in this turn is there.
            self.yard.spawn(partial(self._round, key))
        number = found.wanted(data)
        await found.over.wait()
        if found.error is not None and number >= len(found.answers):
            raise found.error.again()
        return found.answers[number], found.bodies

    def fail(self, error: LogyardError) -> None:
        """Fail the questions of rounds that have not begun, and never will."""
        rounds, self._rounds = self._rounds, {}
        for found in rounds.values():
            found.end(error)

    async def _round(self, key: _Kind) -> None:
        found = self._rounds.pop(key, None)
        if found is None:
            return
        consistency, node, timeout = key
        error: LogyardError | None = Unknown("the client was closed before the answer")
        deadline = self.yard.clock() + timeout
        try:
            while len(found.answers) < len(found.questions):
                some = _bounded(found.questions[len(found.answers) :])
                call = fetch_call(self.name, some, consistency, node, _answers)
                wait = deadline - self.yard.clock()
                more, bodies, term = await self.yard.run(call, max(0.0, wait))
                if term >= self.term:
                    self.term, self._term_of = term, self._lane.leader
                found.more(more, bodies)
            error = None
        except LogyardError as refusal:
            error = refusal
        finally:
            found.end(error)


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
