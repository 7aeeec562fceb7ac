"""The faces of the matrix: a client, a store, a system of one's own, the command line and the gateway, each of which
does what a row of the table says and tells what came of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import trio
from click.testing import CliRunner

from logyard.client import (
    aio,
    kv,
    kv_sync,
    kv_watch,
    machine,
    machine_sync,
    messages,
    producer,
    queue,
    queue_sync,
    sync,
    sync_log,
)
from logyard.client._async import consumer, topics
from logyard.client._sync import consumer as sync_consumer
from logyard.client._sync import topics as sync_topics
from logyard.client.kvstore import KVStore
from logyard.client.pending import PendingAppend
from logyard.protocol.errors import LogyardError
from logyard.service import embedded
from logyard.service.cli.root import cli
from logyard.service.etcd import app
from logyard.service.etcd.gateway import Gateway

from .arguments import Arguments
from .commands import COMMANDS, PATHS
from .table import INTERNAL, OK, ROWS, Row

HELD = 12
"""Messages that a consumer has before anything happens."""
CLIENT_S = 20.0
LOOK_S = 0.2
PARTS = ("Consumer", "Session", "Producer", "EpochWriter", "Watch")
"""Classes whose verbs need something opened."""
OF_TOPICS = ("Topic", "TopicProducer", "GroupConsumer", "ConsumerGroup")
"""Classes whose verbs need a topic, which is made when the first of them is asked for."""
Job: TypeAlias = tuple[Coroutine[Any, Any, Any], concurrent.futures.Future[Any]]
TRIO: Mapping[str, type] = {
    "Log": aio.Log, "Producer": producer.Producer, "EpochWriter": producer.EpochWriter,
    "KV": kv.KV, "Watch": kv_watch.Watch, "Queue": queue.Queue,
    "Consumer": queue.Consumer, "Session": messages.Session, "Yard": aio.Yard,
    "Machine": machine.Machine,
    "Topic": topics.Topic, "TopicProducer": topics.TopicProducer, "GroupConsumer": consumer.GroupConsumer,
    "ConsumerGroup": consumer.ConsumerGroup,
}  # fmt: skip
SYNC: Mapping[str, type] = {
    "Log": sync_log.Log, "Producer": producer.SyncProducer, "EpochWriter": producer.SyncEpochWriter,
    "KV": kv_sync.KV, "Queue": queue_sync.Queue,
    "Consumer": queue_sync.Consumer, "Yard": sync.Yard, "Machine": machine_sync.Machine,
    "Topic": sync_topics.Topic, "TopicProducer": sync_topics.TopicProducer,
    "GroupConsumer": sync_consumer.GroupConsumer, "ConsumerGroup": sync_consumer.ConsumerGroup,
}  # fmt: skip
EMBEDDED: Mapping[str, type] = {
    **TRIO, "Log": embedded.EmbeddedLog, "KV": embedded.KV, "Queue": embedded.Queue,
    "Yard": embedded.EmbeddedSystem, "Machine": embedded.EmbeddedMachine,
}  # fmt: skip
STORE: Mapping[str, type] = {"KVStore": KVStore}


def verbs(classes: Mapping[str, type]) -> list[str]:
    """Every public method of a face's classes that is for its callers."""
    found = [
        f"{name}.{verb}"
        for name, kind in classes.items()
        for verb in dir(kind)
        if not verb.startswith("_") and inspect.isroutine(inspect.getattr_static(kind, verb))
        and verb not in INTERNAL.get(name, ())
    ]  # fmt: skip
    # In the order of the table, which deletes last.
    order = {row: number for number, row in enumerate(ROWS)}
    return sorted(found, key=lambda one: order.get(one, len(order)))


