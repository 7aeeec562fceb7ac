"""One upload process: a stream of random bytes into one log, as fast as it goes.

Run as ``python -m logyard.bench.upload``: it reads a specification (one JSON line) from standard input, prints
"ready", waits for a line "go", streams, prints one JSON line. Started by `bench.cases.mixed`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator

import xxhash

from .loops import end_with_parent

PART_BYTES = 4 << 20


def parts(size: int, seed: int) -> Iterator[bytes]:
    """Yield `size` bytes in parts that differ from one another."""
    pool = random.Random(seed).randbytes(PART_BYTES)
    for number, at in enumerate(range(0, size, PART_BYTES)):
        part = number.to_bytes(8, "little") + pool[8:]
        yield part[: size - at]


def digest_of(source: Iterator[bytes]) -> str:
    """Return the xxh3-128 of all parts."""
    found = xxhash.xxh3_128()
    for part in source:
        found.update(part)
    return str(found.hexdigest())


def main() -> None:
    """Upload once."""
    from logyard.client.sync import connect_sync

    spec = json.loads(sys.stdin.readline())
    end_with_parent()
    size, seed = int(spec["bytes"]), int(spec["seed"])
    with connect_sync(spec["addresses"]) as yard:
        log = yard.log(spec["log"])
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        offset = log.append_stream(b"upload", parts(size, seed), size)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "offset": offset}), flush=True)


if __name__ == "__main__":
    main()
