"""Logs of a running cluster, read from whichever members can serve them.

Every range is asked of its best node first; whatever that node cannot give (it is gone, behind, damaged, no member any
more) is asked of the next, until none made progress for `timeout_s`. Committed records only: a member answers with what
it has applied. Blocking, without trio; one thread at a time.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from logyard.client.admin import Call, call_node
from logyard.client.log import body_steps
from logyard.client.scans import Changed, LogRow, Outcome, Scan, changed_call, logs_call, scan_call, seek_call
from logyard.client.session import backoff, parse_address
from logyard.client.sync import Yard, connect_sync
from logyard.client.sync_link import Connection
from logyard.protocol.errors import Busy, LogyardError, OutOfRange, UnknownGroup
from logyard.protocol.tls import client_context
from logyard.protocol.verbs import LOG_ROWS, RANGES_MAX

from .errors import DataLoss
from .log_table import LogTable, merged
from .partitions import Weighed, spread
from .sources import LogInfo, Reading, Wanted

if TYPE_CHECKING:
    import pyarrow

    from logyard.protocol.tls import TlsConfig

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

TIMEOUT_S = 60.0
NODE_PATIENCE_S = 3.0
"""Planning goes on without a node that can't be reached for so long."""
ANSWER_S = 30.0
NAMES_MAX = 4096
THREADS_MAX = 64
SCAN_BYTES = 4 << 20
SCAN_ROWS = 40_000


SILENT_S = 10.0
"""Who did not answer is not asked again for so long, while there is somebody else."""
REACH_S = 10.0
"""A source that is kept looks so often whether the cluster has other nodes now."""
FAR = 1 << 53
"""A time, in ms, that no record has: the offset of it is where a copy ends."""


