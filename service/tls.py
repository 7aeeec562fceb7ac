"""TLS of a node's two doors: for peers and for clients, each with files, a CA and a role of its own.

A peer shows a certificate of the node that its HELLO names, a client one of the role client; whatever does not is told
why in one line and closed. A node's certificate is good for one thing at the client door: to join. Contexts are made
at the start and by `reload_doors` (SIGHUP): connections that stand keep theirs. Composed by `service.node`; the records
themselves are `client.tls_stream`'s.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from logyard.client.tls_stream import TlsStream
from logyard.protocol.errors import BadRequest, WrongIdentity
from logyard.protocol.tls import (
    CLIENT,
    HANDSHAKE_RECORD,
    NODE,
    TlsConfig,
    TlsError,
    explain,
    identities,
    make_context,
    require,
)

if TYPE_CHECKING:
    import socket

    from logyard.engine.transport.link import Stream, Write

    from .config import NodeConfig

PLAIN_BYTES = 4096
"""Of a connection that does not speak TLS so much is read away, so that closing does not destroy the answer."""
LINGER_S = 0.5
"""How long a refused handshake's alert may take to be read before the connection is closed."""


class Door:
    """One door's contexts. `table` names its keys: "tls" or "client_tls". Raises `BadRequest` naming the key."""

    __slots__ = ("table", "config", "server", "client", "until")

    def __init__(self, table: str, config: TlsConfig) -> None:
        self.table = table
        self.config = config
        self.server: ssl.SSLContext
        self.client: ssl.SSLContext
        # When its own certificate expires, once that was checked.
        self.until = ""
        self.reload()

    def reload(self) -> None:
        """Read the files again. Raises `BadRequest`; then the contexts stay what they were."""
        try:
            self.server, self.client = (make_context(self.config, server=True), make_context(self.config, server=False))
        except TlsError as error:
            raise BadRequest(f"[{self.table}] {error}", key=self.table) from None

    def take(self, other: Door) -> None:
        """Use the contexts of another door of the same table from now on."""
        self.server, self.client, self.until = other.server, other.client, other.until

    @property
    def told(self) -> str:
        """What is in use, for the operator who has just renewed it."""
        return f"[{self.table}] {self.config.certificate}, valid until {self.until}"

    @property
    def exposed(self) -> str:
        """What is wrong with who may read or write the key's file; empty: nothing. A group that reads it may be meant
        to."""
        path = self.config.key
        mode = os.stat(path).st_mode & 0o777
        return f"[{self.table}] key: {path} has mode {mode:04o}: chmod 600 {path}" if mode & 0o027 else ""

    def check_own(self, cluster: str, node: int) -> None:
        """Raise `BadRequest` unless the door's own certificate is valid now and this node's."""
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        # Only who it names and whether it has expired is looked at; by whom it is signed, the others have to judge.
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            trusting.load_verify_locations(cafile=str(self.config.certificate))
            plain.load_cert_chain(str(self.config.certificate), str(self.config.key))
            ends = [ssl.MemoryBIO(), ssl.MemoryBIO()]
            near = trusting.wrap_bio(ends[0], ends[1])
            far = plain.wrap_bio(ends[1], ends[0], server_side=True)
            for side in (near, far, near):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
            found = near.getpeercert()
            require(identities(found), cluster, NODE, str(node))
            self.until = str((found or {}).get("notAfter", ""))
        except ssl.SSLCertVerificationError as error:
            raise BadRequest(f"[{self.table}] certificate: {error.verify_message}", key=self.table) from None
        except TlsError as error:
            made = f"logyard tls init DIR --cluster {cluster} --nodes {node}"
            raise BadRequest(f"[{self.table}] {error}: `{made}` makes that one", key=self.table) from None
        except (OSError, ValueError) as error:
            # Of OpenSSL, or of a file that was taken away, or could not be opened, just now.
            raise BadRequest(f"[{self.table}] certificate: {explain(error)}", key=self.table) from None

    async def accept(self, sock: trio.socket.SocketType, raw: socket.socket | None = None) -> TlsStream:
        """Shake hands with whoever dialled; `raw` is the socket below, for writes that never wait. Raises `BadRequest`
        for one that does not speak TLS, OSError."""
        first = await sock.recv(1, trio.socket.MSG_PEEK)
        if first and first[0] != HANDSHAKE_RECORD:
            await sock.recv(PLAIN_BYTES)
            raise BadRequest("this port speaks TLS only: give a CA, a certificate and its key")
        stream = TlsStream(sock, self.server, server=True, raw=raw)
        try:
            await stream.handshake()
        except TlsError:
            # Closing with bytes unread would be a reset, and the alert that says why would be lost.
            sock.shutdown(trio.socket.SHUT_WR)
            with trio.move_on_after(LINGER_S):
                while await sock.recv(PLAIN_BYTES):
                    pass
            raise
        return stream

    def require_client(self, stream: TlsStream, cluster: str, joins: bool = False) -> None:
        """Raise `WrongIdentity` unless the other side's certificate is a client's of this cluster, or, of one that
        `joins` and may do nothing else, a node's."""
        try:
            require(stream.identities, cluster, CLIENT)
        except TlsError as error:
            if not joins or not any(one.cluster == cluster and one.role == NODE for one in stream.identities):
                raise WrongIdentity(str(error)) from None


class PeerGuard:
    """The transport's `Guard`: both sides of a lane show the certificate of the node that their HELLO names."""

    __slots__ = ("door",)

    def __init__(self, door: Door) -> None:
        self.door = door

    async def dial(
        self, sock: trio.socket.SocketType, raw: socket.socket
    ) -> tuple[Stream, Write, Callable[[str, int], None]]:
        """Shake hands as the side that dialled. Raises OSError."""
        stream = TlsStream(sock, self.door.client, server=False, raw=raw)
        await stream.handshake()
        return stream, stream.sendmsg_now, checker(stream)

    async def accept(self, sock: trio.socket.SocketType) -> tuple[Stream, Callable[[str, int], None]]:
        """Shake hands as the side that accepted. Raises `BadRequest`, OSError."""
        stream = await self.door.accept(sock)
        return stream, checker(stream)


def checker(stream: TlsStream) -> Callable[[str, int], None]:
    """Return what compares a cluster and a node with the other side's certificate; it raises `WrongIdentity`."""

    def check(cluster: str, node: int) -> None:
        try:
            require(stream.identities, cluster, NODE, str(node))
        except TlsError as error:
            raise WrongIdentity(str(error)) from None

    return check


def open_doors(config: NodeConfig) -> tuple[Door | None, Door | None]:
    """Return (peer door, client door) of a node, None where its table is absent. Raises `BadRequest` naming the key."""
    found = [
        None if files is None else _open_door(table, files, config.cluster, config.id)
        for table, files in (("tls", config.tls), ("client_tls", config.client_tls))
    ]
    return found[0], found[1]


def reload_doors(doors: Sequence[Door], cluster: str, node: int) -> None:
    """Read the files of a node's doors again, and take them together: where those of one are wrong, as at a start, all
    stay what they were. Raises `BadRequest` naming the key."""
    fresh = [_open_door(door.table, door.config, cluster, node) for door in doors]
    for door, new in zip(doors, fresh, strict=True):
        door.take(new)


def _open_door(table: str, files: TlsConfig, cluster: str, node: int) -> Door:
    door = Door(table, files)
    door.check_own(cluster, node)
    return door
