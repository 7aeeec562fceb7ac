"""Records that are no rows, of as many kinds as are asked for, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from logyard.pipeline.tables.rules import RECORD_BYTES_MAX


def wrong(seed: int, count: int, field: str, dimension: str) -> Iterator[bytes]:
    """`field` is a long of the table's schema."""
    chance = random.Random(seed)
    good = {"time": "2026-11-23T09:30:00Z", field: 1, dimension: "a", "other": {"deep": ["ü", 1.5, None]}}

    def cut() -> bytes:
        text = json.dumps(good).encode()
        return text[: chance.randrange(len(text))]

    def broken() -> bytes:
        while True:
            text = bytearray(json.dumps(good).encode())
            for at in chance.sample(range(len(text)), 3):
                text[at] = chance.choice(b'{}[],:"\\x\x00\x1f\x80\xff')
            try:
                # It may be a good record still.
                json.loads(text.decode())
            except ValueError:
                return bytes(text)

    def outside() -> bytes:
        return chance.choice([b"", b" ", b"null", b"true", b"1", b'"x"', b"[]", b"[{}]", b"[" * 999, b"\xef\xbb\xbf{}"])

    def noise() -> bytes:
        return chance.randbytes(chance.randrange(1, 64))

    def number() -> bytes:
        text = chance.choice(["NaN", "-Infinity", "1e999", "01", "+1", ".5", "0x10", "1_000", "1" * 5000])
        return json.dumps(good).replace('"other": ', f'"also": {text}, "other": ').encode()

    def time() -> bytes:
        values: list[Any] = [None, True, [], {}, "", "soon", "2026-13-01", "25:00", 1e300, -1e300, 10**30, "0000-01-01"]
        return json.dumps({**good, "time": chance.choice(values)}).encode()

    def kind() -> bytes:
        values: list[Any] = ["1", 1.5, True, [], {}, 1 << 63, -(1 << 63) - 1, chance.random(), str(chance.random())]
        return json.dumps({**good, field: chance.choice(values)}).encode()

    def place() -> bytes:
        values: list[Any] = ["", [], {}, 1.5, "x" * chance.randrange(65, 999)]
        return json.dumps({**good, dimension: chance.choice(values)}).encode()

    def surrogate() -> bytes:
        return json.dumps({**good, "other": "x" * chance.randrange(9) + chr(chance.randrange(0xD800, 0xE000))}).encode()

    def large() -> bytes:
        return json.dumps({**good, "other": "x" * (RECORD_BYTES_MAX + chance.randrange(9))}).encode()

    kinds: list[Callable[[], bytes]] = [
        cut, cut, broken, outside, noise, noise, number, time, time, kind, kind, place, surrogate,
    ]  # fmt: skip
    for turn in range(count):
        yield large() if turn % 200 == 7 else chance.choice(kinds)()
