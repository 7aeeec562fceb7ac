"""The client door: trio raw sockets, one receiving and one sending task a connection.

Invariants: malformed input closes its own connection and nothing else; nothing is allocated for a length above its
limit; bytes received and not yet answered are bounded per connection and for all of them (above it sockets are not
read); the replies of a turn leave in one frame. Called by `service.node`.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from logyard.client.tls_stream import TlsStream
from logyard.engine.config import SystemConfig
from logyard.engine.descriptors import CLIENTS, PEERS, has_room
from logyard.engine.transport.link import keep_alive
from logyard.engine.transport.reactor import receive_each
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, Busy, LogyardError, Refused, encode_error, error_value, plain
from logyard.protocol.frame import Buffer
from logyard.protocol.verbs import ADMINISTRATIVE

from ..addresses import listen_address, unix_path
from .answers import CONNECTION_BYTES, GIVE_BACK, TAKE, AnswerBytes
from .answers import STALL_S as ANSWERS_STALL_S
from .arguments import decode_call
from .dispatch import Data, SystemPort, serve_call, shown, submit_command
from .flow_control import STEP_BYTES, Room
from .pushes import LISTENING, Pushing

if TYPE_CHECKING:
    from logyard.engine.transport.link import Stream, Write

    from ..tls import Door

HANDSHAKE_BUFFER = wire.HEADER_BYTES + wire.HELLO_BYTES_MAX
CALLS_MAX = 1024
"""Calls of one connection at a time: each is a task."""
STALL_S = 30.0
"""A frame that has begun, or an answer that is not taken, for so long without a byte: the connection is closed."""
RATE_MIN = 64 << 10
"""Bytes a second: a frame that comes slower than that, from STALL_S on, closes its connection, however steadily."""
ADMIN_PLACES = 16
"""Its connections: none of them takes the place of a client's, nor the other way round."""
PRIVATE = 0o177
"""The umask of a socket that its owner alone may connect to."""
SWEEP_S = 1.0
BACKLOG = 512
ONLY_JOINS = "its HELLO says that this connection joins, and asks for nothing else"
VANISHED = (60, 15, 4, 120_000)
"""The kernel asks a client that is silent for so many seconds, each so many seconds, so many times whether its machine
is there, and waits for so many ms until one that is sent something (who listens is, each second) acknowledges it: its
place is free two minutes after that vanished."""
KEEPING = frozenset({"session_open", "heartbeat", *LISTENING})
"""Calls of a client that somebody would miss."""


AUDIT = logging.getLogger("logyard.audit")
"""A line for each administrative verb: what, of what, what came of it, and who asked."""


def caller(raw: socket.socket, secured: TlsStream | None) -> str:
    """Return who is at the other end: the name in a certificate, a user of this machine, or nobody in particular."""
    if raw.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return f"user {uid} (process {pid}) at the node's own socket"
    host, port = raw.getpeername()[:2]
    names = [f"{one.role} {one.name}" for one in secured.identities] if secured is not None else []
    # A certificate may name a node as well: it is the client that is here.
    return f"{min(names, default='anybody')} at {host}:{port}"


