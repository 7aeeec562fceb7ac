"""RabbitMQ: publishes with confirms into quorum queues, which sync before they confirm, as shipped. AMQP by hand."""

from __future__ import annotations

import glob
import secrets
import shutil
import struct
from collections import deque
from pathlib import Path

from .load import Wire, accepts, free_ports
from .peer import Peer, PeerSpec

SCRIPTS = "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
METHOD, HEADER, BODY = 1, 2, 3
END = b"\xce"
FRAME_MAX = 131_072
CHANNELS = 16
START, TUNE, OPEN_OK = (10, 10), (10, 30), (10, 41)
CHANNEL_OPEN_OK, SELECT_OK, DECLARE_OK, ACK = (20, 11), (85, 11), (50, 11), (60, 80)
START_S = 120.0


def amqp_frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Return one AMQP frame."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + END


def method(channel: int, family: int, number: int, arguments: bytes = b"") -> bytes:
    """Return one method's frame."""
    return amqp_frame(METHOD, channel, struct.pack(">HH", family, number) + arguments)


def short(text: str) -> bytes:
    """Return a short string."""
    return bytes((len(text),)) + text.encode()


def long(data: bytes) -> bytes:
    """Return a long string or a table."""
    return struct.pack(">I", len(data)) + data


def declare(name: str) -> bytes:
    """Return the declaration of a durable quorum queue."""
    table = short("x-queue-type") + b"S" + long(b"quorum")
    return method(1, 50, 10, b"\0\0" + short(name) + b"\x02" + long(table))


def greeting() -> list[bytes]:
    """Return what answers the server's start: login, tuning, the virtual host, a channel, confirms."""
    login = long(b"") + short("PLAIN") + long(b"\0guest\0guest") + short("en_US")
    return [
        method(0, 10, 11, login),
        method(0, 10, 31, struct.pack(">HIH", CHANNELS, FRAME_MAX, 0)) + method(0, 10, 40, short("/") + b"\0\0"),
        method(1, 20, 10, b"\0"),
        method(1, 85, 10, b"\0"),
    ]


class RabbitWire(Wire):
    """One connection with one channel in confirm mode."""

    def hello(self) -> None:
        """Say which protocol; the rest follows what the server says."""
        self.tag = 0
        self.undeclared = len(self.spec.names)
        self.under_way: dict[int, tuple[int, float]] = {}
        self.oldest: deque[int] = deque()
        self.steps = dict(zip((START, TUNE, OPEN_OK, CHANNEL_OPEN_OK), greeting(), strict=True))
        self.transport.write(b"AMQP\0\0\x09\x01")

    def request(self, log: str, body: bytes) -> None:
        """Publish one persistent message."""
        self.tag += 1
        self.under_way[self.tag] = self.waiting.pop()
        self.oldest.append(self.tag)
        head = struct.pack(">HHQH", 60, 0, len(body), 0x1000) + b"\x02"
        self.out += (method(1, 60, 40, b"\0\0" + short("") + short(log) + b"\0"), amqp_frame(HEADER, 1, head))
        room = FRAME_MAX - 8
        self.out += [amqp_frame(BODY, 1, body[at : at + room]) for at in range(0, len(body), room)]

    def feed(self, data: bytearray) -> int:
        """Take whole frames."""
        at = 0
        while len(data) - at >= 8:
            kind, _, size = struct.unpack_from(">BHI", data, at)
            if len(data) - at < 8 + size:
                break
            if kind == METHOD:
                self.take(bytes(data[at + 7 : at + 7 + size]))
            at += 8 + size
        return at

    def take(self, payload: bytes) -> None:
        """Take one method."""
        what = struct.unpack_from(">HH", payload)
        if what in self.steps:
            self.out.append(self.steps[what])
        elif what == SELECT_OK:
            # What is there already is answered as if it were new.
            self.out += map(declare, self.spec.names)
        elif what == DECLARE_OK:
            self.undeclared -= 1
            if not self.undeclared:
                self.opened.set_result(None)
        elif what == ACK:
            tag, multiple = struct.unpack_from(">QB", payload, 4)
            assert self.load is not None
            self.load.done(self, self.confirmed(tag) if multiple else [self.under_way.pop(tag)])
        elif what[0] != 10:
            raise ConnectionError(f"RabbitMQ answered {what}: {payload[4:200]!r}")
        elif what == (10, 50):
            raise ConnectionError(f"RabbitMQ closed the connection: {payload[4:200]!r}")

    def confirmed(self, tag: int) -> list[tuple[int, float]]:
        """Return all operations up to a tag."""
        found = []
        while self.oldest and self.oldest[0] <= tag:
            operation = self.under_way.pop(self.oldest.popleft(), None)
            if operation is not None:
                found.append(operation)
        return found


