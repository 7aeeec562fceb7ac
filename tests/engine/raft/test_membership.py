"""Configurations: the table of single-server changes, the encoding, and that neighbours always share a quorum."""

from __future__ import annotations

import itertools

import msgpack
import pytest

from logyard.engine.errors import BadRequest, Refused
from logyard.engine.raft.membership import Change, Configuration, apply_change
from logyard.engine.raft.quorum import has_quorum

THREE = Configuration((1, 2, 3), (4,))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (Change("add", 5), Configuration((1, 2, 3, 5), (4,))),
        (Change("add_learner", 5), Configuration((1, 2, 3), (4, 5))),
        (Change("promote", 4), Configuration((1, 2, 3, 4))),
        (Change("remove", 2), Configuration((1, 3), (4,))),
        (Change("remove", 4), Configuration((1, 2, 3))),
    ],
)
def test_changes(change: Change, want: Configuration) -> None:
    assert apply_change(THREE, change) == want


@pytest.mark.parametrize(
    ("configuration", "change", "reason"),
    [
        (THREE, Change("add", 1), "voter already"),
        (THREE, Change("add", 4), "promote it"),
        (THREE, Change("add", 0), "not a node id"),
        (THREE, Change("add", 1 << 32), "not a node id"),
        (THREE, Change("add_learner", 1), "voter already"),
        (THREE, Change("add_learner", 4), "learner already"),
        (THREE, Change("promote", 1), "not a learner"),
        (THREE, Change("remove", 9), "not a member"),
        (Configuration((1,), (2,)), Change("remove", 1), "last voter"),
        (Configuration((1, 2), (), (1, 3)), Change("add", 4), "joint"),
        (Configuration(tuple(range(1, 65))), Change("add", 99), "at most 64"),
        (THREE, Change("swap", 1), "not a membership change"),
    ],
)
def test_refused_changes(configuration: Configuration, change: Change, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        apply_change(configuration, change)


@pytest.mark.parametrize("count", range(1, 6))
def test_quorums_before_and_after_a_single_change_meet(count: int) -> None:
    """Thesis 4.1: the reason why one server at a time needs no joint configuration."""
    before = Configuration(tuple(range(1, count + 1)))
    steps = [Change("add", count + 1)] + [Change("remove", node) for node in before.voters if count > 1]
    for change in steps:
        after = apply_change(before, change)
        nodes = sorted({*before.voters, *after.voters})
        subsets = [
            set(chosen) for size in range(len(nodes) + 1) for chosen in itertools.combinations(nodes, size)
        ]  # fmt: skip
        old = [chosen for chosen in subsets if has_quorum(before, chosen)]
        new = [chosen for chosen in subsets if has_quorum(after, chosen)]
        assert all(a & b for a in old for b in new)


@pytest.mark.parametrize("configuration", [THREE, Configuration(()), Configuration((1, 2), (7,), (1, 3))])
def test_encoding_round_trip(configuration: Configuration) -> None:
    assert Configuration.decode(configuration.encode()) == configuration


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([[1], []]),
        msgpack.packb([[1], [], [], []]),
        msgpack.packb([["one"], [], []]),
        msgpack.packb([[True], [], []]),
        msgpack.packb([[0], [], []]),
        msgpack.packb([[1 << 32], [], []]),
        msgpack.packb([[1, 1], [], []]),
        msgpack.packb([list(range(1, 100)), [], []]),
        Configuration((1, 2, 3)).encode() + b"\x00",
        Configuration((1, 2, 3)).encode()[:-1],
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        Configuration.decode(data)