class Face(Arguments):
    """Of one cluster and situation; `rotate`: its names are of groups of another kind."""

    face = ""
    told_as = property(lambda self: self.face)
    """The name under which the table has what is its own."""
    first_revision = 1
    classes: Mapping[str, type] = {}

    def __init__(self, servers: list[str], size: str, rotate: bool = False) -> None:
        super().__init__(self.face, size)
        self.servers = servers
        self.rotate = rotate
        self.parts: dict[str, Any] = {}
        self.held: list[Any] = []

    def name_of(self, kind: str) -> str:
        """See `Arguments`; of another kind where that is what is tried."""
        other = {"log": "kv", "kv": "queue", "queue": "log", "own": "log"}
        return super().name_of(other[kind] if self.rotate else kind)

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect; nothing is asked yet."""

    async def warm(self, unwatched: bool = False) -> None:
        """Use everything once, so that there is something to find changed. `unwatched`: without a watch."""

    def is_over(self) -> bool:
        """Return whether it knows the end of every session that it holds."""
        held = [self.parts[name] for name in ("Consumer", "Session") if name in self.parts]
        return all(one.failure is not None for one in held)

    async def outcome(self, verb: str) -> str:
        """What comes of a verb."""
        raise NotImplementedError

    def rows(self) -> list[str]:
        """The verbs that it has."""
        return verbs(self.classes)

    def row(self, verb: str) -> Row:
        """What the table says of one."""
        return ROWS[verb]

    def part(self, name: str) -> Any:
        """What was opened, or why it could not be."""
        found = self.parts[name]
        if isinstance(found, LogyardError):
            raise found
        return found

    def message(self) -> Any:
        """One that the consumer holds."""
        assert self.consumer is not None
        return self.held.pop()

    other_node = 2
    """For what any node can do."""

    def follower(self) -> int:
        """A node for a transfer."""
        return 2

    consumer = property(lambda self: self.part("Consumer"))
    session = property(lambda self: self.part("Session"))
    producer = property(lambda self: self.part("Producer"))
    topic = property(lambda self: self.part("Topic"))
    topic_producer = property(lambda self: self.part("TopicProducer"))
    group_consumer = property(lambda self: self.part("GroupConsumer"))
    consumer_group = property(lambda self: self.part("ConsumerGroup"))
    epoch = property(lambda self: self.part("EpochWriter"))
    log = property(lambda self: self.yard.log(self.name_of("log")))
    kv = property(lambda self: self.yard.kv(self.name_of("kv")))
    queue = property(lambda self: self.yard.queue(self.name_of("queue")))
    any_group = property(lambda self: self.yard.machine(self.name_of("log")))
    yard: Any
    store: Any


def outcome_of(error: BaseException) -> str:
    """How a cell tells an error: by its code, or, where it is none of the family, as what it is."""
    return error.code if isinstance(error, LogyardError) else f"{type(error).__name__}: {error}"


class TrioFace(Face):
    """The trio client."""

    face = "trio"
    first_revision = 0
    classes = TRIO

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect; nothing is asked yet."""
        self.stack = stack
        self.yard = await stack.enter_async_context(aio.connect(self.servers, timeout=CLIENT_S))

    async def warm(self, unwatched: bool = False) -> None:
        """Use everything once, so that there is something to find changed."""
        await self.log.append(b"warm")
        await self.log.latest()
        await self.kv.put(b"warm", b"")
        await self.kv.get(b"warm")
        await self.queue.publish(b"warm")
        for name in PARTS[: -1 if unwatched else None]:
            await self.prepare(name)

    async def prepare(self, name: str) -> None:
        """Open what the verbs of a class need."""
        if name in self.parts or name not in (*PARTS, *OF_TOPICS):
            return
        try:
            if name in OF_TOPICS:
                self.parts[name] = await self._of_topics(name)
            elif name == "Consumer":
                consuming = self.queue.consume(prefetch=HELD)
                consumer = await consuming.__aenter__()
                self.stack.push_async_callback(self._leave, consuming)
                with self.within(CLIENT_S):
                    while len(self.held) < HELD - 1:
                        self.held.append(await consumer.__anext__())
                self.parts[name] = consumer
            elif name == "Session":
                self.parts[name] = await self.yard.open_session(self.name_of("log"), kind="log")
            elif name == "Watch":
                watching = self.kv.watch(b"", prefix=True)
                self.parts[name] = await watching.__aenter__()
                self.stack.push_async_callback(self._leave, watching)
                with self.within(CLIENT_S):
                    await self.parts[name].created()
            elif name == "EpochWriter":
                self.parts[name] = await self.log.epoch(f"warm-epoch-{self.name}", 1, 0)
            else:
                self.parts[name] = await self.log.producer(f"warm-{self.name}")
        except LogyardError as error:
            self.parts[name] = error

    async def _of_topics(self, name: str) -> object:
        topic = self.yard.topic(self.topic_name)
        await topic.create(2)
        if name == "Topic":
            return topic
        if name == "TopicProducer":
            return await topic.producer(self.name)
        if name == "GroupConsumer":
            return self.yard.consume(self.topic_name, group=f"reads-{self.name}")
        group = self.yard.consumer_group(f"resets-{self.name}")
        await group.reset(self.topic_name)
        return group

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Under either library."""
        runtime = self.yard.runtime
        with runtime.scope(runtime.now() + seconds) as scope:
            yield
        assert not scope.cancelled_caught, f"not within {seconds} s"

    async def _leave(self, context: Any) -> None:
        with suppress(LogyardError):
            await context.__aexit__(None, None, None)

    async def watched(self) -> object:
        """A watch that was open before sees what is put now."""
        watch = self.part("Watch")
        await watch.created()
        return None

    async def first_message(self) -> None:
        """Whether a session can be listened to: nothing is sent to it."""
        session, runtime = self.session, self.yard.runtime
        with runtime.scope(runtime.now() + LOOK_S):
            async for _ in session.messages():
                pass

    async def outcome(self, verb: str) -> str:
        """What comes of it."""
        await self.prepare(verb.partition(".")[0])
        try:
            with self.within(2 * CLIENT_S):
                await finished(self.row(verb).call(self))
        except Exception as error:
            return outcome_of(error)
        return OK

    def close(self) -> None:
        """As the last thing."""
        self.yard.close()


class AsyncioFace(TrioFace):
    """The same client under asyncio: one task of a loop in a thread of its own does all that it is asked."""

    face = "asyncio"
    told_as = "trio"

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect."""
        self.loop = asyncio.new_event_loop()
        self.jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        thread = threading.Thread(target=self.loop.run_until_complete, args=(self._work(),))
        thread.start()
        stack.callback(self.loop.close)
        stack.push_async_callback(partial(trio.to_thread.run_sync, thread.join))
        stack.callback(self.loop.call_soon_threadsafe, self.jobs.put_nowait, None)
        inner = AsyncExitStack()
        await self._there(super().open(inner))
        stack.push_async_callback(self._there, inner.aclose())

    async def _work(self) -> None:
        while (job := await self.jobs.get()) is not None:
            task, done = job
            try:
                done.set_result(await task)
            except Exception as error:
                done.set_exception(error)

    async def _there(self, task: Coroutine[Any, Any, Any]) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, (task, done))
        return await trio.to_thread.run_sync(done.result)

    async def warm(self, unwatched: bool = False) -> None:
        """See `TrioFace`."""
        await self._there(super().warm(unwatched))

    async def outcome(self, verb: str) -> str:
        """What comes of it."""
        found: str = await self._there(super().outcome(verb))
        return found


