"""What was opened before a fork does nothing behind it, and says so: nothing is numbered or sent there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import trio

from logyard.client.fork import HERE
from logyard.client.queue_sync import Consumer
from logyard.protocol.errors import BadRequest
from logyard.protocol.queue import Message

from .fake_system import fake_cluster
from .test_queue_sync import Yard

COMMON = """
import asyncio, json, os, sys, traceback
from logyard.client.aio import connect
from logyard.client.sync import connect_sync
from logyard.protocol.errors import BadRequest

def refused(*verbs):
    said = []
    for verb, *arguments in verbs:
        try:
            said.append(repr(verb(*arguments)))
        except BadRequest as error:
            said.append(str(error))
    print(json.dumps([os.getppid(), said]), flush=True)
"""
BLOCKING = """
with connect_sync(sys.argv[1:]) as yard:
    log, queue = yard.log("log"), yard.queue("q")
    log.append(b"parent", b"0")
    (session,) = yard._sessions.values()
    number = session._numbers.session
    child = os.fork()
    if not child:
        try:
            # As if another thread had been at it.
            yard._lock.acquire()
            refused(
                (log.append, b"child", b"1"), (log.append, b"child", b"1" * 2000), (yard.log("other").append, b"child"),
                (log.append_many, [(b"child", b"1")]), (log.latest,), (yard.list,), (yard.nodes,),
                (queue.publish, b"child"), (queue.consume().__enter__,), (yard.command, "log", []),
                (yard.listen, "log", 1, None, None),
            )
            idle = [one for those in yard._idle.values() for one in those]
            yard.close()
            os._exit(0 if idle and all(one._socket.fileno() < 0 for one in idle) else 2)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert log.append(b"parent", b"1") == 1 and session._numbers.session == number
"""
ASYNCHRONOUS = """
async def main():
    async with connect(sys.argv[1:]) as yard:
        log, queue, kv, machine = yard.log("log"), yard.queue("q"), yard.kv("kv"), yard.machine("log")
        await log.append(b"parent", b"0")
        child = os.fork()
        if not child:
            try:
                verbs = (
                    log.append(b"child"), log.append_many([(b"child", None)]), log.latest(), queue.publish(b"child"),
                    kv.put(b"child", b"1"), machine.command(b"child"), yard.open_session("log"), yard.list(),
                )
                refused(
                    (log.append_nowait, b"child"), (queue.publish_nowait, b"child"), (yard.log, "other"),
                    *((verb.send, None) for verb in verbs),
                )
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert await log.append(b"parent", b"1") == 1

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [BLOCKING, ASYNCHRONOUS], ids=["blocking", "asynchronous"])
async def test_a_yard_is_of_the_process_that_opened_it(program: str) -> None:
    async with fake_cluster() as cluster:
        log = cluster.create("log", [1, 2, 3], 1)
        command = [sys.executable, "-W", "ignore", "-c", COMMON + program, *cluster.addresses.values()]
        with trio.fail_after(60):
            done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
        assert not done.returncode, done.stdout.decode()
        parent, said = json.loads(done.stdout)
        text = f"this yard was opened in process {parent}; open one in each process (after the fork)"
        assert said == [text] * 11
        assert [head for head, _ in log.records] == [b"parent"] * 2


def test_a_consumer_is_of_the_process_that_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    yard: Any = Yard(9)
    consumer = Consumer(yard, "q", 256, 1 << 20)
    one = Message(1, 1, b"", b"", 0, 0, "")
    with monkeypatch.context() as patch:
        patch.setattr(HERE, "pid", HERE.pid + 1)
        # As if another thread had been at it.
        patch.setattr(consumer, "_changed", None)
        for verb in (
            lambda: consumer.get(0.0), lambda: next(iter(consumer)), lambda: consumer.ack(one), consumer.flush,
            lambda: consumer.nack(one), lambda: consumer.extend(one), lambda: consumer.credit(1),
        ):  # fmt: skip
            with pytest.raises(BadRequest, match="after the fork"):
                verb()
        consumer.close()
    assert consumer.closed and not yard.settled and not yard.ended.is_set()
