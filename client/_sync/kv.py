# Made from client/_async/kv.py by `python -m logyard.client._async.generate`: change that file.
"""A KV group: gets, puts, transactions, leases. Commands and questions go the way of their face (`_command`, `ask`).

Filled in by `kv.KV` and `kv_sync.KV`, which have the watches too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

from logyard.protocol.errors import LogyardError
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
    check_bytes,
    range_of,
)

from .. import kv_requests
from ..kv_requests import Command, Steps, T
from .caller import Caller


class KVVerbs(ABC):
    """A KV group of either face. `consistency` of reads: linearizable (default), leader (its own view, without asking
    the others), local (any member's, perhaps old; `node` chooses which)."""

    __slots__ = ("yard", "name")

    yard: Caller
    name: str

    # What a face fills in.

    @abstractmethod
    def _command(self, command: Command, timeout: float) -> Any:
        """Have a command applied, exactly once; return its reply."""

    @abstractmethod
    def ask(
        self, data: bytes, timeout: float, consistency: str = "linearizable", node: int | None = None
    ) -> tuple[bytes, Bodies]:
        """Ask one question; return its packed answer, and payloads, those that it names among them."""

    # Reads

    def get(
        self,
        key: bytes,
        *,
        revision: int = 0,
        consistency: str = "linearizable",
        node: int | None = None,
        timeout: float | None = None,
    ) -> KeyValue | None:
        """Return a key, now or as of `revision`; None if it is not there.

        `consistency`: ``linearizable``, ``leader`` or ``local``; `node`: that member answers from what it has. Raises
        `Compacted` for a revision that is gone, a `LogyardError` of code ``future_revision`` for one to come.
        """
        timeout = self.yard.timeout if timeout is None else timeout
        consistency = consistency if node is None else "local"
        packed, bodies = self.ask(kv_requests.question_of(key, revision), timeout, consistency, node)
        try:
            return kv_requests.only(packed, bodies)
        except LogyardError:
            check_bytes(Get(key))
            raise

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
        """Return the keys from `key` up to, but without, `end` (None: `key` alone), or with `prefix` all that begin
        with `key`; all as of one revision.

        `limit` keys at most (0: all), in order of `sort`: ``key``, ``version``, ``create``, ``mod`` or ``value``.
        `bounds`: least and greatest revision of the last change, least and greatest revision of creation, 0 for none.
        `consistency` and `node` as in `get`; raises as `get`.
        """
        key, end = range_of(key, end, prefix)
        get = Get(key, end, revision, limit, sort, descending, keys_only, False, bounds)
        return self.run(kv_requests.read(get), timeout, consistency, node)

    def count(self, key: bytes = b"", end: bytes | None = None, *, prefix: bool = False) -> int:
        """Count the keys of a range, given as in `range`."""
        key, end = range_of(key, end, prefix)
        return (self.run(kv_requests.read(Get(key, end, count_only=True)))).count

    # Writes

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
        """Set a key; a `value` of None keeps the one that it has (and changes its lease).

        `lease`: the number of the lease that the key goes with, 0 for none; `keep_lease`: the one it has. `previous`:
        return what was there as well. Raises a `LogyardError` of code ``lease_not_found``, or ``key_not_found`` where
        nothing is there to keep.
        """
        found = self.run(kv_requests.write(Put(key, value, lease, previous, keep_lease)), timeout)
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
        """Delete a key, or a range of keys as in `range`, at one revision; `previous`: return what they were, too."""
        key, end = range_of(key, end, prefix)
        return cast(DeleteResult, self.run(kv_requests.write(Delete(key, end, previous)), timeout))

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        """Do `then` if all compares hold, else `otherwise`: all of it or nothing, at one revision.

        Raises a `LogyardError` of code ``duplicate_key`` for a key that is changed twice, ``too_many_operations``,
        ``too_large`` where what it reads is more than an answer holds.
        """
        return cast(TxnResult, self.run(kv_requests.write(Txn(compares, then, otherwise)), timeout))

    def compact(self, revision: int) -> int:
        """Forget the history before `revision`; return the revision there is now. Raises as `get` with a revision."""
        return self.run(kv_requests.compact(revision))

    # Leases

    def grant(self, ttl: float, *, lease: int = 0) -> Lease:
        """Grant a lease of `ttl` seconds; `lease`: its number, by default a new one. Raises a `LogyardError` of code
        ``lease_exists``, ``too_many_leases``."""
        return self.run(kv_requests.grant(ttl, lease))

    def keep_alive(self, lease: int) -> float:
        """Begin a lease's time anew; return the seconds that it has. Raises a `LogyardError` of code
        ``lease_not_found``."""
        return self.run(kv_requests.keep(lease))

    def revoke(self, lease: int) -> int:
        """End a lease; return how many keys went with it. Raises as `keep_alive`."""
        return self.run(kv_requests.revoke(lease))

    def time_to_live(self, lease: int, *, keys: bool = False) -> Lease:
        """Tell what is left of a lease, and with `keys` what is attached to it. Raises as `keep_alive`."""
        return self.run(kv_requests.time_to_live(lease, keys))

    def leases(self) -> tuple[int, ...]:
        """Return the numbers of all leases."""
        return self.run(kv_requests.leases())

    def status(self) -> Mapping[str, int]:
        """Return numbers by name: revision, compacted revision, keys, leases, history."""
        return self.run(kv_requests.status())

    # How it is asked.

    def run(
        self,
        steps: Steps[T],
        timeout: float | None = None,
        consistency: str = "linearizable",
        node: int | None = None,
    ) -> T:
        """Ask what `kv_requests` wants to, step by step; return its result."""
        if node is not None:
            consistency = "local"
        timeout = self.yard.timeout if timeout is None else timeout
        try:
            step = next(steps)
            while True:
                if isinstance(step, Command):
                    step = steps.send(self._command(step, timeout))
                    continue
                try:
                    answer = self.ask(step.data, timeout, consistency, node)
                except LogyardError as error:
                    # The steps know whether anything was done before.
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as stop:
            return cast(T, stop.value)
