"""Where the client door listens: this machine's loopback, unless TLS secures it, and a unix socket."""

from __future__ import annotations

from logyard.protocol.errors import BadRequest
from logyard.protocol.tls import is_loopback

ADMIN = "admin.sock"
"""The unix socket in a data directory, for who may read the files there."""
UNIX = "unix:"


def unix_path(text: str) -> str:
    """Return the path of "unix:PATH", "" for any other address."""
    return text.removeprefix(UNIX) if text.startswith(UNIX) else ""


def listen_address(text: str, *, secured: bool = False) -> tuple[str, int]:
    """Return (host, port) of "host:port"; raise `BadRequest` unless it is this machine's loopback, or `secured` by
    TLS."""
    host, colon, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if not colon or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise BadRequest(f"a listening address is HOST:PORT, not {text!r}")
    if not secured and not is_loopback(host):
        raise BadRequest(
            f"{text}: without TLS ([client_tls] ca, certificate, key) clients are served on a loopback address only"
        )
    return host, int(port)
