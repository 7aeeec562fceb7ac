"""Numbers of rows by key: a table that is always what a dictionary would be."""

from __future__ import annotations

import random

import pytest

from logyard.machines.catalog.index import Index


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_a_dictionary_would_be(seed: int) -> None:
    draw = random.Random(seed)
    keys: dict[int, str | int] = {}
    index, model = Index(keys.__getitem__, lambda key: key), dict[str | int, int]()
    for number in range(1, 6000):
        if model and draw.random() < 0.45:
            key, old = draw.choice(list(model.items()))
            index.discard(key, old)
            del model[key], keys[old]
        else:
            key = number if draw.random() < 0.5 else f"log-{number}"
            keys[number], model[key] = key, number
            index.add(key, number)
        if number % 500 == 0:
            assert {key: index.get(key) for key in model} == model
    assert len(index) == len(model) and {key: index.get(key) for key in model} == model
    assert all(key in index for key in model) and "nobody" not in index and index.find(-1) is None
    assert all(index.find(key) == (number, key) for key, number in model.items())


def test_keys_of_one_hash_are_told_apart_and_leave_no_hole() -> None:
    """Numbers apart by 2**61 - 1 have the hash of one another."""
    apart = (1 << 61) - 1
    keys: dict[int, str | int] = {number: 7 + number * apart for number in range(1, 9)}
    index = Index(keys.__getitem__, lambda key: key)
    for number, key in keys.items():
        index.add(key, number)
    index.discard(keys[3], 3)
    index.discard(keys[3], 3)
    assert [index.get(keys[number]) for number in keys] == [1, 2, None, 4, 5, 6, 7, 8] and len(index) == 7
