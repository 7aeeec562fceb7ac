"""One connection of the blocking client: a socket, or TLS over one, and its channel.

Used by one thread at a time; a question is sent and its answer read in the same call. Used by `sync`.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from logyard.protocol import wire
from logyard.protocol.errors import Unknown
from logyard.protocol.frame import Buffer
from logyard.protocol.pending import PendingReply
from logyard.protocol.tls import TlsError, explain, gathered, read_identities, require_safe, require_server
from logyard.protocol.verbs import VERBS

from .admin import T
from .session import UNIX, Channel, Pushed, not_secured, unix_target, unreachable

CONNECT_S = 5.0
STALL_S = 10.0
"""No byte for so long while an answer is due: the server hangs, and the connection is given up."""
WORK_S = 86_400.0
"""The same while a `long` verb is done: its caller's deadline comes first."""


def _connect_unix(host: str) -> socket.socket:
    """Return a connected socket of "unix:PATH". Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        with unix_target(host) as path:
            sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


class Connection:
    """A blocking socket and its channel; used by one thread at a time."""

    __slots__ = ("address", "channel", "_socket", "_tls")

    def __init__(
        self, address: tuple[str, int], deadline: float, context: ssl.SSLContext | None = None, features: int = 0
    ) -> None:
        self.address = address
        self.channel = Channel(features)
        self._tls: ssl.SSLSocket | None = None
        unix = address[0].startswith(UNIX)
        if unix:
            context = None
        try:
            if context is None and not unix:
                for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
                    require_safe(str(found[4][0]), False)
            left = min(CONNECT_S, deadline - time.monotonic())
            self._socket = _connect_unix(address[0]) if unix else socket.create_connection(address, max(0.01, left))
        except TlsError as error:
            raise not_secured(address, error) from None
        except OSError as error:
            raise unreachable(address, error) from None
        try:
            if not unix:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._socket = self._tls = context.wrap_socket(self._socket)
            self._exchange(lambda: self.channel.greeted, min(deadline, time.monotonic() + CONNECT_S))
            if self._tls is not None:
                require_server(read_identities(self._tls), self.channel.hello)
        except (ssl.SSLError, TlsError) as error:
            self.close()
            raise not_secured(address, explain(error)) from None
        except (OSError, wire.ProtocolError) as error:
            self.close()
            raise unreachable(address, error) from None
        except BaseException:
            self.close()
            raise

    def call(self, method: str, arguments: dict[str, object], deadline: float) -> PendingReply[Any]:
        """Ask one question and return its answer; one that did not come is `was_cut`. A server is silent for as long as
        a `long` verb takes it."""
        pending: PendingReply[Any] = PendingReply()
        self.channel.call(method, arguments, pending)
        if not VERBS[method].long:
            return self._answered(pending, lambda: pending.done, deadline)
        late = Unknown(f"{method}: {self.address[0]}:{self.address[1]} did not answer in time")
        return self._answered(pending, lambda: pending.done, deadline, late)

    def listen(self, method: str, arguments: dict[str, object], pushed: Pushed) -> PendingReply[Any]:
        """Ask a question that is answered only when it is over; meanwhile `pushed` gets what comes. A server that is
        silent for `STALL_S` is given up."""
        pending: PendingReply[Any] = PendingReply()
        self.channel.call(method, arguments, pending, pushed)
        return self._answered(pending, lambda: pending.done, float("inf"))

    def command(self, uid: int, frame: list[Buffer], deadline: float, flags: int = 0) -> PendingReply[bytes]:
        """Send one command frame and return its reply; without one, if its `flags` say so, when it is sent."""
        pending: PendingReply[bytes] = PendingReply()
        self.channel.append(uid, frame, pending, flags)
        if flags & wire.REPLY_MODE != wire.REPLY_NONE:
            return self._answered(pending, lambda: pending.done, deadline)
        self._answered(pending, lambda: True, deadline).set(b"")
        return pending

    def _answered(
        self, pending: PendingReply[T], done: Callable[[], bool], deadline: float, late: Unknown | None = None
    ) -> PendingReply[T]:
        """Send, and receive until `done`. `late`: what is told at the deadline, which is all that ends the wait."""
        try:
            self._exchange(done, deadline, STALL_S if late is None else WORK_S)
        except (OSError, wire.ProtocolError) as error:
            self.close()
            failure = late if late is not None and isinstance(error, TimeoutError) else unreachable(self.address, error)
            self.channel.cut(failure)
            pending.cut(failure)
        return pending

    def _exchange(self, done: Callable[[], bool], deadline: float, stall_s: float = STALL_S) -> None:
        outgoing = self.channel.outgoing
        while outgoing.size or not done():
            self._socket.settimeout(max(0.001, min(stall_s, deadline - time.monotonic())))
            if outgoing.size:
                window = outgoing.window()
                # OpenSSL has no gather-write: many small buffers leave as one record.
                sent = self._socket.sendmsg(window) if self._tls is None else self._tls.send(gathered(window))
                outgoing.sent(sent)
                continue
            count = self._socket.recv_into(self.channel.receiver.buffer())
            if not count:
                raise wire.ProtocolError("the server closed the connection")
            self.channel.received(count)

    def alive(self) -> bool:
        """Return whether the server has not closed an idle connection meanwhile: what is sent on it is not lost for
        sure."""
        try:
            self._socket.settimeout(0)
            if self._tls is not None:
                # Between answers a server sends nothing, so whatever can be read is the connection's end.
                self._tls.recv(1)
                return False
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False

    def interrupt(self) -> None:
        """Interrupt, from another thread, whoever reads here: it meets the connection's end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._socket.close()