async def finished(value: Any) -> None:
    """Wait for what a call of an asynchronous face gave, and take the first of what it goes on to give."""
    if isinstance(value, PendingAppend):
        await value.wait()
        return
    if inspect.isawaitable(value):
        value = await value
    if hasattr(value, "__aenter__"):
        async with value as inner:
            if isinstance(inner, kv_watch.Watch):
                await inner.created()
    elif hasattr(value, "__anext__"):
        with suppress(StopAsyncIteration):
            await value.__anext__()
        await value.aclose()


class SyncFace(Face):
    """The blocking client: in a thread of its own."""

    face = "sync"
    classes = SYNC

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect."""
        self.stack = ExitStack()
        connected = partial(sync.connect_sync, self.servers, timeout=CLIENT_S)
        self.yard = await trio.to_thread.run_sync(connected)
        stack.push_async_callback(trio.to_thread.run_sync, self._end)

    def _end(self) -> None:
        with suppress(LogyardError):
            self.stack.close()
        self.yard.close()

    async def warm(self, unwatched: bool = False) -> None:
        """See `TrioFace`."""
        await trio.to_thread.run_sync(self._warm)

    def _warm(self) -> None:
        self.log.append(b"warm")
        self.log.latest()
        self.kv.put(b"warm", b"")
        self.kv.get(b"warm")
        self.queue.publish(b"warm")
        self.prepare("Consumer")
        self.prepare("Producer")
        self.prepare("EpochWriter")

    def prepare(self, name: str) -> None:
        """See `TrioFace`."""
        if name in self.parts or name not in ("Consumer", "Producer", "EpochWriter", *OF_TOPICS):
            return
        try:
            if name in OF_TOPICS:
                self.parts[name] = self._of_topics(name)
            elif name == "Consumer":
                consumer = self.stack.enter_context(self.queue.consume(prefetch=HELD))
                while len(self.held) < HELD - 1:
                    self.held.append(consumer.get(CLIENT_S))
                self.parts[name] = consumer
            elif name == "EpochWriter":
                self.parts[name] = self.log.epoch(f"warm-epoch-{self.name}", 1, 0)
            else:
                self.parts[name] = self.log.producer(f"warm-{self.name}")
        except LogyardError as error:
            self.parts[name] = error

    def _of_topics(self, name: str) -> object:
        topic = self.yard.topic(self.topic_name)
        topic.create(2)
        if name == "Topic":
            return topic
        if name == "TopicProducer":
            return topic.producer(self.name)
        if name == "GroupConsumer":
            return self.yard.consume(self.topic_name, group=f"reads-{self.name}")
        group = self.yard.consumer_group(f"resets-{self.name}")
        group.reset(self.topic_name)
        return group

    async def outcome(self, verb: str) -> str:
        """What comes of it."""
        return await trio.to_thread.run_sync(self._outcome, verb)

    def _outcome(self, verb: str) -> str:
        self.prepare(verb.partition(".")[0])
        try:
            value = self.row(verb).call(self)
            if verb in ("Consumer.ack", "Consumer.nack", "Consumer.reject"):
                # They are gathered: what becomes of them is told here.
                self.consumer.flush()
            if hasattr(value, "__enter__"):
                with value:
                    pass
            elif hasattr(value, "__next__"):
                next(value, None)
                value.close()
        except Exception as error:
            return outcome_of(error)
        return OK

    def close(self) -> None:
        """As the last thing."""
        # Leaving a consumer says once more what it settled in vain.
        with suppress(LogyardError):
            self.stack.close()
        self.yard.close()


class StoreFace(Face):
    """The small key-value interface, over a KV group."""

    face = "store"
    classes = STORE

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect."""
        self.store = KVStore()
        await trio.to_thread.run_sync(self.connect_store)
        stack.push_async_callback(trio.to_thread.run_sync, self.store.close)

    def connect_store(self) -> None:
        """As a user does."""
        assert self.store.kvconnect("native", servers=self.servers, group=self.name_of("kv"), timeout=CLIENT_S)

    async def warm(self, unwatched: bool = False) -> None:
        """See `TrioFace`."""
        await trio.to_thread.run_sync(self.store.write, b"warm", b"")

    def told(self, answer: object) -> None:
        """The verbs that never raise answer False."""
        if answer is False:
            raise LogyardError("it says that it failed", code="False")

    def store_watch(self) -> None:
        """A watch that sees a change."""
        seen = threading.Event()
        watch = self.store.watch("", lambda key, value: seen.set(), prefix=True)
        watch.close()

    def store_kvwatch(self) -> None:
        """The same, which never raises."""
        watch = self.store.kvwatch("", lambda key, value: None, prefix=True)
        self.told(watch)
        if watch:
            watch.close()

    async def outcome(self, verb: str) -> str:
        """What comes of it."""
        try:
            await trio.to_thread.run_sync(self.row(verb).call, self)
        except Exception as error:
            return outcome_of(error)
        return OK

    def close(self) -> None:
        """As the last thing."""
        self.store.close()


