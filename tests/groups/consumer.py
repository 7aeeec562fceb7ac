"""``python -m tests.groups.consumer SERVERS TOPIC GROUP JOURNAL SEED [NAME]``: a member that writes down, as lines of
JSON, whatever its loop is given and what its commits come to. Ends in order on SIGTERM."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from logyard.client._sync.consumer import GroupConsumer
from logyard.client.reading import Consumed
from logyard.client.sync import connect_sync
from logyard.protocol.errors import LogyardError

TTL_S = 3.0


class Journal:
    """A file of lines that are there as soon as they are written, also if this process is killed."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *row: object) -> None:
        """Write a line at once."""
        os.write(self._file, json.dumps(row).encode() + b"\n")


REBORN = 1000
"""A partition whose number was used before is written down as another one."""


def borns(records: GroupConsumer) -> dict[int, int]:
    """Return which partition of its number each one is that the member owns."""
    return {one.number: one.number + REBORN * one.born for one in records._own.readings.values()}


def commit(records: GroupConsumer, journal: Journal, record: Consumed | None) -> None:
    """Commit, and write down what counts."""
    epochs = {one.number: one.epoch for one in records._own.readings.values()}
    named = borns(records)
    asked = time.monotonic()
    with suppress(LogyardError):
        done = records.commit(record)
        counted = [[named[number], epochs[number], offset] for number, offset in done.offsets.items()]
        journal.write("commit", asked, time.monotonic(), counted)


def main(servers: str, topic: str, group: str, path: str, seed: str, name: str = "") -> None:
    """Consume until SIGTERM."""
    chance, journal = random.Random(seed), Journal(path)
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(number)

    signal.signal(signal.SIGTERM, end)
    with (
        connect_sync(servers.split(",")) as yard,
        yard.consume(topic, group=group, member=name, ttl=TTL_S, max_records=50) as records,
    ):
        left, last, member = chance.randint(1, 40), None, 0
        named: dict[int, int] = {}
        while not ended:
            try:
                record = records.get(0.3)
            except LogyardError as error:
                journal.write("error", time.monotonic(), error.code)
                if error.code == "fenced":
                    return
                continue
            if records._own.member != member:
                member = records._own.member
                journal.write("member", member)
            if record is None:
                commit(records, journal, None)
                last = None
                continue
            at = time.monotonic()
            named |= borns(records)
            key, _, number = record.payload.partition(b":") if record.payload else (b"0", b"", b"0")
            journal.write(
                "given",
                at,
                records._own.member,
                named.get(record.partition, record.partition),
                record.epoch,
                record.offset,
                int(key),
                int(number),
            )
            last, left = record, left - 1
            if not left:
                commit(records, journal, record)
                left = chance.randint(1, 40)
        commit(records, journal, last)


if __name__ == "__main__":
    main(*sys.argv[1:])
