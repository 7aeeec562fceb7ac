"""ZooKeeper: setData of one node for each log. Every server syncs its transaction log before it answers, as shipped."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from .load import Wire, asked, free_ports
from .peer import Peer, PeerFailed, PeerSpec

JARS = Path("/usr/share/java")
BUFFER_MAX = 8 << 20
SESSION_MS = 30_000
CREATE, SET_DATA = 1, 5
ANYBODY = struct.pack(">iii5si6s", 1, 31, 5, b"world", 6, b"anyone")
"""One access list of everything for everybody."""
CONNECT = struct.pack(">iiqiqi16sb", 45, 0, 0, SESSION_MS, 0, 16, bytes(16), 0)
ANSWER = struct.Struct(">iiqi")


def packed(*parts: bytes) -> bytes:
    """Return one packet behind its length."""
    return struct.pack(">i", sum(map(len, parts))) + b"".join(parts)


def buffered(data: bytes) -> bytes:
    """Return bytes behind their length."""
    return struct.pack(">i", len(data)) + data


class ZooKeeperWire(Wire):
    """One session; answers come in order."""

    def hello(self) -> None:
        """Open a session."""
        self.xid = 0
        self.transport.write(CONNECT)

    def request(self, log: str, body: bytes) -> None:
        """Put out one setData."""
        self.xid += 1
        path = f"/{log}".encode()
        head = struct.pack(">ii", self.xid, SET_DATA)
        self.out.append(packed(head, buffered(path), buffered(body), b"\xff\xff\xff\xff"))

    def feed(self, data: bytearray) -> int:
        """Take whole packets; the first one opens the session."""
        at = good = 0
        while len(data) - at >= 4:
            size = int.from_bytes(data[at : at + 4], "big")
            if len(data) - at < 4 + size:
                break
            if not self.opened.done():
                self.opened.set_result(None)
            else:
                _, _, _, error = ANSWER.unpack_from(data, at)
                if error:
                    raise ConnectionError(f"ZooKeeper answered error {error}")
                good += 1
            at += 4 + size
        if good:
            self.answered(good)
        return at


class ZooKeeper(Peer):
    """An ensemble."""

    name = "zookeeper"
    install = "apt-get install zookeeper default-jre-headless"

    @classmethod
    def version(cls) -> str:
        """Return the version of the archive, if Java is there too."""
        if shutil.which("java") is None:
            return ""
        names = [path.name for path in JARS.glob("zookeeper-[0-9]*.jar")]
        return names[0].removeprefix("zookeeper-").removesuffix(".jar") if names else ""

    def start(self) -> None:
        """Start all servers and wait until each has its role."""
        self.ports = free_ports(self.nodes)
        peers = free_ports(2 * self.nodes)
        servers = "".join(
            f"server.{at + 1}=127.0.0.1:{peers[2 * at]}:{peers[2 * at + 1]}\n" for at in range(self.nodes)
        )
        for at, port in enumerate(self.ports):
            place = self.directory / f"n{at}"
            place.mkdir()
            (place / "myid").write_text(f"{at + 1}\n", encoding="ascii")
            config = self.directory / f"n{at}.cfg"
            config.write_text(
                f"tickTime=2000\ninitLimit=10\nsyncLimit=5\ndataDir={place}\nclientPort={port}\n"
                f"clientPortAddress=127.0.0.1\nmaxClientCnxns=0\nadmin.enableServer=false\n"
                f"4lw.commands.whitelist=*\n{servers if self.nodes > 1 else ''}",
                encoding="utf-8",
            )
            self.spawn(
                [
                    "java", f"-Djute.maxbuffer={BUFFER_MAX}", "-Dzookeeper.jmx.log4j.disable=true", "-cp",
                    str(JARS / "zookeeper.jar"), "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config),
                ],
                f"n{at}",
            )  # fmt: skip
        self.await_ready("a leader and its followers", lambda: all(map(serving, self.addresses)))

    def prepare(self, names: Sequence[str]) -> None:
        """Create a node for each log."""
        for name in names:
            body = buffered(f"/{name}".encode()) + buffered(b"") + ANYBODY + struct.pack(">i", 0)
            create = packed(struct.pack(">ii", 1, CREATE), body)
            # The answer has the path in it, or an error and nothing: then the server is told to end the session.
            answer = asked(self.addresses[0], CONNECT + create, f"/{name}".encode())
            if name.encode() not in answer:
                raise PeerFailed(f"zookeeper: {name} was not created: {answer[-60:]!r}")

    @property
    def addresses(self) -> list[str]:
        """All servers: followers forward."""
        return [f"127.0.0.1:{port}" for port in self.ports]


def serving(address: str) -> bool:
    """Return whether a server has a role."""
    try:
        return b"Mode: " in asked(address, b"srvr", b"Mode: ")
    except OSError:
        return False


def make_wire(spec: PeerSpec) -> Wire:
    """Return a connection."""
    return ZooKeeperWire(spec)


WIRE = make_wire
PEERS: dict[str, type[Peer]] = {"zookeeper": ZooKeeper}
