"""What the daemon's collector looks at, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from logyard.service import memory

PERIODS = 4 * memory.PERIOD_SECONDS


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collector() -> Iterator[None]:
    """As the daemon begins; as Python has it, afterwards."""
    threshold = gc.get_threshold()
    memory.begin()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def look(nursery: trio.Nursery, count: int) -> tuple[int, bool]:
    """Return how many of `count` new containers count as living long, and whether a knot among them is gone."""
    knot = weakref.ref(Knot())
    held = [[number] for number in range(count)]
    nursery.start_soon(memory.look_after)
    await trio.sleep(PERIODS)
    looked_at = set(map(id, gc.get_objects()))
    return sum(id(one) not in looked_at for one in held), knot() is None


@pytest.mark.usefixtures("collector")
async def test_what_comes_under_load_is_looked_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        living, found = await look(nursery, 2 * memory.MANY)
        nursery.cancel_scope.cancel()
    assert found
    assert living == 2 * memory.MANY


@pytest.mark.usefixtures("collector")
async def test_a_node_with_little_to_do_leaves_it_to_python(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        living, found = await look(nursery, memory.MANY // 10)
        nursery.cancel_scope.cancel()
    # What came lives on where a later collection finds it when it ends in a cycle.
    assert not found
    assert living == 0
