"""``python -m tests.fuzz.live [--seconds N] [--seed S] [--doors A,B] [--planted [NAME]] [--json]``: strangers.

A node with a group of every machine serves honest clients while strangers send it spoilt copies of live traffic, with
the sessions it was sent under: at the client door, at the peer door (without the secret, and with it), and at the etcd
gateway. Some of them read nothing, read slowly, or open and leave; then a crowd of idle ones fills the table of
descriptors. All the while the honest ones are answered, no group halts, nothing of an unproved peer is kept, and memory
and sockets come back. `--planted` undoes a mending first: it has to be found. Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import trio

from logyard.client.aio import Yard, connect
from logyard.engine.config import SystemConfig
from logyard.engine.transport import codec
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import (
    BULK,
    CONTROL,
    Hello,
    Renewal,
    encode_blob,
    encode_hello,
    encode_renewal,
)
from logyard.engine.transport.link import dial
from logyard.engine.transport.proof import ask, encode_challenge
from logyard.protocol import wire
from logyard.service.config import NodeConfig, make_secret
from logyard.service.local_cluster import free_ports
from logyard.service.node import Node, serve
from tests.crash.run import place
from tests.engine.transport.recorder import append, make_entry, reply
from tests.service.etcd.server import EtcdServer, spawned
from tests.sim.bugs import planted

from .live_bugs import BUGS
from .targets import Target, mutate

MIB = 1 << 20
DOORS = ("client", "peers", "gateway", "crowd")
ANSWER_S = 15.0
"""An honest client is answered within this, whatever strangers do: the machine may be busy with other things."""
RECORDED_BYTES = 64 << 10
GROWTH_BYTES = 96 * MIB
"""Of which the payload cache may have 8."""
SPARE_SOCKETS = 16
ROOM = 160
"""Descriptors that the crowd's node has beside what it has at first."""
LIMITS = {
    "wal_file_bytes": MIB, "connections_max": 4096, "node_memory_bytes": 256 * MIB, "hibernate_after_ms": 0,
    "payload_cache_bytes": 8 * MIB,
}  # fmt: skip
MACHINES = ("log", "kv", "queue")
CROWD = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[2])):
    try:
        sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)
        sock.sendall(bytes.fromhex(sys.argv[3]))
        held.append(sock)
    except OSError:
        pass
