"""What a solver says of one key's history."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """`valid` is None where the budget did not suffice; `reason` is empty for a valid history."""

    valid: bool | None
    reason: str = ""


VALID = Verdict(True)
CONFIGURATIONS_MAX = 200_000
"""How many configurations a search may visit: some ten seconds."""
