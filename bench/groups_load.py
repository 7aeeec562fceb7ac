"""One process of `bench groups`: a member of the consumer group, which commits every second.

Run as ``python -m logyard.bench.groups_load``: it reads a specification (one JSON line), prints "ready", waits for
"go", consumes until "end" was said and nothing comes any more, prints one JSON line. A body begins with when it was
sent (ns of the machine's monotonic clock; 0: before anybody consumed), and its number.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import Any, NamedTuple

from logyard.client._async.consumer import GroupConsumer
from logyard.client.aio import connect

from .loops import run_process

HEAD = struct.Struct("<QQ")
"""When it was sent, its number."""
COMMIT_S = 1.0
IDLE_S = 1.0
GET_S = 0.2


class GroupsSpec(NamedTuple):
    """What a consumer does."""

    addresses: list[str]
    topic: str
    group: str
    runtime: str


class Tally:
    """What one process consumed. `first`, `last`: when the first and the last record came that were there before."""

    def __init__(self) -> None:
        self.count = self.filled = 0
        self.first = self.last = 0.0
        self.latencies_us: list[int] = []
        self.numbers = bytearray(1 << 20)
        self.twice = 0
        self.over = False

    def end(self) -> None:
        """Note that nothing is sent any more."""
        self.over = True

    def take(self, body: memoryview | None) -> None:
        """Count a record."""
        assert body is not None
        sent, number = HEAD.unpack_from(body)
        self.count += 1
        if sent:
            self.latencies_us.append((time.monotonic_ns() - sent) // 1000)
        else:
            self.filled += 1
            self.last = time.monotonic()
            self.first = self.first or self.last
        if number >> 3 >= len(self.numbers):
            self.numbers += bytes(max(len(self.numbers), number >> 3))
        bit = 1 << (number & 7)
        self.twice += bool(self.numbers[number >> 3] & bit)
        self.numbers[number >> 3] |= bit


async def consume(records: GroupConsumer, tally: Tally) -> None:
    """Consume until "end" was said and nothing comes."""
    while True:
        record = await records.get(IDLE_S if tally.over else GET_S)
        if record is not None:
            tally.take(record.record.view)
        elif tally.over:
            await records.commit()
            return


async def load_main(spec: GroupsSpec) -> None:
    """Work, print."""
    tally = Tally()
    async with connect(spec.addresses) as yard:
        print("ready", flush=True)
        if sys.stdin.readline().strip() != "go":
            return
        cpu = time.process_time()

        async def listen() -> None:
            await yard.runtime.in_thread(sys.stdin.readline)
            tally.end()

        async with (
            yard.consume(spec.topic, group=spec.group, commit_every=COMMIT_S) as records,
            yard.runtime.nursery() as nursery,
        ):
            nursery.start_soon(listen)
            await consume(records, tally)
        result: dict[str, Any] = {
            "consumed": tally.count, "filled": tally.filled, "twice": tally.twice, "first": tally.first,
            "last": tally.last, "latencies_us": sorted(tally.latencies_us),
            "cpu_s": round(time.process_time() - cpu, 3),
        }  # fmt: skip
        print(json.dumps(result), flush=True)


def main() -> None:
    """Enter the process: its specification is the first line that it reads."""
    spec = GroupsSpec(**json.loads(sys.stdin.readline()))
    run_process(load_main, spec, spec.runtime, "consumer process")


if __name__ == "__main__":
    main()
