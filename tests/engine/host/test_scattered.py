"""Releases in any order, of any part of an entry: the counters of homes are exact, also where they overlap what is
dead already."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgpack
import pytest

from logyard.engine.machine import Applied, Context, PayloadRange, PayloadRef, Position, Reject, Release, Sections
from logyard.protocol.frame import encode_frame

from .cluster import KIB, cluster, payload_books, until

TRIALS = 6


class Scattered:
    """Keeps whatever it is not told to release: a command is a list of ranges, or nothing."""

    version = 1

    def __init__(self) -> None:
        self.last = 0

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        self.last = context.index
        if command == b"no":
            raise Reject("no", "it wants nothing")
        ranges: Sequence[Sequence[Sequence[int]]] = msgpack.unpackb(command) if command else []
        return Applied(b"%d" % context.index, [Release(Position(*first), Position(*end)) for first, end in ranges])

    def snapshot(self) -> Sections:
        return {"state": b"%d" % self.last}

    def restore(self, sections: Sections) -> None:
        self.last = int(sections["state"])

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()


def ranges(chance: random.Random, last: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """A few ranges up to an index: single records, parts of entries, stretches that end inside of others."""
    found = []
    for _ in range(chance.randrange(1, 4)):
        index, ordinal = chance.randrange(1, last + 1), chance.randrange(4)
        if chance.random() < 0.6:
            found.append(((index, ordinal), (index, ordinal + chance.randrange(1, 3))))
        else:
            end = min(last, index + chance.randrange(8))
            found.append(((index, ordinal), max((index, ordinal + 1), (end, chance.randrange(4)))))
    return found


@pytest.mark.parametrize("seed", range(TRIALS))
async def test_counters_are_exact_for_releases_in_any_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with cluster(tmp_path, 1, machines=lambda name, arguments: Scattered(), payload_cache_bytes=0) as c:
        node, member, last = c.nodes[1], c.member(1), 1
        for step in range(90):
            bodies = [bytes([step]) * chance.choice((100, 5 * KIB, 9 * KIB)) for _ in range(chance.randrange(1, 4))]
            command = msgpack.packb(ranges(chance, last)) if chance.random() < 0.5 else b""
            frame = encode_frame([(b"h", body) for body in bodies], command=command)
            last = int(await node.commit(member, frame))
            if step % 30 == 29:
                await c.roll(1)
            if step == 59:
                # Some are at home in a generation from here on.
                await node.snapshot(["log"])
                file = min(c.system(1).storage.location.files)
                await c.system(1).storage.compactor.migrate(c.system(1).storage.location.files[file])
        await c.roll(1)
        before = payload_books(c.system(1))
        await c.restart(1)
        member = c.member(1)
        await until(lambda: member.raft.applied >= last)
        assert payload_books(c.system(1)) == before, "what was counted along the way is what a start counts"


async def test_a_payload_released_twice_is_counted_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, machines=lambda name, arguments: Scattered(), payload_cache_bytes=0) as c:
        node, member = c.nodes[1], c.member(1)

        async def append(command: bytes = b"", size: int = 20 * KIB) -> int:
            return int(await node.commit(member, encode_frame([(b"", b"x" * size)], command=command)))

        first = [await append() for _ in range(20)]
        await c.roll(1)
        number = min(c.system(1).storage.location.files)
        one = first[10]
        await append(msgpack.packb([((one, 0), (one + 1, 0))]), 1)
        whole = c.system(1).storage.location.files[number].live
        # The stretch holds the one that is dead already: it must not be taken from the others' share again.
        await append(msgpack.packb([((first[0], 0), (first[15], 0))]), 1)
        left = c.system(1).storage.location.files[number].live
        assert whole - left == 14 * (20 * KIB + 8)
        await append(msgpack.packb([((first[15], 0), (first[18], 0))]), 1)
        storage = c.system(1).storage
        assert storage.location.files[number].live >= 2 * 20 * KIB, "the last ones live here and nowhere else"
