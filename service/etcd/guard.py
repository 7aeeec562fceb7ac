"""Who may ask the gateway, by what a browser says of itself: a page of somebody else can write to a loopback address.

A request with an `Origin` that is not on `--cors`, one that says it is from another site, and one for a `Host` that
this gateway does not have (a name that was made to mean a loopback address) are refused with 403. Clients that are no
browsers send neither `Origin` nor `Sec-Fetch-Site`. Used by `app`.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .words import PERMISSION_DENIED, GatewayError

ANY = "*"
METHODS = b"POST, GET, OPTIONS, PUT, DELETE"
HEADERS = b"accept, content-type, authorization"


class Guard:
    """An ASGI application before another one. `origins`: as browsers write them; `hosts`: names without ports. `*` is
    all of them; loopback and other addresses that are numbers are always hosts."""

    __slots__ = ("app", "origins", "hosts")

    def __init__(self, app: ASGIApp, origins: Iterable[str], hosts: Iterable[str]) -> None:
        self.app = app
        self.origins = frozenset(origins)
        self.hosts = frozenset([host.lower() for host in hosts]) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            # A websocket, which nothing here speaks.
            await send({"type": "websocket.close"})
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        host, site = headers.get(b"host", b"").decode("latin-1"), headers.get(b"sec-fetch-site", b"")
        refusal = self._refusal(host, origin, site)
        if refusal:
            await _answer(send, 403, GatewayError(PERMISSION_DENIED, refusal).body, b"application/json")
            return
        if not origin:
            if scope["method"] == "OPTIONS":
                await _answer(send, 200, b"", b"text/plain")
                return
            await self.app(scope, receive, send)
            return
        allowed = [
            (b"access-control-allow-methods", METHODS), (b"access-control-allow-headers", HEADERS),
            (b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"),
        ]  # fmt: skip
        if scope["method"] == "OPTIONS":
            await _answer(send, 200, b"", b"text/plain", allowed)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        await self.app(scope, receive, named)

    def _refusal(self, host: str, origin: str, site: bytes) -> str:
        """Return why a request is refused; "": it is not."""
        if host and ANY not in self.hosts and not self._is_ours(host):
            return f"logyard: host {host[:100]!r} is not served here (--host-whitelist)"
        if origin:
            if ANY in self.origins or origin in self.origins or urlsplit_netloc(origin) == host:
                return ""
            return f"logyard: origin {origin[:100]!r} is not allowed (--cors)"
        if site == b"cross-site" and ANY not in self.origins:
            return "logyard: pages of other sites are not allowed (--cors)"
        return ""

    def _is_ours(self, host: str) -> bool:
        name = host_of(host)
        return name in self.hosts or is_number(name)


def host_of(netloc: str) -> str:
    """Return the name of a host without its port, in lower case; "" for what is none."""
    try:
        return urlsplit("//" + netloc).hostname or ""
    except ValueError:
        return ""


def urlsplit_netloc(origin: str) -> str:
    """Return the host and port of an origin; "" for what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def is_number(host: str) -> bool:
    """Return whether a host is an address: nobody can make that mean another one."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _answer(
    send: Send, status: int, body: bytes, kind: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    head = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