class Connection:
    """One client. `reply` is the sink that the system answers to."""

    __slots__ = (
        "server", "socket", "scope", "greeted", "progress", "_replies", "_outgoing", "_receiver", "_bell", "_ringing",
        "_drained", "_sizes", "_inflight", "_reserved", "_answered", "_calls", "_nursery", "_paused", "_delay",
        "_parked", "_raw", "_write", "_frame", "_begun", "kept", "_taken", "_counted", "caller",
        "_joins",
    )  # fmt: skip

    def __init__(self, server: RpcServer, raw: socket.socket) -> None:
        self.server = server
        self.socket: Stream = trio.socket.from_stdlib_socket(raw)
        self._raw = raw
        self._write: Write = raw.sendmsg
        self.scope = trio.CancelScope()
        self.greeted = False
        self.progress = trio.current_time()
        self._replies: list[tuple[int, int, Buffer]] = []
        self._outgoing = wire.Outgoing()
        self._receiver = wire.Receiver(wire.HELLO_LIMITS, HANDSHAKE_BUFFER)
        self._bell = trio.lowlevel.ParkingLot()
        self._ringing = False
        self._drained = trio.lowlevel.ParkingLot()
        self._sizes: dict[int, int] = {}
        self._inflight = 0
        # Of the large frame that is being received: its size, and how much of it is counted, and not a request's yet.
        self._frame = 0
        self._reserved = 0
        # When the frame began that is not complete; -1: there is none.
        self._begun = -1.0
        # Of answers: bytes that calls took room for, and what of `_outgoing` is counted.
        self._taken = self._counted = 0
        # When it last said that it keeps a session alive; -inf: never.
        self.kept = -math.inf
        # Who is at the other end, for the log.
        self.caller = ""
        # It may ask to join, and for nothing else: it may have shown a node's certificate.
        self._joins = False
        self._answered = trio.lowlevel.ParkingLot()
        self._calls = 0
        self._nursery: trio.Nursery | None = None
        self._paused = False
        # Seconds that the large frame which is to be received next has to wait for what the disk has to do.
        self._delay = 0.0
        self._parked = False

    # What the system calls.

    def reply(self, request: int, status: int, data: Buffer) -> None:
        """Answer an APPEND: queued now, sent with all others of this turn. After the connection's end it is dropped."""
        if self._release(request):
            self._replies.append((request, status, data))
            self._ring()

    @property
    def reserved(self) -> int:
        """Bytes of the large frame that is being received."""
        return self._reserved

    # Budgets: looked at before each receive, so what one receive brings may be above them.

    def _charge(self, request: int, size: int, held: int) -> None:
        """Count a request; `held` bytes of it were counted when its memory was taken."""
        if request in self._sizes:
            self._reserved = held
            raise wire.ProtocolError(f"request {request} is open already")
        self._sizes[request] = size
        self._inflight += size - held
        self.server.room.count(size - held)

    def _release(self, request: int) -> bool:
        size = self._sizes.pop(request, None)
        if size is None:
            return False
        self._inflight -= size
        self.server.room.give(size)
        if self._answered:
            self._answered.unpark_all()
        return True

    def _over_budget(self, wanted: int) -> bool:
        mine = self._inflight
        return mine > 0 and mine + wanted > self.server.config.client_inflight_bytes

    # Its life.

    async def run(self) -> None:
        """Serve until the client leaves, misbehaves or is cut."""
        try:
            with self.scope:
                if await self._handshake():
                    self._receiver = wire.Receiver(wire.server_limits(self.server.config.record_bytes_max))
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        nursery.start_soon(self._send)
                        await self._receive()
                        nursery.cancel_scope.cancel()
        finally:
            self.server.room.give(self._reserved)
            self.server.room.ended(self)
            self.server.answers.count(-self._counted)
            # Nothing is sent any more: nobody waits for that.
            self._outgoing, self._counted = wire.Outgoing(), 0
            self._drained.unpark_all()
            for request in list(self._sizes):
                self._release(request)
            self.socket.close()

    async def _handshake(self) -> bool:
        server = self.server
        try:
            secured = await self._secure()
            frames: list[wire.Received] = []
            while not frames:
                count = await self.socket.recv_into(self._receiver.buffer())
                if not count:
                    return False
                frames = self._receiver.received(count)
            if len(frames) > 1 or self._receiver.partial:
                raise wire.ProtocolError("nothing may follow HELLO before its answer")
            hello = wire.decode_hello(frames[0].body)
            if hello.cluster is not None and hello.cluster != server.system.cluster_id:
                raise wire.ProtocolError(f"this is cluster {server.system.cluster_id}")
            self._joins = bool(hello.features & wire.JOINS)
            if server.door is not None:
                assert secured is not None
                server.door.require_client(secured, server.system.cluster_id, self._joins)
            self.caller = caller(self._raw, secured)
        except (wire.ProtocolError, LogyardError) as error:
            server.note_refusal(error)
            refusal = wire.encode_error(0, wire.pack(error_value(_told(error))))
            self._outgoing.push((refusal,))
            await self._flush()
            return False
        except OSError as error:
            server.note_refusal(error)
            return False
        except Exception:
            # As in `_receive`: a stranger's bytes are not the end of the node.
            server.log.exception("connection closed by an unexpected error")
            return False
        self._outgoing.push((server.hello,))
        self.greeted = True
        return await self._flush()

    async def _secure(self) -> TlsStream | None:
        """Put, behind a TLS door, the client's TLS connection in the place of its socket."""
        if not self.server.path:
            self._raw.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
            keep_alive(self._raw, *VANISHED)
        if self.server.door is None:
            return None
        stream = await self.server.door.accept(trio.socket.from_stdlib_socket(self._raw), self._raw)
        self.socket = stream
        self._write = stream.sendmsg_now
        return stream

    async def _receive(self) -> None:
        try:
            while await receive_each(self.socket, self._buffer, self._received):
                # In the middle of a large frame its bytes are counted already.
                if self._reserved:
                    await self._wait_for_step()
                else:
                    await self._wait_for_room(self._receiver.wanted)
        except (wire.ProtocolError, OSError) as error:
            self.server.log.debug("connection closed: %s", error)
        except Exception:
            # A bug of ours in what one client's bytes led to: loud, but not the end of the other clients.
            self.server.log.exception("connection closed by an unexpected error")

    def _buffer(self) -> memoryview | None:
        """Return where to receive; None when there has to be room first."""
        receiver = self._receiver
        if not self._reserved:
            # A connection that waits for no answer is read even when this node is full, so that it can be asked, and
            # emptied.
            wanted = receiver.wanted
            if wanted and not self._begin_large(wanted):
                return None
            if not wanted and self._inflight and (self.server.room.full or self._over_budget(0)):
                return None
        if self._reserved == self._frame:
            return receiver.buffer()
        if receiver.filled == self._reserved:
            return None
        return receiver.buffer()[: self._reserved - receiver.filled]

    def _received(self, count: int) -> bool:
        """Take what so many more bytes brought; return False when they are the end."""
        if not count:
            return False
        receiver, system = self._receiver, self.server.system
        self.progress = trio.current_time()
        system.receiving()
        try:
            frames = receiver.received(count)
            self._take(frames)
        finally:
            system.received()
        if not receiver.partial:
            self._begun = -1.0
        elif frames or self._begun < 0:
            self._begun = self.progress
        return True

    def _take(self, frames: Sequence[wire.Received]) -> None:
        """Take frames; nothing of one may outlive this call here: a waiting connection must not hold its last one."""
        for frame in frames:
            held, self._reserved, self._frame = self._reserved, 0, 0
            if held:
                self.server.room.ended(self)
            if frame.type == wire.APPEND:
                self._append(frame.request, frame.flags, frame.body, held)
            else:
                self._call(frame.request, frame.body, held)

    def _begin_large(self, wanted: int) -> bool:
        """Count the first step of a large frame, if there is room and nobody waits longer for it."""
        step = min(wanted, STEP_BYTES)
        self._delay = self.server.delay(wanted)
        if self._delay or self._over_budget(wanted) or not self.server.room.takes(step):
            return False
        self._counted_step(wanted, step)
        return True

    def _counted_step(self, wanted: int, step: int) -> None:
        """Note what is counted of a large frame: from before it is received; as a request's when it is complete."""
        self._frame, self._reserved = wanted, step
        self._inflight += step

    async def _wait_for_room(self, wanted: int) -> None:
        self._paused = True
        while self._over_budget(wanted):
            await self._answered.park()
        if wanted:
            if self._delay:
                await trio.sleep(self._delay)
            step = min(wanted, STEP_BYTES)
            await self.server.room.take(step)
            self._counted_step(wanted, step)
        else:
            await self.server.room.wait_small()
        self._paused = False
        self.progress = self._begun = trio.current_time()

    async def _wait_for_step(self) -> None:
        """Count the next bytes of a large frame; what is waited for them is not the client's time."""
        self._paused = True
        step = min(self._frame - self._reserved, STEP_BYTES)
        asked = trio.current_time()
        await self.server.room.go_on(step, self)
        self._reserved += step
        self._inflight += step
        self._paused = False
        self.progress = trio.current_time()
        self._begun += self.progress - asked

    def _append(self, request: int, flags: int, body: bytes | memoryview, held: int) -> None:
        self._charge(request, len(body), held)
        if self._joins:
            raise wire.ProtocolError(ONLY_JOINS)
        submit_command(self.server.system, self, self._release, request, flags, body)

    def _call(self, request: int, body: bytes | memoryview, held: int) -> None:
        method, arguments = decode_call(body)
        self._charge(request, len(body), held)
        assert self._nursery is not None
        refusal: LogyardError | None = None
        if self._joins and method != "join":
            refusal = Refused(ONLY_JOINS)
        elif self._calls >= CALLS_MAX:
            refusal = Busy("the call limit", 0.05)
        if refusal is not None:
            self._answer(request, _failure(request, refusal))
            return
        self._calls += 1
        if method in KEEPING:
            self.kept = self.progress
        self._nursery.start_soon(self._serve, request, method, arguments)

    async def _serve(self, request: int, method: str, arguments: Mapping[str, Any]) -> None:
        server = self.server
        taken = 0

        async def take(size: int) -> None:
            nonlocal taken
            await self._take_room(size)
            taken += size

        def give_back() -> None:
            nonlocal taken
            self._taken -= taken
            server.answers.count(-taken)
            taken = 0

        TAKE.set(take)
        GIVE_BACK.set(give_back)
        told = shown(arguments) if method in ADMINISTRATIVE else None
        outcome = "cut off"
        try:
            await self.drained(CONNECTION_BYTES)
            if method == "cluster":
                value: object = server.cluster()
            elif method in LISTENING:
                call = LISTENING[method](server.system, arguments, Pushing(request, self))
                # While it waits it keeps what it took of them, and not what else there was.
                del arguments
                value = await call
            else:
                call = serve_call(server.system, method, arguments)
                del arguments
                value = await call
            outcome = "done"
            if isinstance(value, Data):
                answer = wire.encode_data(request, value.header, value.parts)
            else:
                answer = [wire.encode_result(request, value)]
        except LogyardError as error:
            outcome = error.code
            answer = _failure(request, error)
        except Exception as error:
            outcome = type(error).__name__
            server.log.exception("the call %s failed unexpectedly", method)
            failure = LogyardError(f"{method} failed unexpectedly: {type(error).__name__}: {plain(error)}")
            answer = _failure(request, failure)
        finally:
            if told is not None:
                AUDIT.info("%s %s: %s, by %s", method, told, outcome, self.caller)
            give_back()
        self._calls -= 1
        self._answer(request, answer)

    async def _take_room(self, size: int) -> None:
        """Wait for room before `size` bytes are read for an answer."""
        answers = self.server.answers
        while True:
            waiting = self._taken + self._outgoing.size
            if waiting and waiting + size > CONNECTION_BYTES:
                await self.changed()
            elif answers.fits(size):
                break
            else:
                await answers.wait()
        self._taken += size
        answers.count(size)

    async def changed(self) -> None:
        """Wait until something of what waits here was sent, or a call ended."""
        await self._drained.park()

    def _count(self) -> None:
        """Count what waits to be sent for the whole door."""
        size = self._outgoing.size
        if size != self._counted:
            self.server.answers.count(size - self._counted)
            self._counted = size

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return self._outgoing.size

    async def drained(self, size: int) -> None:
        """Wait until at most `size` bytes wait to be sent."""
        while self._outgoing.size > size:
            await self._drained.park()

    def queue(self, frame: list[Buffer] | list[bytes]) -> None:
        """Send a frame, when its turn comes."""
        if not self._outgoing.size:
            self.progress = trio.current_time()
        self._outgoing.push(frame)
        self._count()
        self._ring()

    def _answer(self, request: int, frame: list[Buffer] | list[bytes]) -> None:
        if self._release(request):
            self.queue(frame)

    # Sending.

    def _ring(self) -> None:
        if not self._ringing:
            self._ringing = True
            if not self.server.system.at_turn_end(self._send_now):
                self._bell.unpark_all()

    def _send_now(self) -> None:
        """Send the replies of a turn at its end without a task switch, unless the socket is full or in use."""
        if not self._parked:
            # The sender is awake and takes the replies along.
            return
        outgoing = self._outgoing
        if not outgoing.size:
            self.progress = trio.current_time()
        if self._replies:
            replies, self._replies = self._replies, []
            outgoing.push(wire.encode_replies(replies))
        try:
            outgoing.sent(self._write(outgoing.window()))
        except OSError:
            # Full, or broken: the sender waits, or meets the same error and ends the connection.
            pass
        self._count()
        self._drained.unpark_all()
        if outgoing.size:
            self._bell.unpark_all()
        else:
            self._ringing = False

    async def _send(self) -> None:
        while True:
            if not self._ringing:
                self._parked = True
                await self._bell.park()
                self._parked = False
            self._ringing = False
            if not await self._flush():
                self.scope.cancel()
                return

    async def _flush(self) -> bool:
        """Send what there is; replies that come meanwhile make the next frame. False: the client is gone."""
        outgoing = self._outgoing
        try:
            while self._replies or outgoing.size:
                if not outgoing.size:
                    self.progress = trio.current_time()
                if self._replies:
                    replies, self._replies = self._replies, []
                    outgoing.push(wire.encode_replies(replies))
                while outgoing.size:
                    outgoing.sent(await self.socket.sendmsg(outgoing.window()))
                    self.progress = trio.current_time()
                    self._count()
                    self._drained.unpark_all()
        except OSError:
            return False
        return True

    def overdue(self, now: float, handshake_s: float) -> bool:
        """Return whether it takes too long over its handshake, a frame it began, or an answer it does not take."""
        if not self.greeted:
            return now - self.progress > handshake_s
        if self._outgoing.size > 0 and now - self.progress > STALL_S:
            return True
        if not self._receiver.partial or self._paused or self._begun < 0:
            return False
        return self._receiver.filled < (now - self._begun - STALL_S) * RATE_MIN

    @property
    def idle(self) -> bool:
        """Nobody misses it: nothing of it is under way, and no session lives for which it spoke up."""
        if trio.current_time() - self.kept < self.server.config.session_ttl_ms_max / 1000:
            return False
        return not (self._sizes or self._reserved or self._outgoing.size)