class CliFace(Face):
    """The command line: each verb is a program of its own."""

    face = "cli"

    async def open(self, stack: AsyncExitStack) -> None:
        """Nothing to do."""
        self.wait = str(CLIENT_S)

    def rows(self) -> list[str]:
        """The commands that ask a cluster."""
        return list(COMMANDS)

    def row(self, verb: str) -> Row:
        """What the table says of one."""
        return COMMANDS[verb]

    async def outcome(self, verb: str) -> str:
        """What comes of it."""
        words, text = self.row(verb).call(self)
        more = ["--servers", ",".join(self.servers), "--timeout", self.wait, "--json"]
        run = partial(CliRunner().invoke, cli, [*verb.split(), *more, *words], input=text)
        done = await trio.to_thread.run_sync(run)
        if "Traceback" in done.output:
            return f"a traceback: {done.output}"
        if not done.exit_code:
            return OK
        try:
            found = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return f"exit {done.exit_code}: {done.output}"
        return str(found["error"]["code"]) if "error" in found else f"exit {done.exit_code}"


class GatewayFace(Face):
    """The JSON gateway of etcd v3, without its sockets."""

    face = "gateway"

    async def open(self, stack: AsyncExitStack) -> None:
        """A gateway over a client of its own."""
        self.yard = await stack.enter_async_context(aio.connect(self.servers, timeout=CLIENT_S))
        self.gateway = Gateway(self.kv, self.yard.kv("members"))
        self.app = app.make_app(self.gateway)

    async def warm(self, unwatched: bool = False) -> None:
        """See `TrioFace`."""
        await self.kv.put(b"warm", b"v")

    def rows(self) -> list[str]:
        """Its paths."""
        return list(PATHS)

    def row(self, verb: str) -> Row:
        """What the table says of one."""
        return PATHS[verb]

    async def outcome(self, verb: str) -> str:
        """ "ok", or the code of the status (3: invalid argument ...)."""
        fields = self.row(verb).call(self)
        body, sent = json.dumps(fields).encode(), bytearray()
        answered = trio.Event()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if asked:
                return asked.pop()
            # A client that has its answer, or the first message of it, goes.
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.extend(message.get("body", b""))
            if sent:
                answered.set()

        scope = {
            "type": "http", "method": "POST", "path": f"/v3{verb}", "raw_path": f"/v3{verb}".encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "server": ("127.0.0.1", 1),
            "client": ("127.0.0.1", 2),
        }  # fmt: skip
        try:
            with trio.fail_after(2 * CLIENT_S):
                await self.app(scope, receive, send)
            found = json.loads(bytes(sent).splitlines()[0])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        failed = found.get("error", found if "code" in found and "message" in found else None)
        if isinstance(failed, dict):
            return str(failed.get("code", failed.get("grpc_code")))
        return str(found["code"]) if failed else OK


class EmbeddedFace(TrioFace):
    """A system of one's own process, with the same verbs; its situations are its own."""

    face = "embedded"
    told_as = "embedded"
    classes = EMBEDDED
    other_node = 1

    def follower(self) -> int:
        """There is no other node."""
        return 1


FACES: tuple[Callable[..., Face], ...] = (TrioFace, AsyncioFace, SyncFace, StoreFace, CliFace, GatewayFace)
