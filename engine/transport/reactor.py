"""Sockets that are read from within the event loop's wait, by plain calls instead of tasks.

Waking a task for what a socket brought is a turn of trio's loop and two switches, some fifty calls: more than a lone
append has to do with the bytes. So whoever reads lends its descriptor and a call (`Reactor.serve`), and parks. The wait
of trio's loop becomes one for the lent descriptors and, as one more of them, for the set of descriptors that trio waits
for itself. Invariants: a call runs between the steps of tasks and never inside another one; what it raises is raised in
the task that lent it; as soon as a task can run, trio's own set is ready or its timeout is over, trio goes on. trio has
no public way to replace its wait: where its parts are not found (another platform or version) there is no reactor, and
`receive_each` reads by a task. Called by `link` and the client door; `soon` is the ready loop's.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import trio
from outcome import Error, Outcome, Value

from .eager import EagerReads

EVENTS_MAX = 256
"""Descriptors that one look at the kernel brings, at most."""
HEARD: Final = (None,)
"""What the wait returns when calls were made: something happened, and nothing is left for trio to look at."""
RUN: trio.lowlevel.RunVar[Reactor | None] = trio.lowlevel.RunVar("reactor")
"""The reactor of a run of the loop; None where there can't be one."""


class Poller(Protocol):
    """What trio has for its wait, as far as it is used here."""

    def get_events(self, timeout: float) -> Any:
        """Wait for so many seconds."""
        ...

    def process_events(self, events: Any) -> None:
        """Wake who waited for these."""
        ...

    def notify_closing(self, fd: Any) -> None:
        """Wake who waits for a descriptor that is about to be closed."""
        ...

    def close(self) -> None:
        """Close its set of descriptors."""
        ...


class Lent:
    """A descriptor, what is called when it can be read, and the task that is parked meanwhile."""

    __slots__ = ("_drop", "_fd", "_ready", "_task")

    def __init__(self, fd: int, ready: Callable[[], bool], drop: Callable[[int, Lent], bool]) -> None:
        self._fd = fd
        self._ready = ready
        self._drop = drop
        self._task = trio.lowlevel.current_task()

    def call(self) -> None:
        """Make the call; wake the task when that was the last one."""
        try:
            if self._ready():
                return
        except BaseException as error:
            self.end(Error(error))
        else:
            self.end(Value(None))

    def end(self, outcome: Outcome[None]) -> None:
        """Wake the task, unless it was cancelled or woken in the middle of the call."""
        if self._drop(self._fd, self):
            trio.lowlevel.reschedule(self._task, outcome)

    def abort(self, _: object) -> trio.lowlevel.Abort:
        """Take it back, as the task is cancelled."""
        self._drop(self._fd, self)
        return trio.lowlevel.Abort.SUCCEEDED