def no_delay(size: int) -> float:
    """Return 0: nothing is ever late."""
    return 0.0


def bind_unix(path: str) -> socket.socket:
    """Return a bound socket at `path` (0600), in place of what a process that was killed left there. Raises OSError."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A socket's address is short; the way through the descriptor is so for any directory.
        short = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        if os.path.lexists(short):
            os.unlink(short)
        before = os.umask(PRIVATE)
        try:
            raw.bind(short)
        finally:
            os.umask(before)
    except OSError:
        raw.close()
        raise
    finally:
        os.close(directory)
    return raw


class RpcServer:
    """Listens on `address` ("host:port", port 0: any free one) and serves `system` to clients.

    "unix:PATH" is a socket of its owner's alone, without TLS; `places`: how many connections there may be.
    `client_addresses` are told to every client: node -> "host:port". `port` is known once `serve` has started. `door`
    is TLS; without it only a loopback address is served. `delay`: how long a large frame of so many bytes is to wait
    before it is received, in seconds. `refusal`: why the last handshake failed.
    """

    def __init__(
        self,
        system: SystemPort,
        address: str,
        client_addresses: Mapping[int, str],
        config: SystemConfig,
        door: Door | None = None,
        places: int = 0,
        delay: Callable[[int], float] = no_delay,
    ) -> None:
        self.system = system
        self.delay = delay
        self.config = config
        self.door = door
        self.refusal = ""
        self.path = unix_path(address)
        self.host, self.port = ("", 0) if self.path else listen_address(address, secured=door is not None)
        self.places = places or config.connections_max
        self.client_addresses = dict(client_addresses)
        if self.path:
            self.client_addresses[system.node_id] = address
        self.connections: set[Connection] = set()
        self._came = trio.lowlevel.ParkingLot()
        self.room = Room(config.node_inflight_bytes, config.reserved_ratio)
        self.answers = AnswerBytes(config.node_memory_bytes // 4)
        self.log = logging.getLogger("logyard.rpc")

    @property
    def inflight(self) -> int:
        """Bytes received, or about to be, and not answered."""
        return self.room.used

    def note_refusal(self, error: Exception) -> None:
        """Keep why a handshake failed."""
        self.refusal = str(error)

    def buffered(self) -> int:
        """Return the bytes at this door that the engine does not count: frames that are not complete, receive buffers,
        answers."""
        begun = sum(connection.reserved for connection in self.connections)
        return begun + self.answers.used + len(self.connections) * wire.RECEIVE_BYTES

    @property
    def hello(self) -> bytes:
        """This node's HELLO, with the client addresses as they are now."""
        return wire.encode_hello(
            self.system.cluster_id, self.system.node_id, self.client_addresses.items(), self.config.record_bytes_max,
            wire.KNOWS_KINDS,
        )  # fmt: skip

    async def serve(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started` with the port. Raises `Refused` when the address can't be had."""
        with self._listening() as raw:
            raw.setblocking(False)
            raw.listen(BACKLOG)
            if not self.path:
                self.port = raw.getsockname()[1]
                self.client_addresses.setdefault(self.system.node_id, f"{self.host}:{self.port}")
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._sweep)
                    task_status.started(self.port)
                    await self._accept(raw, nursery)
            finally:
                if self.path:
                    with suppress(OSError):
                        os.unlink(self.path)

    def _listening(self) -> socket.socket:
        """Return a bound socket. Raises `Refused`, which names the address."""
        if self.path:
            return bind_unix(self.path)
        raw = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            raw.bind((self.host, self.port))
        except OSError as error:
            raw.close()
            where = f"{self.host}:{self.port}"
            raise Refused(f"can't listen for clients on {where} (node.client_listen): {error.strerror}") from None
        return raw

    def introduce(self, node: int, address: str) -> None:
        """Tell clients from now on where another node is; nothing: that it is gone."""
        if address:
            self.client_addresses[node] = address
        else:
            self.client_addresses.pop(node, None)

    def cluster(self) -> dict[str, object]:
        """Return what the ``cluster`` call answers."""
        return {"cluster": self.system.cluster_id, "node": self.system.node_id, "nodes": self.client_addresses}

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                raw, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # Out of descriptors, or the client was gone already: the listener is sound.
                self.log.warning("a connection could not be accepted: %s", error)
                await trio.sleep(0.05)
                continue
            raw.setblocking(False)
            share = PEERS if self.path else CLIENTS
            if (len(self.connections) >= self.places or not has_room(raw.fileno(), share)) and not self._make_place():
                raw.close()
                continue
            connection = Connection(self, raw)
            self.connections.add(connection)
            nursery.start_soon(self._run, connection)

    def _make_place(self) -> bool:
        """End the connection that is missed least: one that has not said who it is, or is idle, for the longest time.
        False when all are in use."""
        idle = (connection for connection in self.connections if connection.idle)
        found = min(idle, key=lambda connection: (connection.greeted, connection.progress), default=None)
        if found is None:
            return False
        self.connections.discard(found)
        found.scope.cancel()
        return True

    async def _run(self, connection: Connection) -> None:
        self._came.unpark_all()
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)

    async def _sweep(self) -> None:
        """Sweep over all connections by one clock: no timer is paid for each receive."""
        handshake = self.config.handshake_timeout_ms / 1000
        while True:
            if not self.connections:
                await self._came.park()
            await trio.sleep(min(SWEEP_S, handshake / 4))
            for connection in list(self.connections):
                now = trio.current_time()
                blocks = self.answers.waiting and connection.unsent and now - connection.progress > ANSWERS_STALL_S
                if blocks or connection.overdue(now, handshake):
                    connection.scope.cancel()


def _failure(request: int, error: LogyardError) -> list[Buffer]:
    """Return the ERROR that tells an error, without its details where no wire can carry them."""
    try:
        packed = wire.pack(error_value(error))
    except Exception:
        packed = encode_error(LogyardError(plain(error), code=error.code))
    return [wire.encode_error(request, packed)]


def _told(error: Exception) -> LogyardError:
    """Return what a client is told of a refusal. Not a name where it was caught: its traceback holds that frame, which
    would hold it, and everything that the frame knows until a collection."""
    return error if isinstance(error, LogyardError) else BadRequest(str(error))
