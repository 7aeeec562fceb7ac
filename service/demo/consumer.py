"""``python -m logyard.service.demo.consumer SERVERS JOURNAL TOPIC...``: a consumer process of `logyard demo --cluster`,
a member of each topic's group.

It writes down, as lines of JSON, which partitions it has, what its loops are given and what its commits come to; times
are of the machine's monotonic clock. It ends in order when its standard input does. Started by `service.demo.cluster`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from logyard.client.sync import connect_sync
from logyard.protocol.errors import LogyardError

if TYPE_CHECKING:
    from logyard.client._sync.consumer import GroupConsumer
    from logyard.client.reading import Consumed

GET_S = 0.2
COMMIT_S = 0.5
PAGE_RECORDS = 200


def group_of(topic: str) -> str:
    """Return the name of the group that reads a topic."""
    return f"{topic}-readers"


class Journal:
    """A file of lines, for several threads; each line is there as soon as it is written, also if the process is
    killed."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *row: object) -> None:
        """Write a line."""
        os.write(self._file, json.dumps(row).encode() + b"\n")


class Reader:
    """The member of one topic's group. `failed`: what ended it before its time."""

    def __init__(self, servers: list[str], topic: str, journal: Journal, over: threading.Event) -> None:
        self.servers = servers
        self.topic = topic
        self.journal = journal
        self.over = over
        self.failed = ""

    def run(self) -> None:
        """Consume until told to end."""
        try:
            with (
                connect_sync(self.servers) as yard,
                yard.consume(self.topic, group=group_of(self.topic), max_records=PAGE_RECORDS) as records,
            ):
                self._consume(records)
        except LogyardError as error:
            self.failed = f"{self.topic}: {error}"
            self.over.set()

    def _consume(self, records: GroupConsumer) -> None:
        owned: list[int] = []
        epochs: dict[int, int] = {}
        commit_at = 0.0
        last: Consumed | None = None
        while not self.over.is_set():
            last = records.get(GET_S)
            now = time.monotonic()
            if records.assignment != owned:
                owned = records.assignment
                self.journal.write("owns", now, self.topic, owned)
            if last is not None:
                epochs[last.partition] = last.epoch
                key, _, number = bytes(last.payload or b"").partition(b":")
                place = last.partition, last.epoch, last.offset
                self.journal.write("given", now, self.topic, *place, int(key), int(number))
            if now >= commit_at:
                self._commit(records, last, epochs)
                commit_at = now + COMMIT_S
        self._commit(records, last, epochs)

    def _commit(self, records: GroupConsumer, last: Consumed | None, epochs: dict[int, int]) -> None:
        """Commit what is done with, and write down what counts. What can't be committed now is committed later."""
        asked = time.monotonic()
        with suppress(LogyardError):
            offsets = records.commit(last).offsets
            counted = [[number, epochs[number], offset] for number, offset in offsets.items() if number in epochs]
            if counted:
                self.journal.write("commit", asked, time.monotonic(), self.topic, counted)


def await_end(over: threading.Event) -> None:
    """Say that it is over when standard input ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    over.set()


def main(servers: str, path: str, *topics: str) -> int:
    """Consume until standard input ends; return the exit code."""
    journal, over = Journal(path), threading.Event()
    readers = [Reader(servers.split(","), topic, journal, over) for topic in topics]
    threads = [threading.Thread(target=reader.run, name=reader.topic) for reader in readers]
    for thread in threads:
        thread.start()
    threading.Thread(target=await_end, args=(over,), daemon=True, name="standard input").start()
    for thread in threads:
        thread.join()
    journal.write("end", time.monotonic())
    failed = "; ".join(reader.failed for reader in readers if reader.failed)
    print(failed, end="", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