print("there", flush=True)
time.sleep(600)
"""


class Broken(Exception):
    """A promise that was broken."""


class Errors(logging.Handler):
    """What the product calls a bug of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what came with a traceback."""
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class Live:
    """One run: the node, what was recorded of its traffic, and what was sent to it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ports = free_ports(4)
        make_secret(directory / "peer.secret")
        self.secret = (directory / "peer.secret").read_bytes().strip()
        client, peer, other, proxy = self.ports
        self.config = NodeConfig(
            id=1, directory=directory / "data", client_listen=("127.0.0.1", client), peer_listen=("127.0.0.1", peer),
            peers={2: ("127.0.0.1", other), 3: ("127.0.0.1", 1)}, clients={1: ("127.0.0.1", proxy)},
            peer_secret_file=directory / "peer.secret", limits=SystemConfig(**LIMITS),
        )  # fmt: skip
        self.node: Node | None = None
        self.streams: list[bytearray] = []
        self.recorded: list[bytes] = []
        self.sent: dict[str, int] = dict.fromkeys(DOORS, 0)
        self.answered = 0

    # Honest clients

    async def work(self, yard: Yard, prefix: str) -> None:
        """Some of every machine's verbs."""
        size = self.draw.choice((0, 10, 5000))
        log, kv, queue = yard.log(f"{prefix}-log"), yard.kv(f"{prefix}-kv"), yard.queue(f"{prefix}-queue")
        at = await log.append(b"head", bytes(size))
        await log.poll(max(0, at - 2), max_records=3)
        await kv.put(b"key", bytes(size))
        await kv.get(b"key")
        lease = await kv.grant(60)
        await kv.revoke(lease.id)
        await queue.publish(bytes(size))
        await yard.status(1)
        self.answered += 8

    async def honest(self) -> None:
        """One that nobody may keep from its answers."""
        async with connect([f"127.0.0.1:{self.ports[0]}"], timeout=ANSWER_S) as yard:
            while True:
                try:
                    with trio.fail_after(ANSWER_S):
                        await self.work(yard, "safe")
                except trio.TooSlowError:
                    raise Broken(f"an honest client waited {ANSWER_S:g} s") from None
                self.check()
                await trio.sleep(0.05)

    def check(self) -> None:
        """What holds at any time."""
        assert self.node is not None
        system = self.node.system
        if system.host.fail_stop.failure is not None:
            raise Broken(f"the node ends: {system.host.fail_stop.failure}")
        for member in system.members.values():
            if member.state != "running":
                raise Broken(f"group {member.spec.name} is {member.state}: {member.reason}")
        strangers = set(system.incarnation.acquaintances.known) - {2}
        if strangers:
            raise Broken(f"nodes {sorted(strangers)} never proved themselves and are known")

    async def relay(self, stream: trio.SocketStream) -> None:
        """One connection of an honest client, by way of what keeps what it says."""
        said = bytearray()
        self.streams.append(said)
        on = await trio.open_tcp_stream("127.0.0.1", self.ports[0])
        async with stream, on, trio.open_nursery() as both:

            async def back() -> None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    async for data in on:
                        await stream.send_all(data)
                both.cancel_scope.cancel()

            both.start_soon(back)
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async for data in stream:
                    if len(said) < RECORDED_BYTES:
                        said.extend(data)
                    await on.send_all(data)
            both.cancel_scope.cancel()

    async def record(self) -> None:
        """Live traffic with sessions, to spoil."""
        async with connect([f"127.0.0.1:{self.ports[3]}"], timeout=ANSWER_S) as yard:
            for prefix in ("safe", "wild"):
                for machine in MACHINES:
                    await yard.create(f"{prefix}-{machine}", members=[1], machine=machine)
            for _ in range(5):
                await self.work(yard, "wild")
        self.recorded = [bytes(stream) for stream in self.streams if len(stream) > 200]
        self.answered = 0
        assert self.recorded, "nothing was recorded"

    # Strangers

    async def until(self, deadline: float, door: str, attack: Callable[[], Awaitable[None]]) -> None:
        """Attack until the time is over."""
        while trio.current_time() < deadline:
            with suppress(OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
                with trio.fail_after(5):
                    await attack()
            self.sent[door] += 1
            await trio.lowlevel.checkpoint()

    def spoilt(self, stream: bytes) -> bytes:
        """Live traffic, nearly: whole frames in another order or under another group's name, or with other bytes."""
        draw = self.draw
        frames, at = [], 0
        while at + wire.HEADER_BYTES <= len(stream):
            length = wire.HEADER.unpack_from(stream, at)[0]
            frames.append(stream[at : at + wire.HEADER_BYTES + length])
            at += wire.HEADER_BYTES + length
        hello, rest = frames[0], frames[1:]
        for _ in range(draw.choice((1, 3, 10))):
            number = draw.randrange(len(rest))
            frame = bytearray(rest[number])
            kind = draw.randrange(6)
            if kind == 0:
                rest[number] = mutate(draw, Target("frame", bytes, (bytes(frame),), ()))
            elif kind == 1 and len(frame) > wire.HEADER_BYTES:
                # The body alone: what the header says of it stays true.
                frame[draw.randrange(wire.HEADER_BYTES, len(frame))] ^= 1 << draw.randrange(8)
                rest[number] = bytes(frame)
            elif kind == 2:
                rest.insert(number, rest[draw.randrange(len(rest))])
            elif kind == 3 and len(rest) > 1:
                del rest[number]
            elif kind == 4 and self.node is not None and len(frame) > wire.HEADER_BYTES + 8 and frame[4] == wire.APPEND:
                wild = [m.uid for m in self.node.system.members.values() if m.spec.name.startswith("wild-")]
                frame[wire.HEADER_BYTES : wire.HEADER_BYTES + 8] = wire.UID.pack(draw.choice(wild))
                rest[number] = bytes(frame)
            else:
                draw.shuffle(rest)
        return hello + b"".join(rest)

    async def client(self) -> None:
        """One connection of a stranger at the client door."""
        draw = self.draw
        stream = await trio.open_tcp_stream("127.0.0.1", self.ports[0])
        async with stream:
            data = self.spoilt(draw.choice(self.recorded))
            hello = wire.HEADER_BYTES + wire.HEADER.unpack_from(data)[0]
            await stream.send_all(data[:hello])
            await stream.receive_some(4096)
            manner = draw.randrange(5)
            if manner == 0:
                await stream.send_all(data[hello : draw.randrange(hello, len(data) + 1)])
                return
            if manner == 1:
                # Asks for much, and reads nothing.
                asked = {"name": "wild-log", "offset": 0, "max_records": 9999, "max_bytes": 8 * MIB}
                calls = (wire.encode_call(number, "poll", asked) for number in range(1, 40))
                await stream.send_all(data[hello:] + b"".join(calls))
                await trio.sleep(draw.random() * 0.3)
                return
            await stream.send_all(data[hello:])
            with trio.move_on_after(0.05):
                while await stream.receive_some(64 if manner == 2 else 65536):
                    await trio.lowlevel.checkpoint()

    async def peer(self) -> None:
        """One connection at the peer door: words of nobody, and of a peer that lies after its proof."""
        draw, address = self.draw, ("127.0.0.1", self.ports[1])
        lane = draw.choice((CONTROL, BULK))
        if draw.random() < 0.6:
            # Nobody's: the epoch and the directory that once ended a cluster, and anything near them.
            hello = encode_hello(Hello("logyard", 3, 1, draw.choice((1, 9, 2**32, 2**62)), lane))
            challenge = encode_challenge(ask("logyard", 3, 1, lane))
            samples = (hello, challenge, challenge + hello, encode_renewal(Renewal(1, 2, 3, 4, 5)))
            data = draw.choice(samples)
            if draw.random() < 0.5:
                data = mutate(draw, Target("greeting", bytes, samples, ()))
            async with await trio.open_tcp_stream(*address) as stream:
                await stream.send_all(data)
                with trio.move_on_after(0.05):
                    while await stream.receive_some(4096):
                        pass
            return
        sock, _ = await dial(
            address, Hello("logyard", 2, 1, 7, lane, 9, 9, 1), TransportConfig(), lambda theirs: None, None, self.secret
        )
        assert self.node is not None
        wild = [m.uid for m in self.node.system.members.values() if m.spec.name.startswith("wild-")]
        uid = draw.choice(wild)
        entry = make_entry(uid, draw.randrange(1, 99), [b"body", bytes(9000)])
        (frame,) = codec.encode_messages([reply(1, uid), append(1, uid, [entry])], 8 << 20)
        frames = (
            b"".join(frame),
            encode_renewal(Renewal(7, 2, 3, 4, 5)),
            b"".join(encode_blob(draw.choice((1, 2, 6, 10, 11, 20, 30, 40, 44)), 1, {"uid": uid, "uids": [uid]}, b"x")),
        )
        with sock:
            await sock.send(mutate(draw, Target("lane", bytes, frames, ())))
            with trio.move_on_after(0.02):
                await sock.recv(10)

    async def gateway(self, url: str) -> None:
        """One connection at the etcd gateway."""
        draw = self.draw
        host, _, port = url.removeprefix("http://").rpartition(":")
        bodies = (
            b'{"key":"a2V5","value":"dmFsdWU="}', b'{"key":"a2V5","range_end":"AA==","limit":3}',
            b'{"compare":[{"key":"a2V5","target":"VERSION","version":1}],"success":[{"request_put":{"key":"YQ=="}}]}',
            b'{"create_request":{"key":"a2V5"}}', b'{"TTL":60}', b"[" * 2000, b"{" + b'"a":' * 900,
        )  # fmt: skip
        path = draw.choice(("kv/put", "kv/range", "kv/txn", "watch", "lease/grant", "kv/deleterange", "x"))
        body = draw.choice(bodies)
        head = f"POST /v3/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        samples = (head + body,)
        data = mutate(draw, Target("request", bytes, samples, ())) if draw.random() < 0.8 else samples[0]
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(data)
            with trio.move_on_after(0.05):
                await stream.receive_some(4096)

    async def crowd(self) -> None:
        """More idle connections than there are descriptors, while files are needed."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors("self") + ROOM, hard))
        words = [sys.executable, "-c", CROWD, str(self.ports[0]), str(2 * ROOM), wire.encode_hello().hex()]
        try:
            async with connect([f"127.0.0.1:{self.ports[0]}"], timeout=ANSWER_S) as yard:
                await yard.log("safe-log").append(b"before", b"")
                process = await trio.lowlevel.open_process(words, stdout=subprocess.PIPE)
                try:
                    assert process.stdout is not None
                    await process.stdout.receive_some(10)
                    for _ in range(12):
                        with trio.fail_after(ANSWER_S):
                            await yard.log("safe-log").append(b"roll", bytes(MIB // 2))
                        self.check()
                        self.sent["crowd"] += 1
                finally:
                    process.kill()
                    await process.wait()
        except trio.TooSlowError:
            raise Broken("files found no descriptors, and an append no answer") from None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def run(self, seconds: float, doors: Sequence[str], stack: ExitStack, directory: Path) -> None:
        """Everything. Raises `Broken`."""
        async with trio.open_nursery() as nursery:
            self.node = await nursery.start(serve, self.config)
            await nursery.start(trio.serve_tcp, self.relay, self.ports[3])
            await self.record()
            gateway: EtcdServer | None = None
            if "gateway" in doors:
                flags = (f"--servers=127.0.0.1:{self.ports[0]}", "--listen-client-urls=http://127.0.0.1:0")
                process = stack.enter_context(spawned(directory / "gateway", *flags))
                gateway = await trio.to_thread.run_sync(EtcdServer, process, directory / "gateway" / "errors.txt")
            before = (resident("self"), sockets("self"))
            beside = (resident(gateway.process.pid), sockets(gateway.process.pid)) if gateway else (0, 0)
            deadline = trio.current_time() + seconds
            async with trio.open_nursery() as honest:
                honest.start_soon(self.honest)
                async with trio.open_nursery() as strangers:
                    for door, attack in (("client", self.client), ("peers", self.peer)):
                        for _ in range(4 if door in doors else 0):
                            strangers.start_soon(self.until, deadline, door, attack)
                    if gateway is not None:
                        url = gateway.url
                        for _ in range(3):
                            strangers.start_soon(self.until, deadline, "gateway", lambda: self.gateway(url))
                if "crowd" in doors:
                    await self.crowd()
                await self.settled(before, "self")
                if gateway is not None:
                    if gateway.process.poll() is not None:
                        raise Broken(f"the gateway ended: {gateway.lines[-500:]}")
                    await self.settled(beside, str(gateway.process.pid))
                    if "Traceback" in gateway.lines:
                        raise Broken(f"the gateway: {gateway.lines[-800:]}")
                honest.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
        if not self.answered:
            raise Broken("no honest client was answered")

    async def settled(self, before: tuple[int, int], process: str) -> None:
        """Memory and sockets come back once the strangers have left."""
        found = (0, 0)
        with trio.move_on_after(ANSWER_S):
            while True:
                gc.collect()
                found = (resident(process), sockets(process))
                if found[0] - before[0] < GROWTH_BYTES and found[1] - before[1] < SPARE_SOCKETS:
                    return
                await trio.sleep(0.1)
        grown = f"{(found[0] - before[0]) / MIB:.0f} MiB and {found[1] - before[1]} sockets"
        raise Broken(f"{grown} of process {process} are not given back")


def resident(pid: str | int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors(pid: str | int) -> int:
    """Open ones of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def sockets(pid: str | int) -> int:
    """Open ones of a process: files come and go with the data."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return found


def leaf(error: BaseException) -> BaseException:
    """The first plain exception inside groups, a broken promise before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [leaf(one) for one in error.exceptions]
    return next((one for one in inner if isinstance(one, Broken)), inner[0])


def run(seconds: float, seed: int, doors: Sequence[str]) -> dict[str, Any]:
    """One run. BLOCKING."""
    errors = Errors()
    logging.getLogger("logyard").addHandler(errors)
    wrong: list[str] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="logyard-live-", dir=place()) as name, ExitStack() as stack:
        live = Live(Path(name), seed)
        try:
            trio.run(live.run, seconds, doors, stack, Path(name))
        except Exception as error:
            wrong.append(f"{type(leaf(error)).__name__}: {leaf(error)}")
        finally:
            logging.getLogger("logyard").removeHandler(errors)
    wrong += errors.found[:10]
    return {
        "tried": sum(live.sent.values()), "by_door": live.sent, "answered": live.answered, "seed": seed,
        "cpu_s": round(time.process_time() - began, 1), "violations": wrong,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.live", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--planted", nargs="?", const="all", default="")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    logging.getLogger("logyard").setLevel(logging.ERROR)
    if not given.planted:
        row = run(given.seconds, given.seed, given.doors.split(","))
        print(json.dumps(row, indent=None if given.json else 1))
        return 1 if row["violations"] else 0
    missed = []
    found = {}
    for bug in BUGS:
        if given.planted in ("all", bug.name):
            with planted(bug):
                row = run(given.seconds, given.seed, [bug.rule])
            found[bug.name] = {"cpu_s": row["cpu_s"], "found": row["violations"][:1]}
            if not row["violations"]:
                missed.append(bug.name)
    print(json.dumps({"caught": len(found) - len(missed), "missed": missed, "bugs": found}))
    return 1 if missed or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
