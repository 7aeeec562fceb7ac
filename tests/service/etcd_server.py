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


class EtcdServer:
    """A process that serves. `lines`: what it wrote to standard error, once it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, errors: Path) -> None:
        self.process = process
        self.url = url
        self.errors = errors
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.host, self.port = parts.hostname, parts.port

    @property
    def lines(self) -> str:
        return self.errors.read_text()

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

    def stop(self) -> int:
        """End it cleanly; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def text(data: bytes) -> str:
    return b64encode(data).decode()


def data(found: str) -> bytes:
    return b64decode(found)


@contextmanager
def etcd_server(
    directory: Path, *flags: str, environment: dict[str, str] | None = None, port: int = 0
) -> Iterator[EtcdServer]:
    """Start one and wait until it says that it serves."""
    command = [sys.executable, "-m", "logyard.service.cli", "etcd", "--data-dir", str(directory / "data")]
    command += [f"--listen-client-urls=http://127.0.0.1:{port}", *flags]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
    errors = directory / "errors.txt"
    with errors.open("ab") as written:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=written, env={**clean, **(environment or {})}
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("ready url="), errors.read_text()
        yield EtcdServer(process, line.split()[1].removeprefix("url="), errors)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()
