"""Cases: a story, a seed, one fault at one step. All of a story's, some of them, and how they are told by many
processes. Used by `__main__`, `planted` and the tests."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, Self

from .stories import STORIES, Told, told
from .yard import Fault

KINDS = ("kill", "power", "stop")
"""What may happen to a process."""
AFTER_S = (0.5, 2.0, 8.0)
"""How long a dead process is away: shorter than its silence is noticed, and longer."""
LONG = 20
"""Cases of a story that takes long."""
CHECKED = 7
"""One case of so many ends with `logyard check` of all directories."""


class Case(NamedTuple):
    """One. `again`: who asked goes on asking."""

    story: str
    seed: int
    fault: Fault
    again: bool

    def __str__(self) -> str:
        kind, node, step, after = self.fault
        return f"{self.story}:{self.seed}:{kind}:{node}:{step}:{after:g}:{'again' if self.again else 'once'}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Return a case by its name."""
        story, seed, kind, node, step, after, again = text.split(":")
        return cls(story, int(seed), Fault(kind, int(node), int(step), float(after)), again == "again")


def cases_of(story: str, seed: int, every: int = 1) -> list[Case]:
    """Return the cases of a story: what may happen at each step of each node, and of the network (0). Of every N one is
    drawn."""
    plain = told(story, seed)
    assert not plain.wrong, f"{story} without any fault: {plain.wrong}"
    draw = random.Random(f"{story} {seed}")
    found = [
        Case(story, seed, Fault(kind, node, step, draw.choice(AFTER_S)), draw.random() < 0.5)
        for node, count in sorted(plain.counts.items())
        for step in range(1, count + 1)
        for kind in (KINDS if node else ("lose",))
    ]
    wanted = len(found) if STORIES[story].faults else min(LONG, len(found))
    return found if wanted == len(found) and every == 1 else draw.sample(found, max(1, wanted // every))


def tell(case: Case) -> Told:
    """Tell one."""
    return told(case.story, case.seed, case.fault, case.again, check=case.fault.step % CHECKED == 0)


def tell_all(cases: Sequence[Case], workers: int = 0) -> Iterator[tuple[Case, Told]]:
    """Tell all, in their order."""
    if workers == 1 or len(cases) < 2:
        yield from ((case, tell(case)) for case in cases)
        return
    with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        yield from zip(cases, pool.map(tell, cases, chunksize=4), strict=True)
