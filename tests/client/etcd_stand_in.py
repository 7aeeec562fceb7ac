"""A stand-in for an etcd server's JSON gateway, with its byte rules, for tests where no real one is installed."""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 20.0


class Server(ThreadingHTTPServer):
    """`events`: (revision, key, value or None). `cut` ends every watch that is open; `compacted` refuses old starts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.changed = threading.Condition()
        self.values: dict[bytes, tuple[int, bytes]] = {}
        self.events: list[tuple[int, bytes, bytes | None]] = []
        self.revision = 1
        self.compacted = 0
        self.generation = 0
        self.watches = 0

    def cut(self) -> None:
        with self.changed:
            self.generation += 1
            self.changed.notify_all()

    def write(self, key: bytes, value: bytes | None) -> None:
        with self.changed:
            self.revision += 1
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = (self.revision, value)
            self.events.append((self.revision, key, value))
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """Answers as etcd does: base64, numbers as text, what is zero left out."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            if self.path == "/v3/watch":
                self.watch(asked["create_request"])
            else:
                self.answer(200, getattr(self, "on_" + self.path.rsplit("/", 1)[1])(asked))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except (AttributeError, KeyError) as error:
            self.answer(400, {"error": str(error), "message": str(error), "code": 3})

    def answer(self, status: int, found: dict[str, Any]) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @property
    def header(self) -> dict[str, str]:
        return {"revision": str(self.server.revision)}

    def matching(self, asked: dict[str, Any], key: bytes) -> bool:
        first, end = b64decode(asked["key"]), b64decode(asked.get("range_end", ""))
        return key == first if not end else key >= first and (end == b"\0" or key < end)

    def on_range(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self.server.changed:
            keys = [key for key in sorted(self.server.values) if self.matching(asked, key)]
            kvs = [self.kv(key, *self.server.values[key]) for key in keys]
            found: dict[str, Any] = {"header": self.header}
            if kvs and not asked.get("count_only"):
                found["kvs"] = kvs
            return found

    def kv(self, key: bytes, revision: int, value: bytes | None) -> dict[str, str]:
        found = {"key": b64encode(key).decode(), "mod_revision": str(revision)}
        return found | ({"value": b64encode(value).decode()} if value else {})

    def on_put(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.server.write(b64decode(asked["key"]), b64decode(asked.get("value", "")))
        return {"header": self.header}

    def on_deleterange(self, asked: dict[str, Any]) -> dict[str, Any]:
        if b64decode(asked["key"]) in self.server.values:
            self.server.write(b64decode(asked["key"]), None)
        return {"header": self.header}

    def watch(self, asked: dict[str, Any]) -> None:
        server, following = self.server, int(asked["start_revision"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk({"header": self.header, "created": True})
        if following <= server.compacted:
            self.chunk({"header": self.header, "canceled": True, "compact_revision": str(server.compacted)})
            self.close_connection = True
            return
        with server.changed:
            generation = server.generation
            server.watches += 1
            server.changed.notify_all()
        while True:
            with server.changed:
                server.changed.wait_for(partial(self.is_due, generation, following), WAIT_S)
                if server.generation != generation:
                    # Cut in the middle, without the last chunk.
                    self.connection.close()
                    self.close_connection = True
                    return
                found = [one for one in server.events if one[0] >= following and self.matching(asked, one[1])]
                following = server.revision + 1
            if found:
                events = [
                    {"kv": self.kv(key, revision, value), **({"type": "DELETE"} if value is None else {})}
                    for revision, key, value in found
                ]
                self.chunk({"header": self.header, "events": events})

    def is_due(self, generation: int, following: int) -> bool:
        return self.server.generation != generation or self.server.revision >= following

    def chunk(self, message: dict[str, Any]) -> None:
        data = json.dumps({"result": message}).encode() + b"\n"
        self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
        self.wfile.flush()
