"""The driver ``etcd`` of `kvstore`: any etcd v3 server over its JSON gateway, with the standard library's HTTP client.

Keys and values are base64, numbers are text, what is zero is left out. A watch is one long answer, a JSON message a
line; when it breaks, it is asked for again from the revision after the last one it has brought.
"""

from __future__ import annotations

import http.client
import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.kv import FROM_KEY, prefix_end

TIMEOUT_S = 10.0
WATCH_S = 5.0
"""A watch without a message for so long is asked for again."""
RETRY_S = 0.2
PREFIXES = ("/v3", "/v3beta", "/v3alpha")
GONE = (OSError, http.client.HTTPException, ValueError)


Changes: TypeAlias = list[tuple[bytes, bytes | None]]


class EtcdError(LogyardError):
    """What the server answered; `code` is ``etcd``."""

    code = "etcd"


class Compacted(Exception):
    """A watch can't go on: what it needs is compacted."""


class EtcdDriver:
    """`url`: http://host:port of the gateway; `path`: /v3, unless an old server needs another."""

    def __init__(self, url: str, *, path: str = "/v3", timeout: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or path not in PREFIXES:
            raise BadRequest(f"an etcd server is http://HOST:PORT, its path one of {', '.join(PREFIXES)}")
        self._host, self._port, self._path, self._timeout = parts.hostname, parts.port or 2379, path, timeout
        self._call("/kv/range", {"key": _text(b"\0"), "limit": "1"})

    def read(self, key: bytes) -> bytes | None:
        """See `kvstore.Driver`."""
        kvs = self._call("/kv/range", {"key": _text(key)}).get("kvs", ())
        return _bytes(kvs[0].get("value", "")) if kvs else None

    def list(self, prefix: bytes) -> list[bytes]:
        """See `kvstore.Driver`."""
        key, end = (prefix, prefix_end(prefix)) if prefix else (FROM_KEY, FROM_KEY)
        asked = {"key": _text(key), "range_end": _text(end), "keys_only": True, "sort_target": "KEY",
                 "sort_order": "ASCEND"}  # fmt: skip
        return [_bytes(one["key"]) for one in self._call("/kv/range", asked).get("kvs", ())]

    def write(self, key: bytes, value: bytes | None) -> None:
        """See `kvstore.Driver`."""
        if value is None:
            self._call("/kv/deleterange", {"key": _text(key)})
        else:
            self._call("/kv/put", {"key": _text(key), "value": _text(value)})

    def follow(self, key: bytes, prefix: bool, stop: threading.Event) -> Iterator[tuple[bytes, bytes | None] | None]:
        """See `kvstore.Driver`."""
        found = self._call("/kv/range", {"key": _text(key or b"\0"), "count_only": True})
        return self._walk(key, prefix, int(found["header"]["revision"]) + 1, stop)

    def _walk(
        self, key: bytes, prefix: bool, following: int, stop: threading.Event
    ) -> Iterator[tuple[bytes, bytes | None] | None]:
        asked: dict[str, Any] = {"key": _text(key)}
        if prefix:
            key, end = (key, prefix_end(key)) if key else (FROM_KEY, FROM_KEY)
            asked = {"key": _text(key), "range_end": _text(end)}
        known: set[bytes] = set()
        behind = False
        while not stop.is_set():
            try:
                if behind:
                    answer = self._call("/kv/range", asked)
                    since, following, behind = following, int(answer["header"]["revision"]) + 1, False
                    kvs = answer.get("kvs", ())
                    there = {_bytes(one["key"]) for one in kvs}
                    changed = [one for one in kvs if int(one["mod_revision"]) >= since]
                    yield from ((gone, None) for gone in sorted(known - there))
                    yield from ((_bytes(one["key"]), _bytes(one.get("value", ""))) for one in changed)
                    known = there
                for last, events in self._messages(asked, following):
                    for name, value in events:
                        (known.discard if value is None else known.add)(name)
                        yield name, value
                    # A message that came, came whole: the next one begins behind it.
                    following = max(following, last + 1)
                    yield None
            except Compacted:
                behind = True
            except (*GONE, EtcdError):
                yield None
                stop.wait(RETRY_S)

    def _messages(self, asked: dict[str, Any], start: int) -> Iterator[tuple[int, Changes]]:
        """Yield of each message the last revision, and key and value of each event."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=WATCH_S)
        try:
            body = json.dumps({"create_request": {**asked, "start_revision": str(start), "progress_notify": True}})
            connection.request("POST", f"{self._path}/watch", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while line := response.readline():
                message = json.loads(line)
                result = message.get("result")
                if result is None:
                    raise http.client.HTTPException(str(message.get("error")))
                if result.get("canceled"):
                    if int(result.get("compact_revision", 0)):
                        raise Compacted
                    raise http.client.HTTPException(result.get("cancel_reason", "the watch was canceled"))
                events = result.get("events", ())
                last = int(events[-1]["kv"]["mod_revision"]) if events else 0
                yield last, [_change(event) for event in events]
            raise http.client.HTTPException("the watch ended")
        finally:
            connection.close()

    def _call(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request("POST", self._path + path, json.dumps(asked), {"Content-Type": "application/json"})
            response = connection.getresponse()
            found: Any = json.loads(response.read() or b"{}")
        except GONE as error:
            raise EtcdError(f"etcd at {self._host}:{self._port}: {error}", retry="elsewhere") from None
        finally:
            connection.close()
        if response.status != 200 or not isinstance(found, dict):
            said = found.get("message") or found.get("error") if isinstance(found, dict) else found
            raise EtcdError(f"etcd at {self._host}:{self._port}: {response.status}: {said}")
        return found

    def close(self) -> None:
        """Do nothing: nothing is kept open between calls."""


def _change(event: dict[str, Any]) -> tuple[bytes, bytes | None]:
    kv = event["kv"]
    return _bytes(kv["key"]), None if event.get("type") == "DELETE" else _bytes(kv.get("value", ""))


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return b64decode(text)