class Reactor:
    """Stands in the place of trio's manager of I/O, for one run of its loop. `reactor` makes it. `inner` is the
    manager's set, `runnable` trio's line of tasks that can run."""

    def __init__(self, poller: Poller, inner: int, runnable: deque[Any]) -> None:
        self._poller = poller
        self._inner = inner
        self._runnable = runnable
        self._lent: dict[int, Lent] = {}
        self._soon: list[Callable[[], None]] = []
        self._epoll = select.epoll()
        self._epoll.register(inner, select.EPOLLIN)

    def __getattr__(self, name: str) -> Any:
        # Whatever else trio asks of its manager.
        return getattr(self._poller, name)

    async def serve(self, fd: int, ready: Callable[[], bool]) -> None:
        """Call `ready` whenever `fd` can be read, until that returns False or raises; return then, or raise what it
        raised. Raises `trio.ClosedResourceError` when somebody closes the descriptor."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if fd < 0:
            raise trio.ClosedResourceError("this descriptor is closed")
        if fd in self._lent:
            raise trio.BusyResourceError("another task reads from this descriptor")
        lent = Lent(fd, ready, self._drop)
        self._epoll.register(fd, select.EPOLLIN)
        self._lent[fd] = lent
        await trio.lowlevel.wait_task_rescheduled(lent.abort)

    def soon(self, call: Callable[[], None]) -> None:
        """Make a call, which must not raise, when each lent descriptor was looked at once more: what they brought by
        then shares it."""
        self._soon.append(call)

    def _drop(self, fd: int, lent: Lent) -> bool:
        if self._lent.get(fd) is not lent:
            return False
        del self._lent[fd]
        self._epoll.unregister(fd)
        return True

    # What trio's loop calls.

    def get_events(self, timeout: float) -> Any:
        """Wait for so many seconds, and make the calls of what is ready meanwhile."""
        lent = self._lent
        if not (lent or self._soon):
            return self._poller.get_events(timeout)
        until = time.perf_counter() + timeout
        heard = False
        while True:
            due, self._soon = self._soon, []
            events = self._epoll.poll(0 if due or timeout <= 0 else timeout, EVENTS_MAX)
            inner = False
            for fd, _ in events:
                if fd == self._inner:
                    inner = True
                elif (one := lent.get(fd)) is not None:
                    heard = True
                    one.call()
            for call in due:
                heard = True
                call()
            if inner:
                return self._poller.get_events(0) or HEARD
            if self._runnable:
                return HEARD
            if timeout > 0:
                timeout = until - time.perf_counter()
            if timeout <= 0:
                return HEARD if heard else ()

    def process_events(self, events: Any) -> None:
        """Wake the tasks that waited for what trio's own set brought."""
        if events is not HEARD:
            self._poller.process_events(events)

    def notify_closing(self, fd: Any) -> None:
        """Take note that a descriptor is about to be closed: who reads from it hears of it."""
        lent = self._lent.get(fd if isinstance(fd, int) else fd.fileno())
        if lent is not None:
            lent.end(Error(trio.ClosedResourceError("another task closed this descriptor")))
        self._poller.notify_closing(fd)

    def close(self) -> None:
        """Close both sets of descriptors: the loop has ended."""
        self._epoll.close()
        self._poller.close()


def reactor() -> Reactor | None:
    """Return the reactor of this run of the loop, made when it is asked for first; None where there can't be one."""
    try:
        return RUN.get()
    except LookupError:
        made = _installed()
        RUN.set(made)
        return made


def _installed() -> Reactor | None:
    """Put a reactor in the place of the manager of I/O of the run that is under way."""
    core: Any = getattr(trio, "_core", None)
    try:
        runner = core._run.GLOBAL_RUN_CONTEXT.runner
        manager, runnable, inner = runner.io_manager, runner.runq, runner.io_manager._epoll.fileno()
    except AttributeError:
        return None
    if runner.is_guest:
        # Another loop waits there, in a thread.
        return None
    made = Reactor(manager, inner, runnable)
    # No attribute of ours: trio has no public way.
    object.__setattr__(runner, "io_manager", made)
    return made


class Reads(Protocol):
    """Where bytes are received from."""

    def recv_into(self, buffer: memoryview, /) -> Awaitable[int]:
        """Return bytes received; 0 at the end."""
        ...


async def receive_each(sock: Reads, buffer: Callable[[], memoryview | None], received: Callable[[int], bool]) -> bool:
    """Receive into what `buffer` returns and tell `received` how many bytes came (0 at the end), until that returns
    False; then return False. Return True when `buffer` returned None, because something has to be waited for first.

    Both are plain calls, and made outside of any task where there is a reactor and `sock` is a plain socket. Raises
    what they raise, OSError, and `trio.ClosedResourceError`.
    """
    plain = isinstance(sock, trio.socket.SocketType)
    lending = reactor() if plain else None
    if lending is None:
        reads = EagerReads(sock) if isinstance(sock, trio.socket.SocketType) else sock
        while (into := buffer()) is not None:
            if not received(await reads.recv_into(into)):
                return False
        return True
    assert isinstance(sock, trio.socket.SocketType)
    fd = sock.fileno()
    into = buffer()
    waits = into is None

    def ready() -> bool:
        nonlocal into, waits
        assert into is not None
        try:
            count = os.readv(fd, (into,))
        except BlockingIOError:
            return True
        into = None
        if not received(count):
            return False
        into = buffer()
        waits = into is None
        return not waits

    if not waits:
        await lending.serve(fd, ready)
    return waits