class RabbitMq(Peer):
    """A cluster with quorum queues."""

    name = "rabbitmq"
    install = "apt-get install rabbitmq-server"
    notes = ("published and confirmed; nobody consumes meanwhile",)

    @classmethod
    def script(cls) -> str:
        """Return what starts a node as whoever we are; Debian's own in the PATH starts it as another user."""
        found = sorted(glob.glob(SCRIPTS))
        if not found:
            raise FileNotFoundError(2, "no such program", SCRIPTS)
        return found[-1]

    @classmethod
    def version(cls) -> str:
        """Return the version of its folder."""
        return Path(cls.script()).parent.parent.name.rpartition("-")[2]

    def start(self) -> None:
        """Start a name server and the nodes, which find one another; wait until all serve."""
        (epmd,) = free_ports(1)
        self.ports, distribution = free_ports(self.nodes), free_ports(self.nodes)
        common = {
            "ERL_EPMD_PORT": str(epmd), "ERL_EPMD_ADDRESS": "127.0.0.1", "HOME": str(self.directory),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "none.conf"), "RABBITMQ_ENABLED_PLUGINS": "",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"), "RABBITMQ_LOG_BASE": str(self.directory / "said"),
        }  # fmt: skip
        cookie = self.directory / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(10), encoding="ascii")
        cookie.chmod(0o400)
        (self.directory / "plugins").write_text("[].\n", encoding="ascii")
        self.spawn([shutil.which("epmd") or "epmd", "-port", str(epmd), "-address", "127.0.0.1"], "epmd", common)
        self.await_ready("epmd", lambda: accepts(f"127.0.0.1:{epmd}"))
        names = [f"n{at}b{epmd}@localhost" for at in range(self.nodes)]
        for at, name in enumerate(names):
            config = self.directory / f"n{at}.conf"
            lines = [f"listeners.tcp.1 = 127.0.0.1:{self.ports[at]}", "disk_free_limit.absolute = 1GB"]
            lines += ["cluster_formation.peer_discovery_backend = classic_config"]
            lines += ["cluster_formation.randomized_startup_delay_range.min = 0"]
            lines += ["cluster_formation.randomized_startup_delay_range.max = 1"]
            lines += [
                f"cluster_formation.classic_config.nodes.{number + 1} = {one}" for number, one in enumerate(names)
            ]
            config.write_text("\n".join(lines) + "\n", encoding="utf-8")
            own = {
                "RABBITMQ_NODENAME": name, "RABBITMQ_DIST_PORT": str(distribution[at]),
                "RABBITMQ_CONFIG_FILE": str(config), "RABBITMQ_NODE_PORT": str(self.ports[at]),
                "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            }  # fmt: skip
            self.spawn([self.script()], f"n{at}", {**common, **own})
            # One after the other: the first makes the cluster, the others join it.
            self.await_ready(f"node {at + 1}", lambda at=at: accepts(self.addresses[at]), START_S)  # type: ignore[misc]

    @property
    def addresses(self) -> list[str]:
        """All nodes: they hand on to a queue's leader."""
        return [f"127.0.0.1:{port}" for port in self.ports]


def make_wire(spec: PeerSpec) -> Wire:
    """Return a connection."""
    return RabbitWire(spec)


WIRE = make_wire
PEERS: dict[str, type[Peer]] = {"rabbitmq": RabbitMq}
