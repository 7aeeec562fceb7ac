"""What the tests of the pipeline share: filling logs, reading them through a source, waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow

from logyard.client.sync import Yard
from logyard.pipeline.network import NetworkSource, preferred
from logyard.pipeline.schema import arrow_schema
from logyard.pipeline.sources import LogInfo, Reading, Wanted
from logyard.protocol.errors import NotLeader, Refused, Unknown, UnknownGroup


def reach(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Look until something outside of this process is so. A node that knows no such log may only not have it yet."""
    pause, deadline = threading.Event().wait, time.monotonic() + timeout_s

    def holds() -> bool:
        try:
            return condition()
        except UnknownGroup:
            return False

    while not holds():
        assert time.monotonic() < deadline, "it never was so"
        pause(0.02)


def lead(yard: Yard, name: str, node: int) -> None:
    """Have a node lead a log: refused while that stands still, which a busy machine has it do, it is asked again."""

    def led() -> bool:
        try:
            yard.transfer(name, node)
        except (NotLeader, Refused, Unknown):
            return False
        return True

    reach(led)


def fill(yard: Yard, names: Iterable[str], records: int, body: bytes | None = b"x" * 50) -> None:
    """The same records in each of some new logs, in one frame."""
    names = list(names)
    yard.create_many(names)
    for name in names:
        yard.log(name).append_many([(b"%s %d" % (name.encode(), n), body) for n in range(records)])


def whole(info: LogInfo, **change: Any) -> Wanted:
    """All of a log."""
    return Wanted(info.name, info.uid, info.start, info.end, preferred(info))._replace(**change)


def read(source: NetworkSource, wanted: Sequence[Wanted], reading: Reading | None = None) -> list[dict[str, Any]]:
    """All rows."""
    reading = reading or Reading()
    batches = list(source.read(wanted, reading))
    found: list[dict[str, Any]] = pyarrow.Table.from_batches(batches, arrow_schema(reading.payloads)).to_pylist()
    return found
