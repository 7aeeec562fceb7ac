"""How a storage job may fail: in what it builds, or in the switch to it.

Invariant: building changes nothing that counts, so whatever it raises is counted and named, and the job is done again
after a pause; a file whose job failed `TRIES` times is set aside. A switch (references, counters of what lives) that
was cut short leaves liveness unknown: from then on this process recycles and unlinks nothing, until a restart counts
anew. Neither ends the node. Used by `log.janitor`, `log.compactor` and the payload store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from logyard.protocol.errors import JobFailed

log = logging.getLogger(__name__)

TRIES: Final = 3
PAUSE_S: Final = 1.0
"""Before the second try; doubled for each further one, up to `PAUSE_S_MAX`."""
PAUSE_S_MAX: Final = 60.0


class Jobs:
    """What failed on one node since its start. `frozen`: why nothing is recycled or unlinked, "" while all is well."""

    __slots__ = ("failed", "last", "frozen", "_clock", "_tries")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed = 0
        self.last = ""
        self.frozen = ""
        self._clock = clock
        # By job: how often it failed in a row, and before when it is not tried again.
        self._tries: dict[str, tuple[int, float]] = {}

    def is_due(self, what: str) -> bool:
        """Return whether a job may be tried now."""
        return what not in self._tries or self._tries[what][1] <= self._clock()

    def done(self, what: str) -> None:
        """Forget a job that succeeded, or that nobody wants any more."""
        self._tries.pop(what, None)

    def fail(self, what: str, error: Exception) -> JobFailed:
        """Count what nobody foresaw in what a job builds; return the error to raise in its place."""
        tries = self._tries.get(what, (0, 0.0))[0] + 1
        self._tries[what] = tries, self._clock() + min(PAUSE_S_MAX, PAUSE_S * 2 ** min(tries - 1, 16))
        self.failed += 1
        self.last = f"{what}: {type(error).__name__}: {error}"
        log.error("storage: %s failed by a defect, try %d; nothing is changed", what, tries, exc_info=error)
        return JobFailed(f"{self.last} (try {tries}): everything is where it was")

    def is_hopeless(self, what: str) -> bool:
        """Return whether a job failed so often that it is set aside."""
        return self._tries.get(what, (0, 0.0))[0] >= TRIES

    def freeze(self, what: str, error: Exception) -> JobFailed:
        """Return the error to raise in place of `error`: the switch to what a job built was cut short."""
        self.failed += 1
        self.last = f"the switch of {what}: {type(error).__name__}: {error}"
        self.frozen = self.frozen or self.last
        log.critical("storage: %s: nothing is recycled or unlinked until a restart", self.last, exc_info=error)
        return JobFailed(f"{self.last}: nothing is recycled or unlinked until this node is restarted")

    @contextmanager
    def switching(self, what: str) -> Iterator[None]:
        """Enclose a switch: whatever it raises freezes, and comes out as `JobFailed`."""
        try:
            yield
        except Exception as error:
            raise self.freeze(what, error) from error

    def check(self) -> None:
        """Raise `JobFailed` while nothing may be recycled or unlinked."""
        if self.frozen:
            raise JobFailed(f"{self.frozen}: nothing is recycled or unlinked until this node is restarted")

    def status(self) -> dict[str, Any]:
        """Return what `logyard status` shows; `waiting` are jobs that failed and have not succeeded since."""
        return {"failed": self.failed, "last": self.last, "waiting": sorted(self._tries), "frozen": self.frozen}
