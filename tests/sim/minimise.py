"""Makes a failing seed smaller: fewer verbs, as long as something is still violated. Called by `__main__`.

A verb less changes what is drawn after it, so this finds a small failure of the same seed, not always the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .kinds import VERBS
from .run import Result

TRIES = 60


def minimise(
    fails: Callable[[frozenset[str]], Result], tries: int = TRIES, of: Iterable[str] = VERBS
) -> tuple[frozenset[str], Result | None]:
    """The verbs that are left, and the last failing result. Halves are left out first, then single verbs."""
    kept = sorted(of)
    best: Result | None = None
    size = max(1, len(kept) // 2)
    while size and tries:
        for at in range(0, len(kept), size):
            fewer = kept[:at] + kept[at + size :]
            if not tries:
                break
            tries -= 1
            result = fails(frozenset(fewer))
            if result.violations:
                kept, best = fewer, result
                break
        else:
            size //= 2
    return frozenset(kept), best
