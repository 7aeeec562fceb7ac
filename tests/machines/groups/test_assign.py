"""Who is to read what: sticky, even, by zone, the same everywhere."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from logyard.machines.groups.assign import Place, Reader, assign
from logyard.protocol.groups import Key


def places(count: int, owners: dict[int, int] | None = None, zones: str = "") -> dict[Key, Place]:
    return {
        (1, number): Place((owners or {}).get(number, 0), zones[number % len(zones)] if zones else "")
        for number in range(count)
    }


def test_a_second_member_gets_half_and_the_first_keeps_the_rest() -> None:
    readers = {1: Reader("", (1,)), 2: Reader("", (1,))}
    found = assign(readers, places(6, dict.fromkeys(range(6), 1)))
    assert sorted(found.values()) == [1, 1, 1, 2, 2, 2]
    again = assign(readers, places(6, {key[1]: owner for key, owner in found.items()}))
    assert again == found, "what is even stays"


def test_a_members_partitions_go_to_the_others_and_nothing_else_moves() -> None:
    owners = {0: 1, 1: 2, 2: 3, 3: 1, 4: 2, 5: 3}
    found = assign({1: Reader("", (1,)), 3: Reader("", (1,))}, places(6, owners))
    assert {key[1]: owner for key, owner in found.items() if owners[key[1]] != 2} == {0: 1, 2: 3, 3: 1, 5: 3}
    assert sorted(found.values()) == [1, 1, 1, 3, 3, 3]


def test_partitions_are_read_in_their_zone_where_that_is_even() -> None:
    readers = {1: Reader("x", (1,)), 2: Reader("y", (1,))}
    found = assign(readers, places(8, zones="xy"))
    assert all(("xy"[key[1] % 2] == "x") == (owner == 1) for key, owner in found.items())
    # A third one in y takes what lies in y, of whoever has most.
    found = assign({**readers, 3: Reader("y", (1,))}, places(8, dict.fromkeys(range(8), 1), "xy"))
    assert all(key[1] % 2 for key, owner in found.items() if owner == 3)


def test_members_get_only_what_they_read() -> None:
    readers = {1: Reader("", (1, 2)), 2: Reader("", (2,))}
    some = {(topic, number): Place(0, "") for topic in (1, 2, 3) for number in range(4)}
    found = assign(readers, some)
    assert {key for key, owner in found.items() if owner == 2} <= {(2, number) for number in range(4)}
    assert {key[0] for key in found} == {1, 2} and sorted(found.values()) == [1] * 4 + [2] * 4


@given(st.integers(0, 1 << 32))
def test_every_assignment_is_whole_even_and_sticky(seed: int) -> None:
    chance = random.Random(seed)
    readers = {
        number: Reader(chance.choice(["", "x", "y"]), (1,))
        for number in chance.sample(range(1, 30), chance.randint(1, 9))
    }
    count = chance.randint(1, 40)
    owners = {number: chance.choice([0, *readers, 99]) for number in range(count)}
    some = places(count, owners, chance.choice(["", "xy"]))
    found = assign(readers, some)
    assert found.keys() == some.keys() and set(found.values()) <= readers.keys()
    loads = [sum(owner == one for owner in found.values()) for one in readers]
    assert max(loads) - min(loads) <= 1
    stayed = sum(found[key] == place.owner for key, place in some.items())
    quota, rest = divmod(count, len(readers))
    had = sorted((sum(place.owner == one for place in some.values()) for one in readers), reverse=True)
    most = sum(min(one, quota + (at < rest)) for at, one in enumerate(had))
    assert stayed == most, f"{most} could have stayed, {stayed} did"
