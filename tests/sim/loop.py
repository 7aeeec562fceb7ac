"""An event loop with simulated time that runs the engine's coroutines: what stands in trio's place.

Invariants: one event runs at a time and to its end; the order of events depends on the calls and the seed alone; an
event of a dead process never runs, one of a stopped process waits until it goes on. `twins` builds trio's face on
this; `cluster` makes the processes.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any

Abort = Callable[[Any], Any]


STILL = 50_000
"""So many events without time passing are a circle."""


class Crashed(BaseException):
    """The process that runs this is dead: nothing it does from here on reaches anything."""


class Stop(BaseException):
    """The run ends here: nobody on the way may take it for an error of theirs."""


class Doomed(MemoryError):
    """A job of a thread was ended from outside."""


class Cancelled(BaseException):
    """A cancel scope around the running task was cancelled."""


class Timer:
    """One event. `call` is None once it was cancelled."""

    __slots__ = ("life", "call", "arguments")

    def __init__(self, life: Life | None, call: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
        self.life = life
        self.call = call
        self.arguments = arguments

    def cancel(self) -> None:
        """It does not happen."""
        self.call = None


class Life:
    """One process of a node: from a start to its end. Its clocks may run wrong; `drift` is their rate."""

    def __init__(self, loop: Loop, node: int, draw: random.Random, drift: float = 1.0, offset: float = 100.0) -> None:
        self.loop = loop
        self.node = node
        self.draw = draw
        self.drift = drift
        self.alive = True
        self.paused_until = 0.0
        # Tasks in the order they were begun.
        self.tasks: dict[Task, None] = {}
        self.thread_s = 0.0
        # While a job of a thread runs, its clock is behind by what the job takes, until it syncs.
        self.shift = 0.0
        self.wall_jump_ns = 0
        # (name of a function, kind): the next job of a thread that is it ends by `Doomed`.
        self.doomed: tuple[str, str] | None = None
        self.doom: Callable[[str], None] = lambda kind: None
        self._base = loop.now
        self._offset = offset

    def now(self) -> float:
        """The node's monotonic clock, in seconds."""
        return (self.loop.now - self._base) * self.drift + self._offset

    def when(self, local: float) -> float:
        """The loop's time at which this node's clock says `local`."""
        return self.loop.now + max(0.0, local - self.now()) / self.drift

    def end(self) -> None:
        """The process is no more; its coroutines are closed, which nobody outside can notice."""
        if not self.alive:
            return
        self.alive = False
        before, self.loop.life = self.loop.life, self
        for task in list(self.tasks):
            self.loop.task = task
            try:
                task.coro.close()
            except (Crashed, RuntimeError):
                continue
            except BaseException as error:
                # A clean-up that meets the end of its own world.
                self.loop.closed_by.append(error)
        self.tasks.clear()
        self.loop.task = None
        self.loop.life = before


class Task:
    """A coroutine under way. `abort` is what is asked when it is cancelled while it waits; None while it does not."""

    __slots__ = ("coro", "life", "scope", "abort", "done")

    def __init__(self, coro: Coroutine[Any, Any, Any], life: Life, scope: Any, done: Callable[..., None]) -> None:
        self.coro = coro
        self.life = life
        self.scope = scope
        self.abort: Abort | None = None
        self.done = done

    @property
    def is_cancelled(self) -> bool:
        """Whether its next wait ends by `Cancelled`."""
        scope = self.scope
        while scope is not None:
            if scope.cancel_called:
                return True
            if scope.shield:
                return False
            scope = scope.parent
        return False


