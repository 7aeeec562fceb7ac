"""`logyard etcd` as a process, for tests: on a free port, stopped at the end; and one call to a gateway."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 60.0


class Asking:
    """Calls to the gateway at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.host, self.port = parts.hostname, parts.port

    def call(self, path: str, **fields: Any) -> dict[str, Any]:
        """An answer that is good; bytes are sent as base64."""
        status, found = self.ask(path, fields)
        assert status == 200, found
        return found

    def refusal(self, path: str, **fields: Any) -> tuple[int, int, str]:
        """(status, code, message) of a refusal."""
        status, found = self.ask(path, fields)
        assert status != 200 and found["error"] == found["message"], found
        return status, found["code"], found["message"]

    def ask(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        try:
            connection.request("POST", path, json.dumps(fields, default=text), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.getheader("content-length"), "unary answers, errors too, say their length"
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    @contextmanager
    def stream(self, path: str, *messages: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages of a stream, as they come."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        try:
            body = "\n".join(json.dumps(one, default=text) for one in messages)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200
            yield (json.loads(line) for line in iter(response.readline, b""))
        finally:
            connection.close()

    def watch(self, key: bytes, **fields: Any) -> Any:
        """A stream with one watch."""
        return self.stream("/v3/watch", {"create_request": {"key": key, **fields}})


class EtcdServer(Asking):
    """A process that serves."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("ready url="), errors.read_text()
        super().__init__(line.split()[1].removeprefix("url="))
        self.process = process
        self.errors = errors

    @property
    def lines(self) -> str:
        """What it wrote to standard error."""
        return self.errors.read_text()

    def stop(self) -> int:
        """End it cleanly; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def text(data: bytes) -> str:
    return b64encode(data).decode()


def data(found: str) -> bytes:
    return b64decode(found)


@contextmanager
def spawned(
    directory: Path, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended at the end; `directory` keeps its data and what it writes to standard error."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "logyard.service.cli", "etcd", "--data-dir", str(directory / "data"), *flags]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
    with (directory / "errors.txt").open("ab") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**clean, **(environment or {})}
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def etcd_server(directory: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[EtcdServer]:
    """Start one on a free port and wait until it says that it serves."""
    with spawned(directory, "--listen-client-urls=http://127.0.0.1:0", *flags, environment=environment) as process:
        yield EtcdServer(process, directory / "errors.txt")
