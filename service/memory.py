"""The daemon's memory: what the collector looks at, and what the system gets back.

A full collection costs about 0.2 us an object, and a group that is awake has some forty: over 100,000 groups that is a
second in which the loop does nothing. So what lives long is kept out of collections (`gc.freeze`). Objects of ours that
end are freed by their counts, frozen or not; cycles that are frozen when they end are found when groups have gone to
sleep and little is left to look at. Called by `daemon` and, through hooks of `System`, by the engine.
"""

from __future__ import annotations

import ctypes
import gc
import struct

import trio

ALLOCATIONS = 50_000
"""New containers between two collections of the youngest (Python's default: 700). What comes under load is mostly
entries that live until their segment is written: looking at them 70 times a megabyte finds nothing."""
YOUNGEST = 2
"""Collections of the youngest between two of the middle generation: that one is a pause of 20 to 60 ms then,
and on a busy machine of up to 160."""
MIDDLE = 1000
PERIOD_SECONDS = 0.25
MANY = 5_000
"""New containers from which on a node is under load: 2 to 8 ms to look at, up to 26 on a busy machine."""


def begin() -> None:
    """Count everything alive now as living long."""
    gc.set_threshold(ALLOCATIONS, YOUNGEST, MIDDLE)
    gc.collect()
    gc.freeze()


async def look_after() -> None:
    """Under load, look at what is new while that is little, and only once: most of it lives until its segment is
    written, and looked at again with all that came since it holds the loop for a tenth of a second. With less to do
    than that, collections are Python's own."""
    while True:
        await trio.sleep(PERIOD_SECONDS)
        if gc.get_count()[0] >= MANY:
            gc.collect(0)
            gc.freeze()


def grown() -> None:
    """Count many objects that came as living long."""
    gc.freeze()


def shrunk() -> None:
    """Collect what cycles kept, as most of what there was has ended, and give free memory back to the system.

    The interpreter gives back whole arenas of 1 MiB only, so a handful of cached objects made while there was much
    keeps as many of them.
    """
    getattr(struct, "_clearcache", _nothing)()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim()


def trim() -> None:
    """Give free memory of the C library back, which keeps what it was given back, in the middle of its heap above all.
    Only glibc has this call."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def _nothing() -> None:
    """Do nothing: another interpreter's module may have no such cache."""
