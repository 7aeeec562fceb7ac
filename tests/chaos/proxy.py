"""The wires between the nodes: a TCP proxy for each ordered pair, whose directions can be held, cut and spoilt.

A process of its own, so that it takes no time of the load's interpreter: ``python -m tests.chaos.proxy`` reads one JSON
object a line from standard input and answers each with one. First ``{"pairs": [[source, target, listen, dial]]}``, then
orders: ``held`` (directions [from, to] whose bytes wait; all others flow), ``reset`` (directions whose connections end
with a reset), ``flip`` (directions in whose next bytes one bit is flipped). The answer counts what was hit since the
last order. In logyard a connection carries frames one way only, from the node that dialled.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
from functools import partial
from typing import Any

import trio

Direction = tuple[int, int]
CHUNK = 65536
HANG_UP = struct.pack("ii", 1, 0)


class Wires:
    """The state of every direction, and what orders have hit."""

    def __init__(self) -> None:
        self.held: set[Direction] = set()
        self.flip: set[Direction] = set()
        self.changed = trio.Event()
        self.open: dict[trio.SocketStream, tuple[Direction, Direction]] = {}
        self.hits = {"held": 0, "reset": 0, "flip": 0}

    def obey(self, order: dict[str, Any]) -> dict[str, int]:
        """Take an order; what the last one hit."""
        found = dict(self.hits)
        self.hits = {"held": 0, "reset": 0, "flip": 0}
        if "held" in order:
            self.held = {(source, target) for source, target in order["held"]}
            self.changed.set()
            self.changed = trio.Event()
        self.flip |= {(source, target) for source, target in order.get("flip", ())}
        for pair in order.get("reset", ()):
            for stream, directions in list(self.open.items()):
                if tuple(pair) in directions:
                    self.hits["reset"] += 1
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HANG_UP)
                    stream.socket.close()
        return found

    async def copy(self, source: trio.SocketStream, target: trio.SocketStream, direction: Direction) -> None:
        """Bytes of one direction until one end closes."""
        while data := await source.receive_some(CHUNK):
            if direction in self.held:
                self.hits["held"] += 1
                while direction in self.held:
                    await self.changed.wait()
            if direction in self.flip:
                self.flip.discard(direction)
                self.hits["flip"] += 1
                spoilt = bytearray(data)
                spoilt[random.randrange(len(spoilt))] ^= 1 << random.randrange(8)
                data = bytes(spoilt)
            await target.send_all(data)

    async def carry(self, source: int, target: int, dial: int, near: trio.SocketStream) -> None:
        """One connection that `source` dialled to `target`."""
        try:
            # A held wire carries no handshake either.
            while (source, target) in self.held:
                self.hits["held"] += 1
                await self.changed.wait()
            far = await trio.open_tcp_stream("127.0.0.1", dial)
        except OSError:
            await near.aclose()
            return
        assert isinstance(far, trio.SocketStream)
        directions = ((source, target), (target, source))
        self.open[near] = self.open[far] = directions
        try:
            async with trio.open_nursery() as nursery:

                async def one_way(from_: trio.SocketStream, to: trio.SocketStream, direction: Direction) -> None:
                    try:
                        await self.copy(from_, to, direction)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        pass
                    nursery.cancel_scope.cancel()

                nursery.start_soon(one_way, near, far, directions[0])
                nursery.start_soon(one_way, far, near, directions[1])
        finally:
            del self.open[near], self.open[far]
            near.socket.close()
            far.socket.close()


async def main() -> None:
    """Serve until standard input ends."""
    wires = Wires()
    async with trio.open_nursery() as nursery:
        orders = trio.lowlevel.FdStream(os.dup(0))
        pending = b""
        async for data in orders:
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                for source, target, listen, dial in order.pop("pairs", ()):
                    carry = partial(wires.carry, source, target, dial)
                    await nursery.start(partial(trio.serve_tcp, carry, listen, host="127.0.0.1"))
                print(json.dumps(wires.obey(order)), flush=True)
        nursery.cancel_scope.cancel()


class Proxy:
    """The process, from the outside. BLOCKING."""

    def __init__(self, pairs: list[tuple[int, int, int, int]]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.proxy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.order(pairs=pairs)

    def order(self, **order: object) -> dict[str, int]:
        """Give an order; what the last one hit."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        found: dict[str, int] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


if __name__ == "__main__":
    trio.run(main)
