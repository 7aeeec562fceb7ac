"""A real etcd and our gateway, asked the same in lockstep, agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import lockstep
from .servers import ABSENT, reference_binary


@pytest.fixture(scope="module")
def binary() -> Path:
    found = reference_binary()
    if found is None:
        pytest.skip(ABSENT)
    return found


def test_five_hundred_random_requests(binary: Path) -> None:
    found = lockstep.run(binary, 20_261_122, 500)
    assert found.requests == 500 and not found.died
    # What is drawn is not refused all over, and watches saw something.
    assert found.statuses[200] > 250 and found.statuses[400] > 20 and found.events > 20 and found.watches > 5
