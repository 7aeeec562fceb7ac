"""A TLS connection under trio or asyncio, with the few methods that our loops use of a plain socket.

`sendmsg_now` may hold back ciphertext that the kernel did not take. The bytes it stands for count as unsent, so a
caller that goes on with what is left of its buffers, as after any short write, sends each byte once. One task may read
while another writes. There is no goodbye at the end: every frame names its length, so a cut one is noticed above.
Made by `client.aio` and `service.tls`.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from logyard.protocol.frame import Buffer
from logyard.protocol.tls import CALL_BYTES, READ_BYTES, Cipher, Identity, TlsError, read_identities

if TYPE_CHECKING:
    import socket

    from .runtime import Socket


class TlsStream:
    """One side of a TLS connection over `sock`, which belongs to it. Call `handshake` first.

    `raw` is the plain socket below `sock`: only `sendmsg_now` needs it.
    """

    __slots__ = ("identities", "_sock", "_raw", "_cipher")

    def __init__(
        self,
        sock: Socket,
        context: ssl.SSLContext,
        *,
        server: bool,
        raw: socket.socket | None = None,
    ) -> None:
        self.identities: tuple[Identity, ...] = ()
        self._sock = sock
        self._raw = raw
        self._cipher = Cipher(context, server=server)

    async def handshake(self) -> None:
        """Shake hands; `identities` are then those of the other side's certificate. Raises OSError (`TlsError`)."""
        cipher = self._cipher
        try:
            while not cipher.handshake():
                await self._flush()
                cipher.received(await self._sock.recv(READ_BYTES))
        except TlsError:
            # The alert that tells the other side why.
            await self._flush()
            raise
        await self._flush()
        self.identities = read_identities(cipher.object)

    async def recv_into(self, view: memoryview) -> int:
        """Return the bytes received into `view`; 0 at the end."""
        cipher = self._cipher
        while True:
            count = cipher.read_into(view)
            if count is not None:
                return count
            cipher.received(await self._sock.recv(READ_BYTES))

    async def recv(self, limit: int) -> bytes:
        """Return at most `limit` bytes; none at the end."""
        found = bytearray(limit)
        count = await self.recv_into(memoryview(found))
        return bytes(found[:count])

    async def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Return the bytes sent, in one or several records."""
        await self._flush()
        sent = self._cipher.settle()
        sent += self._cipher.encrypt(buffers, sent)
        await self._flush()
        return sent

    async def send(self, data: Buffer) -> int:
        """Send as `sendmsg` does, of one buffer."""
        return await self.sendmsg((data,))

    def sendmsg_now(self, buffers: Sequence[Buffer]) -> int:
        """Send what the kernel takes at once and return its bytes; raise BlockingIOError when that is nothing. Never
        waits."""
        cipher = self._cipher
        self._push()
        if cipher.outgoing():
            raise BlockingIOError
        sent = cipher.settle()
        while sent < CALL_BYTES:
            count = cipher.encrypt(buffers, sent)
            if not count:
                break
            cipher.hold(count)
            self._push()
            if cipher.outgoing():
                break
            sent += cipher.settle()
        return sent

    def _push(self) -> None:
        cipher = self._cipher
        assert self._raw is not None
        try:
            while data := cipher.outgoing():
                cipher.sent(self._raw.send(data))
        except (BlockingIOError, InterruptedError):
            pass

    async def _flush(self) -> None:
        cipher = self._cipher
        while data := cipher.outgoing():
            cipher.sent(await self._sock.send(data))

    def close(self) -> None:
        """Close the socket; whoever waits on it is woken with an error."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *found: object) -> None:
        self.close()
