"""A KV group of the blocking client: what `kv` has, without await, usable from any thread. Made by `sync.Yard.kv`.

A watch asks again and again for what comes next, each time from the revision after the last one that it has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgpack

from logyard.protocol import wire
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import Frame
from logyard.protocol.kv import (
    KEYS_ONLY,
    NO_DELETE,
    NO_PUT,
    PREVIOUS,
    Bodies,
    Changes,
    Compacted,
    Compare,
    Decoder,
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
    answer_of,
    bodies_of,
    range_of,
    value_questions,
)

from . import kv_requests
from .admin import Call, plain
from .kv_requests import Command, Question, Steps, T, check_consistency
from .log import POLL_WAIT_S, of_kind, read_call

if TYPE_CHECKING:
    from .sync import Yard


class KV:
    """See `kv.KV`: the same verbs with the same options."""

    __slots__ = ("yard", "name")

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name

    def get(
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
        return kv_requests.only(*self._ask(kv_requests.question_of(key, revision), timeout, consistency, node))

    def range(
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
        return self._run(kv_requests.read(get), timeout, consistency, node)

    def count(self, key: bytes = b"", end: bytes | None = None, *, prefix: bool = False) -> int:
        """How many keys there are of a range."""
        key, end = range_of(key, end, prefix)
        return self._run(kv_requests.read(Get(key, end, count_only=True))).count

    def put(
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
        found = self._run(kv_requests.write(Put(key, value, lease, previous, keep_lease)), timeout)
        return cast(PutResult, found)

    def delete(
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
        return cast(DeleteResult, self._run(kv_requests.write(Delete(key, end, previous)), timeout))

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        """Do `then` if all compares hold, else `otherwise`: all of it or nothing, at one revision."""
        return cast(TxnResult, self._run(kv_requests.write(Txn(compares, then, otherwise)), timeout))

    def compact(self, revision: int) -> int:
        """Forget the history before `revision`; the revision there is now."""
        return self._run(kv_requests.compact(revision))

    def grant(self, ttl: float, *, lease: int = 0) -> Lease:
        """A lease of `ttl` seconds; `lease`: its number, by default a new one."""
        return self._run(kv_requests.grant(ttl, lease))

    def keep_alive(self, lease: int) -> float:
        """Begin a lease's time anew; the seconds that it has."""
        return self._run(kv_requests.keep(lease))

    def revoke(self, lease: int) -> int:
        """End a lease; how many keys went with it."""
        return self._run(kv_requests.revoke(lease))

    def time_to_live(self, lease: int, *, keys: bool = False) -> Lease:
        """What is left of a lease, and with `keys` what is attached to it."""
        return self._run(kv_requests.time_to_live(lease, keys))

    def leases(self) -> tuple[int, ...]:
        """The numbers of all leases."""
        return self._run(kv_requests.leases())

    def status(self) -> Mapping[str, int]:
        """Revision, compacted revision, keys, leases, history."""
        return self._run(kv_requests.status())

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
        wait: float = POLL_WAIT_S,
    ) -> Iterator[Changes]:
        """What changes, for ever, one revision after the other; `start` 0: from now (the call) on. Options as in
        `kv.KV.watch`; with `progress` something comes every `wait` seconds. Raises
        `Compacted` when what comes next is gone."""
        key, end = range_of(key, end, prefix)
        flags = (
            (PREVIOUS if previous else 0)
            | (0 if values else KEYS_ONLY)
            | (0 if puts else NO_PUT)
            | (0 if deletes else NO_DELETE)
        )
        following = start or self.status()["revision"] + 1
        return self._watch(key, end, flags, following, progress, node, min(wait, POLL_WAIT_S))

    def _watch(
        self, key: bytes, end: bytes, flags: int, following: int, progress: bool, node: int | None, wait: float
    ) -> Iterator[Changes]:
        nodes = () if node is None else (node,)
        while True:
            arguments: dict[str, object] = {
                "name": self.name, "key": key, "end": end, "flags": flags, "start": following, "wait_s": wait,
                "consistency": "leader" if node is None else "local",
            }  # fmt: skip
            call: Call[Any] = Call(
                "kv_events", arguments, plain, group=self.name, nodes=nodes, pinned=node is not None, kind="kv"
            )
            # Silence may last as long as it likes: one question lasts a few seconds, and a leader may have to be found.
            header, data = self.yard.run(call, POLL_WAIT_S + self.yard.timeout)
            if header["kind"] == "compacted":
                raise Compacted("what comes next is compacted", compacted=header["compacted"])
            yield from self._changes(header, bodies_of(header["places"], data), node)
            if progress and not header["revisions"]:
                yield Changes(header["next"] - 1, ())
            following = header["next"]

    def _changes(self, header: Any, bodies: Bodies, node: int | None) -> Iterator[Changes]:
        for one in header["revisions"]:
            decoder = Decoder(bodies)
            found = decoder.changes(one)
            if decoder.missing:
                for question in value_questions(decoder.missing):
                    packed, more = self._ask(question, self.yard.timeout, "leader", node)
                    answer_of(packed)
                    bodies |= more
                found = Decoder(bodies).changes(one)
            yield from found.values()

    # How it is asked

    def _run(
        self,
        steps: Steps[T],
        timeout: float | None = None,
        consistency: str = "linearizable",
        node: int | None = None,
    ) -> T:
        if node is not None:
            consistency = "local"
        timeout = self.yard.timeout if timeout is None else timeout
        try:
            step: Command | Question = next(steps)
            while True:
                if isinstance(step, Command):
                    step = steps.send(self._command(step, timeout))
                else:
                    step = steps.send(self._ask(step.data, timeout, consistency, node))
        except StopIteration as stop:
            return cast(T, stop.value)

    def _command(self, command: Command, timeout: float) -> Any:
        frame = Frame()
        frame.command = command.data
        for body in command.bodies or (None,):
            frame.put(b"", body)
        reply, _ = self.yard.append(self.name, frame, timeout, wire.for_kind("kv"))
        return msgpack.unpackb(reply)

    def _ask(self, data: bytes, timeout: float, consistency: str, node: int | None) -> tuple[bytes, Bodies]:
        arguments: dict[str, object] = {"consistency": check_consistency(consistency), "requests": [data]}
        header, found = self.yard.run(
            read_call("fetch", self.name, node, of_kind(arguments, "kv"), plain, "kv"), timeout
        )
        if not header["answers"]:
            raise LogyardError("a question got no answer")
        return header["answers"][0], bodies_of(header["places"], found)
