"""NATS JetStream: publishes into streams of as many replicas as there are nodes, each acknowledged by its stream.

Before 2.10 a server cannot be told to sync before it answers: it does every two minutes, and the figures say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from .load import Wire, asked, free_ports
from .peer import Peer, PeerFailed, PeerSpec, said_by

CONNECT = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
PAYLOAD_MAX = 8 << 20
SYNC_ALWAYS = (2, 10)
CREATE_S = 30.0


class NatsWire(Wire):
    """One connection; the inbox of an acknowledgement says which publish it is of."""

    def hello(self) -> None:
        """Greet, and listen to the inbox."""
        self.inbox = f"_INBOX.b{self.spec.lane}x{id(self)}"
        self.number = 0
        self.under_way: dict[int, tuple[int, float]] = {}
        self.transport.write(CONNECT + f"SUB {self.inbox}.* 1\r\nPING\r\n".encode())

    def request(self, log: str, body: bytes) -> None:
        """Publish one body."""
        self.number += 1
        self.under_way[self.number] = self.waiting.pop()
        self.out.append(f"PUB {log} {self.inbox}.{self.number} {len(body)}\r\n".encode() + body + b"\r\n")

    def feed(self, data: bytearray) -> int:
        """Take whole messages."""
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            line = bytes(data[at:end])
            if not line.startswith(b"MSG "):
                self.control(line)
                at = end + 2
                continue
            words = line.split(b" ")
            size = int(words[-1])
            if len(data) < end + 4 + size:
                break
            answer = bytes(data[end + 2 : end + 2 + size])
            if b'"error"' in answer or b'"seq"' not in answer:
                raise ConnectionError(f"JetStream answered {answer[:200]!r}")
            assert self.load is not None
            self.load.done(self, [self.under_way.pop(int(words[1].rpartition(b".")[2]))])
            at = end + 4 + size
        return at

    def control(self, line: bytes) -> None:
        """Take what is no message."""
        if line == b"PING":
            self.out.append(b"PONG\r\n")
        elif line == b"PONG" and not self.opened.done():
            self.opened.set_result(None)
        elif line.startswith(b"-ERR"):
            raise ConnectionError(f"NATS answered {line[:200]!r}")


class Nats(Peer):
    """Servers with JetStream, with routes between them."""

    name = "nats"
    install = "apt-get install nats-server"

    @classmethod
    def version(cls) -> str:
        """Return what it says of itself."""
        found = re.search(r"v(\d\S+)", said_by("nats-server", "--version"))
        return found[1] if found else ""

    @classmethod
    def syncs(cls) -> bool:
        """Return whether this version can sync before it answers."""
        return tuple(int(part) for part in re.findall(r"\d+", cls.version())[:2]) >= SYNC_ALWAYS

    @classmethod
    def remarks(cls) -> tuple[str, ...]:
        """Return whether it syncs."""
        return () if cls.syncs() else ("does not sync before it answers (before 2.10 it cannot)",)

    @classmethod
    def weaker_as_shipped(cls) -> bool:
        """Return whether we could have it sync."""
        return cls.syncs()

    def start(self) -> None:
        """Start all servers and wait until JetStream serves."""
        self.ports, routes = free_ports(self.nodes), free_ports(self.nodes)
        urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        for at, port in enumerate(self.ports):
            text = f'server_name: n{at}\nlisten: "127.0.0.1:{port}"\nmax_payload: {PAYLOAD_MAX}\n'
            sync = "sync_interval: always" if self.syncs() and not self.shipped else ""
            text += f'jetstream {{ store_dir: "{self.directory / f"n{at}"}"\n{sync} }}\n'
            if self.nodes > 1:
                text += f'cluster {{ name: bench\nlisten: "127.0.0.1:{routes[at]}"\nroutes: [{urls}] }}\n'
            config = self.directory / f"n{at}.conf"
            config.write_text(text, encoding="utf-8")
            self.spawn(["nats-server", "-c", str(config)], f"n{at}")
        self.await_ready("JetStream", self.serves)

    def serves(self) -> bool:
        """Return whether a stream can be asked for: there is a leader of all."""
        try:
            answer = self.call("$JS.API.STREAM.NAMES", {}, 1.0)
        except (OSError, PeerFailed):
            return False
        return b'"error"' not in answer and b"stream_names" in answer

    def call(self, subject: str, message: dict[str, object], timeout_s: float) -> bytes:
        """Ask the first server, return its answer."""
        text = json.dumps(message).encode()
        question = CONNECT + b"SUB _INBOX.c 1\r\n" + f"PUB {subject} _INBOX.c {len(text)}\r\n".encode() + text + b"\r\n"
        answer = asked(f"127.0.0.1:{self.ports[0]}", question, b"}\r\n" if not message else b'"type"', timeout_s)
        if b'"error"' in answer:
            raise PeerFailed(f"nats: {answer[-300:]!r}")
        return answer

    def prepare(self, names: Sequence[str]) -> None:
        """Create a stream for each log."""
        for name in names:
            self.call(
                f"$JS.API.STREAM.CREATE.{name}",
                {"name": name, "subjects": [name], "storage": "file", "num_replicas": self.nodes,
                 "retention": "limits", "discard": "old"},
                CREATE_S,
            )  # fmt: skip

    @property
    def addresses(self) -> list[str]:
        """All servers: one that does not lead a stream forwards."""
        return [f"127.0.0.1:{port}" for port in self.ports]


def make_wire(spec: PeerSpec) -> Wire:
    """Return a connection."""
    return NatsWire(spec)


WIRE = make_wire
PEERS: dict[str, type[Peer]] = {"nats": Nats}
