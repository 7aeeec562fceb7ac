"""What a floor says to those above it: bound once, before it is said; what is forgotten is named."""

from __future__ import annotations

import pytest

from logyard.engine.upcall import Upcall, Upcalls


class Above(Upcalls):
    def __init__(self) -> None:
        self.told = Upcall[[int, str], None]()
        self.asked = Upcall[[int], bool]()
        self.other = "no upcall"


def test_a_call_goes_to_whoever_was_bound() -> None:
    above, heard = Above(), []
    passed = above.told
    above.told.bind(lambda number, text: heard.append((number, text)))
    above.asked.bind(lambda number: number == 3)
    passed(1, "a part was given it before")
    assert heard == [(1, "a part was given it before")] and above.asked(3) and not above.asked(4)


def test_what_nobody_hears_is_named_and_not_made() -> None:
    above = Above()
    assert above.unbound() == ["asked", "told"]
    with pytest.raises(AssertionError, match="nobody hears it yet"):
        above.asked(1)
    above.asked.bind(lambda number: True)
    assert above.unbound() == ["told"] and above.asked.is_bound


def test_nobody_is_bound_in_place_of_another() -> None:
    above = Above()
    above.asked.bind(lambda number: True)
    with pytest.raises(AssertionError, match="somebody hears it already"):
        above.asked.bind(lambda number: False)
