"""Locks of the gateway whose client goes, or whose group can't be asked, at the last step of the wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.client import kv_requests
from logyard.client.kv_requests import Question
from logyard.protocol.errors import Unknown
from logyard.protocol.kv import GRANT
from logyard.service.etcd import locks
from logyard.service.etcd.gateway import Gateway

from ..kv.test_verbs import served


class Stuck(Gateway):
    """A gateway that asks for one key alone (which a lock does last) only to wait for ever, or to fail."""

    asked: trio.Event
    fails: bool

    async def run(self, steps: Any, **how: Any) -> Any:
        first = next(steps)
        if isinstance(first, Question) and b"door/" in first.data and b"door0" not in first.data:
            self.asked.set()
            if self.fails:
                raise Unknown("a test")
            await trio.sleep_forever()

        def again() -> Any:
            answer = yield first
            while True:
                try:
                    answer = yield steps.send(answer)
                except StopIteration as stop:
                    return stop.value

        return await super().run(again(), **how)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_lock_that_nobody_is_told_of_is_given_back(tmp_path: Path, fails: bool) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        gateway = Stuck(kv, kv)
        gateway.asked, gateway.fails = trio.Event(), fails
        lease = (await kv.run(kv_requests.numbers(GRANT, 60_000, 7)))[1]
        asked = locks.LOCK.read({"name": "ZG9vcg==", "lease": str(lease)})
        async with trio.open_nursery() as nursery:

            async def lock() -> None:
                with pytest.raises(Unknown) if fails else trio.CancelScope():
                    await locks.lock(gateway, asked)

            nursery.start_soon(lock)
            with trio.fail_after(20):
                await gateway.asked.wait()
            if not fails:
                nursery.cancel_scope.cancel()
        assert (await kv.range(b"door/", prefix=True)).kvs == ()
