"""How fast copying may go: from the foreground's rate, never when much is owed."""

from __future__ import annotations

import pytest

from logyard.engine.config import MIB, SystemConfig
from logyard.engine.disk.rate_limiter import FORGET_S, RateLimiter
from logyard.service.writer.jobs import PAUSE_S_MIN, Pacer

CONFIG = SystemConfig(migrate_bytes_s_min=10 * MIB, migrate_rate_ratio=2.0, migrate_debt_bytes_max=100 * MIB)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rate_mib", "debt_mib", "backlog", "want_mib"),
    [(0, 0, 0, 10), (3, 0, 0, 10), (40, 0, 0, 80), (40, 50, 1, 80), (40, 51, 0, 0), (0, 51, 0, 0), (40, 0, 2, 0)],
)
def test_the_limit(rate_mib: int, debt_mib: int, backlog: int, want_mib: int) -> None:
    pace = RateLimiter(CONFIG, Clock())
    pace.rate = rate_mib * MIB
    assert pace.limit(debt_mib * MIB, backlog) == want_mib * MIB


def test_the_rate_is_an_average_that_forgets() -> None:
    clock = Clock()
    pace = RateLimiter(CONFIG, clock)
    total = 0
    for _ in range(60):
        clock.now += FORGET_S / 10
        total += 5 * MIB
        pace.sample(total)
    assert pace.rate == pytest.approx(5 * MIB / (FORGET_S / 10), rel=0.01)
    pace.sample(total * 2)
    clock.now += FORGET_S
    pace.sample(total)
    assert pace.rate == 0


def test_a_job_keeps_to_its_bytes_a_second() -> None:
    clock = Clock()

    def wait(seconds: float) -> None:
        assert seconds >= PAUSE_S_MIN
        clock.now += seconds

    pacer = Pacer(MIB, wait, clock)
    begun = clock.now
    for size in (0, MIB, MIB // 2, MIB // 2, 10, 3 * MIB):
        pacer("after commit", size)
    assert clock.now - begun == pytest.approx(5, rel=0.01)
    # Slow anyway: no pause, and no credit that is used up at once is lost either.
    clock.now += 100
    before = clock.now
    pacer("after commit", 50 * MIB)
    assert clock.now == before
    free = Pacer(0, wait, clock)
    free("after commit", 1 << 50)
    assert clock.now == before