class Loop:
    """Events by time, then by the order they were made in. `on_event(life)` is called after each."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.life: Life | None = None
        self.task: Task | None = None
        self.on_event: Callable[[Life | None], None] = lambda life: None
        self.on_crash: Callable[[Life], None] = lambda life: None
        # A storage job failed by a defect, which the engine counts and goes on.
        self.on_defect: Callable[[str, BaseException], None] = lambda what, error: None
        self.on_still: Callable[[], None] = lambda: None
        self.closed_by: list[BaseException] = []
        # How long others run, at most, where trio lets them: when a lock is taken that is free. 0: not at all.
        self.turn_s = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._ready: deque[Timer] = deque()
        self._sequence = 0

    def at(self, when: float, life: Life | None, call: Callable[..., Any], *arguments: Any) -> Timer:
        """Call at a time of the loop, as that life."""
        timer = Timer(life, call, arguments)
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, timer))
        return timer

    def soon(self, life: Life | None, call: Callable[..., Any], *arguments: Any) -> Timer:
        """Call next, without time passing."""
        timer = Timer(life, call, arguments)
        self._ready.append(timer)
        return timer

    def run(self, until: float) -> None:
        """Let everything up to a time happen."""
        ready, heap = self._ready, self._heap
        last, begun = self.now, self.events
        while True:
            if self.now != last:
                last, begun = self.now, self.events
            elif self.events - begun > STILL:
                self.on_still()
            if ready:
                timer = ready.popleft()
            elif heap and heap[0][0] <= until:
                when, _, timer = heapq.heappop(heap)
                if when > self.now:
                    self.now = when
            else:
                break
            call = timer.call
            if call is None:
                continue
            life = timer.life
            if life is not None:
                if not life.alive:
                    continue
                if life.paused_until > self.now:
                    self._sequence += 1
                    heapq.heappush(heap, (life.paused_until, self._sequence, timer))
                    continue
            self.perform(life, call, timer.arguments)
        self.now = max(self.now, until)

    def perform(self, life: Life | None, call: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
        """One event, and what is looked at after each."""
        self.events += 1
        self.life = life
        try:
            return call(*arguments)
        except Crashed:
            assert life is not None
            self.on_crash(life)
        finally:
            self.life = None
            self.task = None
            self.on_event(life)

    # Tasks

    def spawn(self, life: Life, coro: Coroutine[Any, Any, Any], done: Callable[..., None], scope: Any = None) -> Task:
        """Begin a coroutine; `done(task, result, error)` is called at its end."""
        task = Task(coro, life, scope, done)
        life.tasks[task] = None
        self.soon(life, self.step, task, None, None)
        return task

    def wake(self, task: Task, value: Any = None) -> None:
        """A task that waits goes on."""
        assert task.abort is not None, "woken twice"
        task.abort = None
        self.soon(task.life, self.step, task, value, None)

    def recheck(self, life: Life) -> None:
        """A scope was cancelled: whoever waits inside hears of it."""
        for task in list(life.tasks):
            if task.abort is not None and task.is_cancelled:
                self._deliver(task)

    def _deliver(self, task: Task) -> None:
        assert task.abort is not None
        if task.abort(None) is not False:
            task.abort = None
            self.soon(task.life, self.step, task, None, Cancelled())

    def step(self, task: Task, value: Any, error: BaseException | None) -> None:
        """Let a task run to its next wait."""
        self.task = task
        task.abort = None
        try:
            abort = task.coro.send(value) if error is None else task.coro.throw(error)
        except StopIteration as stop:
            self._finish(task, stop.value, None)
        except (Crashed, Stop):
            raise
        except BaseException as failure:
            self._finish(task, None, failure)
        else:
            task.abort = abort
            if task.is_cancelled:
                self._deliver(task)
        finally:
            self.task = None

    def _finish(self, task: Task, result: Any, error: BaseException | None) -> None:
        task.life.tasks.pop(task, None)
        task.done(task, result, error)


@coroutine
def park(abort: Abort) -> Generator[Abort, Any, Any]:
    """Wait until somebody calls `Loop.wake`. `abort(None)` says False when the wait can't be cancelled."""
    return (yield abort)


def may_abort(_: Any) -> None:
    """A wait that may be cancelled at any time."""


def may_not(_: Any) -> bool:
    """A wait that may not."""
    return False
