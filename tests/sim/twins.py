"""What the engine uses of trio, on the simulated loop. Built anew for each run: `Trio(loop)` stands for the module.

Differences to trio that matter: a waiting task is woken in the order of the calls, and `to_thread.run_sync` runs its
job in one piece, at its beginning or at its end, while time passes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import trio

from .loop import Cancelled, Crashed, Doomed, Loop, Stop, Task, Timer, may_abort, may_not, park

FOREVER = float("inf")


class Event:
    """As trio's."""

    __slots__ = ("_loop", "_set", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: OrderedDict[Task, None] | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        if self._set:
            return
        self._set = True
        waiting, self._waiting = self._waiting, None
        for task in waiting or ():
            self._loop.wake(task)

    async def wait(self) -> None:
        if self._set:
            await checkpoint(self._loop)
            return
        if self._waiting is None:
            self._waiting = OrderedDict()
        task = self._loop.task
        assert task is not None
        self._waiting[task] = None

        def abort(_: Any) -> None:
            if self._waiting is not None:
                self._waiting.pop(task, None)

        await park(abort)


async def checkpoint(loop: Loop) -> None:
    """Others have their turn; raises `Cancelled` when the task was cancelled."""
    task = loop.task
    assert task is not None
    if task.is_cancelled:
        raise Cancelled
    await shielded_checkpoint(loop)


async def shielded_checkpoint(loop: Loop) -> None:
    """Others have their turn."""
    assert loop.task is not None
    loop.soon(loop.life, loop.step, loop.task, None, None)
    await park(may_not)


async def others_turn(loop: Loop) -> None:
    """Others run, and time passes meanwhile, where trio has a checkpoint and a run without features has none."""
    if loop.turn_s:
        assert loop.task is not None and loop.life is not None
        loop.at(loop.now + loop.turn_s * loop.life.draw.random(), loop.life, loop.step, loop.task, None, None)
        await park(may_not)


class ParkingLot:
    """As trio's."""

    __slots__ = ("_loop", "_parked")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._parked: OrderedDict[Task, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    async def park(self) -> None:
        task = self._loop.task
        assert task is not None
        self._parked[task] = None
        await park(lambda _: self._parked.pop(task, None) and None)

    def unpark(self, *, count: int = 1) -> list[Task]:
        woken: list[Task] = []
        while self._parked and len(woken) < count:
            task, _ = self._parked.popitem(last=False)
            self._loop.wake(task)
            woken.append(task)
        return woken

    def unpark_all(self) -> list[Task]:
        return self.unpark(count=len(self._parked))


class Limiter:
    """A capacity limiter, and with one token a lock: first come, first served."""

    __slots__ = ("_loop", "_free", "_waiting")

    def __init__(self, loop: Loop, tokens: int = 1) -> None:
        self._loop = loop
        self._free = tokens
        self._waiting: OrderedDict[Task, None] = OrderedDict()

    def locked(self) -> bool:
        return not self._free

    @property
    def available_tokens(self) -> int:
        return self._free

    async def acquire(self) -> None:
        task = self._loop.task
        assert task is not None
        if self._free:
            if task.is_cancelled:
                raise Cancelled
            self._free -= 1
            await others_turn(self._loop)
            return
        self._waiting[task] = None
        await park(lambda _: self._waiting.pop(task, None) and None)

    def release(self) -> None:
        if self._waiting:
            task, _ = self._waiting.popitem(last=False)
            self._loop.wake(task)
        else:
            self._free += 1

    async def __aenter__(self) -> Limiter:
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class CancelScope:
    """As trio's; `deadline` by the clock of the node that enters it."""

    __slots__ = (
        "_loop",
        "deadline",
        "shield",
        "cancel_called",
        "cancelled_caught",
        "parent",
        "_task",
        "_life",
        "_timer",
    )

    def __init__(self, loop: Loop, *, deadline: float = FOREVER, shield: bool = False) -> None:
        self._loop = loop
        self.deadline = deadline
        self.shield = shield
        self.cancel_called = False
        self.cancelled_caught = False
        self.parent: Any = None
        self._task: Task | None = None
        self._life: Any = None
        self._timer: Timer | None = None

    def cancel(self) -> None:
        if not self.cancel_called:
            self.cancel_called = True
            if self._life is not None:
                self._loop.recheck(self._life)

    def __enter__(self) -> CancelScope:
        task = self._task = self._loop.task
        assert task is not None
        self._life = life = task.life
        self.parent, task.scope = task.scope, self
        if self.deadline != FOREVER:
            self._timer = self._loop.at(life.when(self.deadline), life, self.cancel)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert self._task is not None
        self._task.scope = self.parent
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, Cancelled) and self.cancel_called:
            self.cancelled_caught = True
            return True
        return False


class Nursery:
    """As trio's: its block ends when all its tasks have; a failing one cancels the others."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.cancel_scope = CancelScope(loop)
        self._children = 0
        self._errors: list[BaseException] = []
        self._parent: Task | None = None
        self._waits = False

    async def __aenter__(self) -> Nursery:
        self.cancel_scope.__enter__()
        self._parent = self._loop.task
        return self

    def start_soon(self, call: Callable[..., Any], *arguments: Any, name: object = None) -> None:
        assert self._parent is not None
        self._children += 1
        self._loop.spawn(self._parent.life, call(*arguments), self._done, self.cancel_scope)

    async def start(self, call: Callable[..., Any], *arguments: Any, name: object = None) -> Any:
        started = Event(self._loop)
        values: list[Any] = []

        def tell(value: Any = None) -> None:
            values.append(value)
            started.set()

        def done(task: Task, result: Any, error: BaseException | None) -> None:
            started.set()
            self._done(task, result, error)

        assert self._parent is not None
        self._children += 1
        coro = call(*arguments, task_status=SimpleNamespace(started=tell))
        self._loop.spawn(self._parent.life, coro, done, self.cancel_scope)
        await started.wait()
        return values[0] if values else None

    def _done(self, task: Task, result: Any, error: BaseException | None) -> None:
        self._children -= 1
        if error is not None and not isinstance(error, Cancelled):
            self._errors.append(error)
            self.cancel_scope.cancel()
        if not self._children and self._waits:
            self._waits = False
            assert self._parent is not None
            self._loop.wake(self._parent)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, GeneratorExit | Crashed):
            return False
        if error is not None:
            if not isinstance(error, Cancelled):
                self._errors.append(error)
            self.cancel_scope.cancel()
        if self._children:
            self._waits = True

            def abort(_: Any) -> bool:
                self.cancel_scope.cancel()
                return False

            await park(abort)
        self.cancel_scope.__exit__(None, None, None)
        if self._errors:
            raise BaseExceptionGroup("tasks of a nursery failed", self._errors)
        assert self._parent is not None
        if self._parent.is_cancelled:
            raise Cancelled
        return isinstance(error, Cancelled)


class Channel:
    """Both ends of a memory channel."""

    def __init__(self, loop: Loop, room: float) -> None:
        self._loop = loop
        self._room = room
        self._items: deque[Any] = deque()
        self._closed = False
        self._readers = ParkingLot(loop)

    def send_nowait(self, item: Any) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        if len(self._items) >= self._room and not len(self._readers):
            raise trio.WouldBlock
        self._items.append(item)
        self._readers.unpark()

    async def receive(self) -> Any:
        while not self._items:
            if self._closed:
                raise trio.EndOfChannel
            await self._readers.park()
        item = self._items.popleft()
        await others_turn(self._loop)
        return item

    def receive_nowait(self) -> Any:
        if not self._items:
            raise trio.WouldBlock
        return self._items.popleft()

    def close(self) -> None:
        self._closed = True
        self._readers.unpark_all()

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Channel:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None


class _OpenChannel:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __getitem__(self, _: object) -> _OpenChannel:
        return self

    def __call__(self, room: float) -> tuple[Channel, Channel]:
        channel = Channel(self._loop, room)
        return channel, channel


Scope: TypeAlias = CancelScope


class Trio:
    """Stands for the module `trio` in the engine's modules while a simulation runs."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.open_memory_channel = _OpenChannel(loop)
        self.to_thread = SimpleNamespace(run_sync=self._in_thread)
        self.from_thread = SimpleNamespace(run=lambda *_: None)
        self.lowlevel = SimpleNamespace(
            Abort=SimpleNamespace(SUCCEEDED=True, FAILED=False),
            ParkingLot=self.ParkingLot,
            checkpoint=lambda: checkpoint(loop),
            cancel_shielded_checkpoint=lambda: shielded_checkpoint(loop),
            current_task=lambda: loop.task,
            wait_task_rescheduled=park,
            reschedule=loop.wake,
            current_trio_token=lambda: SimpleNamespace(run_sync_soon=lambda *call: loop.soon(loop.life, *call)),
        )

    def __getattr__(self, name: str) -> Any:
        # Exceptions, and what is only named in annotations.
        return getattr(trio, name)

    def Event(self) -> Event:
        return Event(self._loop)

    def Lock(self) -> Limiter:
        return Limiter(self._loop)

    def CapacityLimiter(self, tokens: int) -> Limiter:
        return Limiter(self._loop, tokens)

    def ParkingLot(self) -> ParkingLot:
        return ParkingLot(self._loop)

    def CancelScope(self, *, deadline: float = FOREVER, shield: bool = False) -> CancelScope:
        return CancelScope(self._loop, deadline=deadline, shield=shield)

    def open_nursery(self) -> Nursery:
        return Nursery(self._loop)

    def current_time(self) -> float:
        life = self._loop.life
        assert life is not None
        return life.now()

    def move_on_at(self, deadline: float) -> Scope:
        return CancelScope(self._loop, deadline=deadline)

    def move_on_after(self, seconds: float) -> Scope:
        return CancelScope(self._loop, deadline=self.current_time() + seconds)

    async def sleep(self, seconds: float) -> None:
        loop = self._loop
        task, life = loop.task, loop.life
        assert task is not None and life is not None
        timer = loop.at(loop.now + max(0.0, seconds) / life.drift, life, loop.wake, task)
        await park(lambda _: timer.cancel())

    async def sleep_until(self, deadline: float) -> None:
        await self.sleep(deadline - self.current_time())

    async def sleep_forever(self) -> None:
        await park(may_abort)

    async def _in_thread(
        self, call: Callable[..., Any], *arguments: Any, abandon_on_cancel: bool = False, limiter: object = None
    ) -> Any:
        loop = self._loop
        task, life = loop.task, loop.life
        assert task is not None and life is not None
        outcome: list[Any] = [None, None]
        waits = [True]

        def work() -> None:
            try:
                doomed = life.doomed
                if doomed is not None and getattr(call, "__name__", "") == doomed[0]:
                    life.doomed = None
                    life.doom(doomed[1])
                    raise Doomed
                outcome[0] = call(*arguments)
            except (Crashed, Stop):
                raise
            except BaseException as error:
                outcome[1] = error

        def tell() -> None:
            if waits[0]:
                loop.wake(task)

        def both() -> None:
            work()
            tell()

        def abort(_: Any) -> bool | None:
            if not abandon_on_cancel:
                return False
            waits[0] = False
            return None

        delay = life.thread_s * life.draw.random()
        if life.draw.random() < 0.5:
            loop.soon(life, work)
            loop.at(loop.now + delay, life, tell)
        else:
            loop.at(loop.now + delay, life, both)
        await park(abort)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
