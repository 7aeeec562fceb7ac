"""Compaction by itself, as etcd's flags ask for it: by age, or by number of revisions. Used by `launcher`."""

from __future__ import annotations

import logging
from collections import deque

import trio

from logyard.protocol.errors import LogyardError

from .gateway import Gateway
from .leases import revision_of

REVISIONS_EVERY_S = 300.0
STEPS = 10
"""Looks in the time that is kept: history is up to a tenth older than asked for."""

log = logging.getLogger("logyard.etcd")


async def keep_compacted(gateway: Gateway, retention: float, by_revision: bool) -> None:
    """Keep `retention` seconds of history, or as many revisions: a task. All gateways of a cluster may do it."""
    every = REVISIONS_EVERY_S if by_revision else max(0.1, retention / STEPS)
    seen: deque[int] = deque()
    while True:
        await trio.sleep(every)
        try:
            revision = await revision_of(gateway)
            if by_revision:
                target = revision - int(retention)
            else:
                seen.append(revision)
                target = seen.popleft() if len(seen) > STEPS else 0
            if target > 0:
                await gateway.kv.compact(target)
                log.info("compacted up to revision %d", target)
        except LogyardError as error:
            # Another one did it, or nobody can now: there is a next time.
            log.debug("not compacted: %s", error)