class Silent:
    """Addresses that did not answer a moment ago, of this process: a dead node costs one planning its patience, and
    not each."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def note(self, address: str) -> None:
        """Note that an address did not answer."""
        self._since[address] = time.monotonic()

    def is_silent(self, address: str) -> bool:
        """Return whether it would be asked in vain."""
        return time.monotonic() < self._since.get(address, -SILENT_S) + SILENT_S

    def clear(self) -> None:
        """Ask everybody again."""
        self._since.clear()


SILENT = Silent()


def as_they_come(calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T | LogyardError]]:
    """Yield the outcomes of `calls`, all made at once, in the order in which they come. Who stops listening waits for
    none of the others."""
    pool = ThreadPoolExecutor(max_workers=min(THREADS_MAX, len(calls)))
    try:
        futures = {pool.submit(call): key for key, call in calls.items()}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except LogyardError as error:
                yield futures[future], error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def at_once(calls: Mapping[K, Callable[[], T]]) -> dict[K, T | LogyardError]:
    """Return the outcomes of `calls`, all made at once."""
    return dict(as_they_come(calls))


def _greet(server: str, tls: TlsConfig | None) -> dict[int, str]:
    """Return the client addresses of the cluster that answers at `server`."""
    connection = Connection(parse_address(server), time.monotonic() + NODE_PATIENCE_S, client_context(tls))
    try:
        hello = connection.channel.hello
        return {hello.node: server, **hello.clients}
    finally:
        connection.close()


@dataclass(slots=True)
class Pending:
    """A range that is not read to its end. `nodes`: whom to ask, in this order; `refused`: how many times one did
    not help since the last progress, `unknown` who said that there is no such log."""

    name: str
    uid: int
    next: int
    end: int
    nodes: list[int]
    since: float
    refused: int = 0
    unknown: set[int] = field(default_factory=set)

    def go_on(self, following: int, now: float) -> None:
        """Go on at an offset: something came, unless it is the one of before."""
        if following > self.next:
            self.refused = 0
            self.unknown.clear()
            self.since = now
        self.next = following

    def go_back(self, offset: int) -> None:
        """Ask for all behind an offset again: what came of it was of no use."""
        self.next = offset

    def refuse(self, node: int, error: LogyardError) -> None:
        """Ask a node last, which did not help."""
        if node in self.nodes:
            self.nodes.remove(node)
        self.nodes.append(node)
        self.refused += 1
        if isinstance(error, UnknownGroup):
            self.unknown.add(node)
        else:
            self.unknown.discard(node)


class Survey(NamedTuple):
    """What logs there are, as far as the nodes that answered know; `missing` are those that did not."""

    infos: list[LogInfo]
    missing: set[int]


class NetworkSource:
    """`sources.LogSource` over a cluster. `servers` are client addresses "host:port"; one that answers is enough."""

    def __init__(self, servers: Sequence[str], *, tls: TlsConfig | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._servers = list(servers)
        self._tls = tls
        self._timeout_s = timeout_s
        self._yard: Yard | None = None
        self._addresses: dict[int, str] | None = None
        self._reached = 0.0
        self._took: dict[int, float] = {}
        self._chance = random.Random()

    @property
    def yard(self) -> Yard:
        """The client, connected when it is first needed."""
        if self._yard is None:
            self._yard = connect_sync(self._servers, tls=self._tls, timeout=self._timeout_s, exactly_once=False)
        return self._yard

    def close(self) -> None:
        """Close all connections."""
        self._took.clear()
        if self._yard is not None:
            self._yard.close()
            self._yard = None

    def logs(self, names: Collection[str] | None = None, pattern: str | None = None) -> list[LogInfo]:
        """See `LogSource.logs`. A node that does not answer is left out, with a warning. A log all of whose members are
        on such nodes is not found."""
        return self.survey(names, pattern).infos

    def survey(self, names: Collection[str] | None = None, pattern: str | None = None) -> Survey:
        """Return `logs`, and which nodes did not answer. One call a node, and when a node is asked for the first time
        one more, which is short."""
        few = sorted(names) if names is not None and len(names) <= NAMES_MAX else None
        addresses = self._reach()
        found: list[LogRow] = []
        missing: list[tuple[int, LogyardError]] = []
        asked = {node: address for node, address in addresses.items() if not SILENT.is_silent(address)} or addresses
        for node in addresses.keys() - asked.keys():
            missing.append((node, LogyardError(f"it did not answer less than {SILENT_S:g} s ago")))
        answers = at_once({node: partial(self._rows, node, few) for node in asked})
        for node, answer in sorted(answers.items()):
            if isinstance(answer, LogyardError):
                SILENT.note(addresses[node])
                missing.append((node, answer))
            else:
                found += answer
        if len(missing) == len(addresses):
            raise missing[0][1]
        for node, why in missing:
            log.warning("node %d does not answer (%s); logs that are on it alone are not seen", node, why)
        matches = re.compile(pattern).fullmatch if pattern is not None else None
        dead = {node for node, _ in missing}
        infos = [
            info._replace(members=tuple(node for node in info.members if node not in dead)) if dead else info
            for info in merge_rows(found)
            if (names is None or info.name in names) and (matches is None or matches(info.name))
        ]
        return Survey(infos, dead)

    def follow(self, table: LogTable) -> None:
        """Bring a table of logs up to date, as `survey` would: one call a node, which tells what changed. Raises when
        no node answers."""
        addresses = self._reach()
        asked = [node for node in addresses if not SILENT.is_silent(addresses[node])] or list(addresses)
        heard: list[tuple[int, Changed]] = []
        refusals: list[LogyardError] = []
        for node, answer in at_once({node: partial(self._changed, node, table.mark(node)) for node in asked}).items():
            if isinstance(answer, LogyardError):
                SILENT.note(addresses[node])
                refusals.append(answer)
                log.warning("node %d does not answer (%s); logs that are on it alone are not seen", node, answer)
            else:
                heard.append((node, answer))
        if not heard:
            raise refusals[0]
        table.update(heard, frozenset(addresses) - {node for node, _ in heard})

    def _changed(self, node: int, mark: int) -> Changed:
        return self._patiently(node, lambda patience: self.yard.run(changed_call(node, mark), patience))

    def refresh(self) -> None:
        """See now and then what nodes the cluster has: for a source that is kept."""
        if self._addresses is None or time.monotonic() < self._reached + REACH_S:
            return
        known, self._addresses = self._addresses, None
        if self._reach() != known:
            self.close()

    def is_gone(self, name: str, uid: int) -> bool:
        """Return whether the log was deleted: every node says that it has no group of that name, or another one. A log
        that is merely halted is in no survey either. `uid` 0 is whichever there is. Raises what keeps a node from
        answering."""
        try:
            found = self.yard.locate(name)
        except UnknownGroup:
            return True
        return uid != 0 and int(found["uid"]) != uid

    def place(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Return ranges with whom to ask: members that have all of it, followers first. Waits for no node once each
        range has one; without any the range is asked of whoever there is."""
        names = sorted({one.log for one in wanted})
        few = names if len(names) <= NAMES_MAX else None
        addresses = self._reach()
        asked = [node for node in addresses if not SILENT.is_silent(addresses[node])] or list(addresses)
        found: dict[tuple[str, int], list[LogRow]] = {}
        open_ranges = list(wanted)
        for node, answer in as_they_come({node: partial(self._rows, node, few) for node in asked}):
            if isinstance(answer, LogyardError):
                SILENT.note(addresses[node])
                continue
            for row in answer:
                found.setdefault((row.name, row.uid), []).append(row._replace(members=(node,)))
            open_ranges = [one for one in open_ranges if not _holders(one, found)]
            if not open_ranges:
                break
        leaders = {name: max(row.leader for row in rows) for (name, _), rows in found.items()}
        weighed = [Weighed(one._replace(nodes=_holders(one, found)), one.end - one.first) for one in wanted]
        placed = {one.wanted[:4]: one.wanted for one in spread(weighed, leaders)}
        return [placed[one[:4]] for one in wanted]

    def _reach(self) -> dict[int, str]:
        """Return the client address of every node. All of `servers` are asked at once, and the first that answers is
        enough; raises what each of them said when none does."""
        if self._addresses is None:
            known = [server for server in self._servers if not SILENT.is_silent(server)] or self._servers
            refusals: list[tuple[str, LogyardError]] = []
            for server, answer in as_they_come({server: partial(_greet, server, self._tls) for server in known}):
                if isinstance(answer, LogyardError):
                    SILENT.note(server)
                    refusals.append((server, answer))
                    continue
                self._servers = [server, *(other for other in self._servers if other != server)]
                self._addresses = dict(answer)
                self._reached = time.monotonic()
                break
            else:
                why = "; ".join(str(error) for _, error in refusals)
                first = refusals[0][1]
                raise LogyardError(f"servers: none of them answers: {why}", code=first.code, retry=first.retry)
        return self._addresses

    def _rows(self, node: int, names: Sequence[str] | None) -> list[LogRow]:
        rows: list[LogRow] = []

        def ask(patience: float) -> list[LogRow]:
            while True:
                after = rows[-1].name if rows else ""
                page: list[LogRow] = self.yard.run(logs_call(node, after, names), patience)
                rows.extend(page)
                if len(page) < LOG_ROWS:
                    return rows

        return self._patiently(node, ask)

    def _patiently(self, node: int, ask: Callable[[float], T]) -> T:
        """Ask a node something that may take its time, where a node that is not there may not: by what it took last."""
        patience = max(NODE_PATIENCE_S, 10 * self._took.get(node, 0.0))
        if node not in self._took:
            self.yard.run(call_node("cluster", node), NODE_PATIENCE_S)
            patience = ANSWER_S
        began = time.monotonic()
        answer = ask(patience)
        self._took[node] = time.monotonic() - began
        return answer

    def offsets_at(self, times: Mapping[str, int]) -> dict[str, int]:
        """See `LogSource.offsets_at`."""
        found: dict[str, int] = {}
        known = {info.name: info for info in self.logs(times)}
        for name in times:
            if name not in known:
                raise UnknownGroup(f"no log {name!r} on any node that answers")
        now = time.monotonic()
        # Leaders first: who has not all yet answers with where its own copy ends.
        queue = deque(
            Pending(name, known[name].uid, stamp, 0, self._order(preferred(known[name])[::-1]), now)
            for name, stamp in times.items()
        )
        while queue:
            asked = self._front(queue, RANGES_MAX // 2)
            times_asked = [(one.name, one.uid, max(0, one.next)) for one in asked]
            ends_asked = [(one.name, one.uid, FAR) for one in asked]
            call = seek_call(asked[0].nodes, times_asked + ends_asked)
            answers: list[int | LogyardError] = self.yard.run(call, self._timeout_s)
            for one, answer, end in zip(asked, answers[: len(asked)], answers[len(asked) :], strict=True):
                if isinstance(answer, int) and isinstance(end, int):
                    if answer < end or end >= known[one.name].end:
                        found[one.name] = answer
                        continue
                    # Of a time that its copy has not come to yet it knows only where that ends.
                    answer = Busy(f"the newest records of {one.name!r} on node {asked[0].nodes[0]}", 0.05)
                refusal = answer if isinstance(answer, LogyardError) else end
                assert isinstance(refusal, LogyardError), "one of both is"
                self._elsewhere(one, refusal, asked[0].nodes[0])
                queue.append(one)
        return found

    def read(self, wanted: Sequence[Wanted], reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        """See `LogSource.read`. A range is asked for again from where it stands, so no record comes twice. The next
        question is under way while an answer is decoded and its rows are taken."""
        now = time.monotonic()
        queue = deque(
            Pending(one.log, one.uid, one.first, one.end, self._order(one.nodes), now)
            for one in wanted
            if one.first < one.end
        )
        if queue:
            ahead = ThreadPoolExecutor(1, thread_name_prefix="logyard-read")
            try:
                yield from self._read_ahead(queue, reading, ahead)
            finally:
                # Who stops listening waits for nothing.
                ahead.shutdown(wait=False, cancel_futures=True)

    def _read_ahead(
        self, queue: deque[Pending], reading: Reading, ahead: ThreadPoolExecutor
    ) -> Iterator[pyarrow.RecordBatch]:
        from . import frames

        asked = self._front(queue)
        scan = self._scan(asked, reading)
        while True:
            stood = [(one, one.next) for one in asked]
            gaps = list(self._settle(queue, asked, scan, reading))
            following = self._front(queue) if queue else []
            coming = ahead.submit(self._scan, following, reading) if following else None

            def fetch(number: int, offset: int, size: int, asked: Sequence[Pending] = asked) -> Iterator[bytes]:
                return self._body(asked[number], offset, size)

            try:
                yield from frames.decode(scan, [one.name for one in asked], reading, fetch)
            except frames.Damaged as error:
                # Checked before anything of the answer was handed on: all of it is asked for anew, and what comes is
                # behind it.
                wait([coming] if coming else [])
                for one, offset in stood:
                    one.go_back(offset)
                left = [one for one in [*following, *queue] if all(one is not other for other, _ in stood)]
                queue = deque([*asked, *left])
                self._elsewhere(asked[error.number], error, scan.node)
                following = self._front(queue)
                coming = ahead.submit(self._scan, following, reading)
            else:
                yield from gaps
            if coming is None:
                return
            asked, scan = following, coming.result()

    def body(self, wanted: Wanted, offset: int, size: int) -> Iterator[bytes]:
        """See `LogSource.body`."""
        nodes = self._order(wanted.nodes)
        return self._body(Pending(wanted.log, wanted.uid, offset, offset + 1, nodes, time.monotonic()), offset, size)

    def _scan(self, asked: Sequence[Pending], reading: Reading) -> Scan:
        body_bytes = None
        if reading.payloads or reading.verify:
            body_bytes = SCAN_BYTES if reading.verify else min(reading.inline_bytes, SCAN_BYTES)
        call = scan_call(
            asked[0].nodes, [(one.name, one.uid, one.next, one.end) for one in asked],
            max_bytes=min(SCAN_BYTES, reading.batch_bytes), max_records=max(SCAN_ROWS, reading.batch_rows),
            body_bytes=body_bytes,
        )  # fmt: skip
        try:
            return self.yard.run(call, self._timeout_s)
        except LogyardError as error:
            raise self._failure(asked[0], error) from error

    def _settle(
        self, queue: deque[Pending], asked: Sequence[Pending], scan: Scan, reading: Reading
    ) -> Iterator[pyarrow.RecordBatch]:
        """Put back what is not read to its end: first what this node goes on with, last what it could not give."""
        now = time.monotonic()
        again: list[Pending] = []
        for one, outcome in zip(asked, scan.outcomes, strict=False):
            one.go_on(outcome.next, now)
            if scan.node != one.nodes[0] and scan.node in one.nodes:
                # The best node did not answer: no need to find that out for each call.
                one.nodes.remove(scan.node)
                one.nodes.insert(0, scan.node)
            lost = min(outcome.start, one.end) - one.next if isinstance(outcome.error, OutOfRange) else 0
            if lost > 0:
                yield self._gap(one, lost, reading)
                one.go_on(one.next + lost, now)
            if one.next >= one.end:
                continue
            problem = None if lost > 0 else outcome.error or self._behind(one, outcome, scan.node)
            if problem is None:
                again.append(one)
            else:
                yield from self._missing(one, problem, scan.node, reading)
                if one.next < one.end:
                    queue.append(one)
        queue.extendleft(reversed([*again, *asked[len(scan.outcomes) :]]))

    def _behind(self, one: Pending, outcome: Outcome, node: int) -> LogyardError | None:
        if outcome.next < outcome.end:
            return None
        return LogyardError(f"node {node} has applied {one.name!r} up to offset {outcome.end} only", retry="elsewhere")

    def _gap(self, one: Pending, count: int, reading: Reading) -> pyarrow.RecordBatch:
        """Return records that are gone: a row that says so, or `DataLoss`."""
        from . import frames

        if not reading.gaps:
            raise DataLoss(
                f"log {one.name!r}: records {one.next}..{one.next + count - 1} were truncated before they were read; "
                "read from a later offset, or set failOnDataLoss=false to go on with a row of kind 'gap'",
                log=one.name,
                first=one.next,
                end=one.next + count,
            )
        log.warning("log %s: %d records from offset %d are gone", one.name, count, one.next)
        return frames.gap_batch(one.name, one.next, count, reading.payloads)

    def _missing(self, one: Pending, error: LogyardError, node: int, reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        """Look elsewhere for what a node could not give; when no node knows the log any more, yield the rest of the
        range as lost."""
        self._elsewhere(one, error, node)
        if one.unknown.issuperset(self.yard.nodes()):
            # They said so at moments of their own, and others may have it by now.
            if not self._is_gone_now(one):
                one.unknown.clear()
                return
            if not reading.gaps:
                raise DataLoss(
                    f"log {one.name!r}: it was deleted before records {one.next}..{one.end - 1} were read; set "
                    "failOnDataLoss=false to go on with a row of kind 'gap'",
                    log=one.name,
                    first=one.next,
                    end=one.end,
                )
            yield self._gap(one, one.end - one.next, reading)
            one.go_on(one.end, time.monotonic())

    def _is_gone_now(self, one: Pending) -> bool:
        try:
            return self.is_gone(one.name, one.uid)
        except LogyardError:
            return False

    def _elsewhere(self, one: Pending, error: LogyardError, node: int) -> None:
        """Ask the next node; after a round without any help wait a little. Raises when that took too long."""
        one.refuse(node, error)
        if one.refused % len(one.nodes):
            return
        if time.monotonic() > one.since + self._timeout_s:
            raise self._failure(one, error)
        for known in self.yard.nodes():
            if known not in one.nodes:
                one.nodes.append(known)
        threading.Event().wait(backoff(one.refused // len(one.nodes), self._chance))

    def _failure(self, one: Pending, error: LogyardError) -> LogyardError:
        return LogyardError.told(
            f"log {one.name!r}: offset {one.next} cannot be read from any of the nodes {one.nodes}: {error}",
            error.details, code=error.code, retry=error.retry,
        )  # fmt: skip

    def _body(self, one: Pending, offset: int, size: int) -> Iterator[bytes]:
        """Yield a body that did not come along, in pieces, from any node that has it."""
        steps = body_steps(one.name, offset, 0, size, None, one.uid)
        step = next(steps, None)
        while step is not None:
            if isinstance(step, Call):
                step = steps.send(self._asked(one, step))
            else:
                yield bytes(step)
                step = next(steps, None)

    def _asked(self, one: Pending, call: Call[Any]) -> Any:
        error: LogyardError | None = None
        for _ in range(len(one.nodes)):
            # Any member will do; who can't be reached is passed over by the client.
            call = call._replace(group="", nodes=tuple(one.nodes))
            try:
                return self.yard.run(call, self._timeout_s)
            except LogyardError as refusal:
                error = refusal
                one.nodes.append(one.nodes.pop(0))
        assert error is not None
        raise self._failure(one, error) from error

    def _front(self, queue: deque[Pending], most: int = RANGES_MAX) -> list[Pending]:
        """Return the next ranges that have the same best node."""
        node = queue[0].nodes[0]
        count = 0
        for one in islice(queue, most):
            if one.nodes[0] != node:
                break
            count += 1
        return [queue.popleft() for _ in range(count)]

    def _order(self, nodes: Sequence[int]) -> list[int]:
        return list(dict.fromkeys([*nodes, *self.yard.nodes()]))


def _holders(one: Wanted, found: Mapping[tuple[str, int], Sequence[LogRow]]) -> tuple[int, ...]:
    """Return the nodes whose member has all of a range, or has what is left of one that was truncated."""
    return tuple(row.members[0] for row in found.get((one.log, one.uid), ()) if row.end >= one.end)


def merge_rows(rows: Sequence[LogRow]) -> list[LogInfo]:
    """Return one row a log, by name."""
    by_name: dict[str, list[LogRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return [merged(by_name[name]) for name in sorted(by_name)]


def preferred(info: LogInfo) -> tuple[int, ...]:
    """Return whom to ask for a log: followers, then its leader."""
    followers = tuple(node for node in info.members if node != info.leader)
    return (*followers, info.leader) if info.leader else followers
