"""Clients under whose load the faults happen, and what each of them was told: the histories that are judged.

Registers and keys (`kv_load`): each operation is a line of `tests.linearizability`. Logs: every record has an id of its
own; what was acknowledged, refused or left open is kept by id, and what any reader saw, by offset. An error other than
``unknown`` and ``session_expired`` is a promise that the command did not happen, and is judged as one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from logyard.client.sync import Yard
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import Frame

from .register import CAS, OK, WRITE, encode

REGISTERS = ("r0", "r1", "r2", "r3")
BUSY_LOGS = ("l0", "l1", "l2")
QUIET_LOGS = ("s0", "s1")
"""Logs that sleep between two appends, and are woken by the next, whatever happened meanwhile."""
LOGS = (*BUSY_LOGS, *QUIET_LOGS)
RING = "ring"
"""A log that is truncated all the time: its space must come back."""
KVS = ("k0",)
QUEUES = ("q0",)
NAMES = (*REGISTERS, *LOGS, RING, *KVS, *QUEUES)
KEYS = 8
TIMEOUT_S = 4.0
SIZES = (0, 10, 200, 2000, 9000, 70_000)
LARGE_SIZES = (1 << 20, (1 << 20) + 1, 3 << 20)
LARGE_SHARE = 0.01
"""Of all bodies: above 1 MiB they travel in pieces."""
RING_RECORDS = 40
OPEN = ("unknown", "session_expired")


class Journal:
    """What all clients saw. Safe to share among threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: dict[str, list[dict[str, Any]]] = {"register": [], "kv": [], "txn": []}
        self.acknowledged: dict[tuple[str, int], int] = {}
        self.refused: set[int] = set()
        self.seen: dict[tuple[str, int], int] = {}
        self.violations: list[str] = []
        self.done = 0
        self.errors: dict[str, int] = {}

    def row(self, process: int, kind: str, f: str, key: str, value: object, model: str = "register") -> None:
        """A line of the history of registers, or of keys."""
        with self.lock:
            self.rows[model].append(
                {"process": process, "type": kind, "f": f, "key": key, "value": value, "time": time.monotonic_ns()}
            )
            self.done += kind == "ok"

    def count(self) -> None:
        """One more operation was done."""
        with self.lock:
            self.done += 1

    def appended(self, log: str, offset: int, number: int) -> None:
        """A record was acknowledged at an offset."""
        with self.lock:
            self.done += 1
            self.acknowledged[log, offset] = number
        self.saw(log, offset, number)

    def saw(self, log: str, offset: int, number: int) -> None:
        """A reader found a record at an offset: everybody must find the same there."""
        with self.lock:
            if self.seen.setdefault((log, offset), number) != number:
                self.violations.append(f"{log} at {offset}: {self.seen[log, offset]} and {number} were both seen")

    def refusal(self, error: LogyardError) -> None:
        """Count an error by its code."""
        with self.lock:
            # Errors without a code of their own are told apart by their words.
            code = error.code if error.code != "error" else f"error: {error.message[:80]}"
            self.errors[code] = self.errors.get(code, 0) + 1

    def violation(self, text: str) -> None:
        """Something that must never be."""
        with self.lock:
            self.violations.append(text)


def body(number: int) -> bytes:
    """The payload of record `number`: its id, and bytes that nobody else's has."""
    draw = random.Random(number)
    sizes = LARGE_SIZES if draw.random() < LARGE_SHARE else SIZES
    return number.to_bytes(8, "big") + draw.randbytes(draw.choice(sizes))


def number_of(payload: bytes) -> int | None:
    """The id in a record's payload; None if a byte of it is wrong."""
    number = int.from_bytes(payload[:8], "big")
    return number if payload == body(number) else None


