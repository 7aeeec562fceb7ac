"""Redis: SET with an append-only file that is synced always, and WAIT for as many replicas as make a quorum.

WAIT says that replicas have the write in memory; only from 7.2 on could it say that they synced it (WAITAOF).
"""

from __future__ import annotations

import re
from collections import deque

from .load import Wire, asked, free_ports
from .peer import Peer, PeerSpec, said_by

KEYS = 100


class RedisWire(Wire):
    """One client's connection: WAIT holds up what comes behind it, so a window is SETs and one WAIT."""

    shared = False

    def hello(self) -> None:
        """Count from nothing."""
        self.number = self.unwaited = 0
        self.batches: deque[int] = deque()
        self.opened.set_result(None)

    def request(self, log: str, body: bytes) -> None:
        """Put out one SET."""
        self.number += 1
        key = f"{log}/{self.spec.lane}/{self.number % KEYS}".encode()
        self.out.append(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(body), body))
        self.unwaited += 1

    def flush(self) -> None:
        """Send, with a WAIT behind what was not waited for."""
        if self.unwaited and self.spec.nodes > 1:
            replicas = b"%d" % (self.spec.nodes // 2)
            self.out.append(b"*3\r\n$4\r\nWAIT\r\n$%d\r\n%b\r\n$1\r\n0\r\n" % (len(replicas), replicas))
            self.batches.append(self.unwaited)
        self.unwaited = 0
        super().flush()

    def feed(self, data: bytearray) -> int:
        """Take whole lines."""
        at, good = 0, 0
        while (end := data.find(b"\r\n", at)) >= 0:
            kind = data[at : at + 1]
            if kind == b":" and int(data[at + 1 : end]) >= self.spec.nodes // 2:
                good += self.batches.popleft()
            elif kind == b"+":
                good += self.spec.nodes == 1
            else:
                raise ConnectionError(f"Redis answered {bytes(data[at:end])[:200]!r}")
            at = end + 2
        if good:
            self.answered(good)
        return at


class Redis(Peer):
    """A primary and its replicas."""

    name = "redis"
    install = "apt-get install redis-server"
    notes = ("replicas acknowledge from memory",)
    differs = True

    @classmethod
    def version(cls) -> str:
        """Return what it says of itself."""
        found = re.search(r"v=(\S+)", said_by("redis-server", "--version"))
        return found[1] if found else ""

    def start(self) -> None:
        """Start the primary, then replicas; wait until all are online."""
        ports = free_ports(self.nodes)
        self.primary = f"127.0.0.1:{ports[0]}"
        for at, port in enumerate(ports):
            place = self.directory / f"n{at}"
            place.mkdir()
            words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(place)]
            if not self.shipped:
                words += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
            if at:
                words += ["--replicaof", "127.0.0.1", str(ports[0])]
            self.spawn(words, f"n{at}")
        self.await_ready("replicas online", self.online)

    def online(self) -> bool:
        """Return whether the primary has all its replicas."""
        try:
            answer = asked(self.primary, b"INFO replication\r\n", b"repl_backlog_histlen")
        except OSError:
            return False
        return answer.count(b"state=online") == self.nodes - 1

    @property
    def addresses(self) -> list[str]:
        """Only the primary takes writes."""
        return [self.primary]


def make_wire(spec: PeerSpec) -> Wire:
    """Return a connection."""
    return RedisWire(spec)


WIRE = make_wire
PEERS: dict[str, type[Peer]] = {"redis": Redis}