class Client(threading.Thread):
    """One client: operations one after the other until `stop` is set."""

    def __init__(self, number: int, servers: Sequence[str], journal: Journal, stop: threading.Event, seed: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.number = number
        self.journal = journal
        self.stop = stop
        self.draw = random.Random(f"{seed} client {number}")
        self.count = 0
        self.last: dict[str, object] = {}
        self.yard = Yard(servers, timeout=TIMEOUT_S, exactly_once=True)
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Until told to stop. A failure that is no refusal is kept for the judge."""
        try:
            with self.yard:
                while not self.stop.is_set():
                    self.step()
        except BaseException as error:
            self.failure = error
            raise

    def step(self) -> None:
        """One operation."""
        raise NotImplementedError

    def fresh(self) -> int:
        """A number that nobody else has."""
        self.count += 1
        return self.number * 1_000_000_000 + self.count

    def paused(self, error: LogyardError) -> None:
        """After a refusal: not at once again."""
        self.journal.refusal(error)
        self.stop.wait(0.02)


class RegisterClient(Client):
    """Reads, writes and compare-and-sets of registers."""

    def step(self) -> None:
        """One of them."""
        group = self.draw.choice(REGISTERS)
        key = f"{group}/{self.draw.randrange(KEYS)}"
        chance = self.draw.random()
        if chance < 0.4:
            self.operate("read", key, None, lambda: self.read(group, key))
        elif chance < 0.75:
            new = self.fresh()
            self.operate("write", key, new, lambda: self.command(group, encode(WRITE, key, new)) or new)
        else:
            new, expected = self.fresh(), self.last.get(key)
            self.operate("cas", key, [expected, new], lambda: self.compare(group, key, expected, new))

    def operate(self, f: str, key: str, value: object, call: Callable[[], object]) -> None:
        """One operation and its lines."""
        journal = self.journal
        journal.row(self.number, "invoke", f, key, value)
        try:
            found = call()
        except LogyardError as error:
            kind = "info" if error.code in OPEN and f != "read" else "fail"
            journal.row(self.number, kind, f, key, value)
            self.paused(error)
            return
        if f == "cas" and not found:
            # It was applied, and found another value there: that is judged as well.
            journal.row(self.number, "ok", f, key, False)
            self.last.pop(key, None)
            return
        self.last[key] = found
        journal.row(self.number, "ok", f, key, found if f == "read" else value)

    def read(self, group: str, key: str) -> object:
        """A linearizable read."""
        return msgpack.unpackb(self.yard.log(group).query(key.encode(), consistency="linearizable", timeout=TIMEOUT_S))

    def command(self, group: str, command: bytes) -> bytes:
        """A command with a payload, in this client's session: exactly once."""
        frame = Frame()
        frame.command = command
        frame.put(b"", self.draw.randbytes(self.draw.choice(SIZES[:4])))
        reply, _ = self.yard.append(group, frame)
        return b"" if reply == OK else reply

    def compare(self, group: str, key: str, expected: object, new: int) -> int:
        """The new value, or 0."""
        return 0 if self.command(group, encode(CAS, key, expected, new)) else new


class LogClient(Client):
    """Appends to logs, and reads of any member."""

    def step(self) -> None:
        """Mostly an append."""
        log = self.draw.choice(BUSY_LOGS)
        if self.draw.random() < 0.8:
            self.append(log)
        else:
            self.look(log)

    def append(self, log: str) -> int:
        """The record's offset, or -1."""
        number = self.fresh()
        try:
            offset = self.yard.log(log).append(b"", body(number))
        except LogyardError as error:
            if error.code not in OPEN:
                with self.journal.lock:
                    self.journal.refused.add(number)
            self.paused(error)
            return -1
        self.journal.appended(log, offset, number)
        return offset

    def look(self, log: str) -> None:
        """Read the end of what some member has."""
        try:
            node = self.draw.randrange(3) + 1
            start, end = self.yard.log(log).latest(node=node, consistency="local")[:2]
            page = self.yard.log(log).poll(max(start, end - 20), max_records=20, node=node, consistency="local")
            for record in page:
                self.judge(log, record.offset, bytes(record.payload or b""))
        except LogyardError as error:
            self.paused(error)

    def judge(self, log: str, offset: int, payload: bytes) -> None:
        """A record that was served."""
        number = number_of(payload)
        if number is None:
            self.journal.violation(f"{log} at {offset}: wrong bytes were served")
        else:
            self.journal.saw(log, offset, number)


class QuietClient(LogClient):
    """Appends to logs that fall asleep in between."""

    def step(self) -> None:
        """One append, then a rest that may be longer than the time after which a group sleeps."""
        self.append(self.draw.choice(QUIET_LOGS))
        self.stop.wait(self.draw.uniform(0.2, 4))


class RingClient(LogClient):
    """Appends to the ring, and truncates it."""

    def step(self) -> None:
        """An append; now and then all but the last are dropped."""
        offset = self.append(RING)
        if offset > RING_RECORDS and offset % RING_RECORDS == 0:
            try:
                self.yard.log(RING).truncate(offset - RING_RECORDS // 2)
            except LogyardError as error:
                self.paused(error)
