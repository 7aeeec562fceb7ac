"""Where a group is, from the answers of several nodes."""

from __future__ import annotations

import pytest

from logyard.client.admin import located
from logyard.protocol.errors import Busy, UnknownGroup


def test_the_leader_itself_is_believed_before_a_removed_member() -> None:
    answers = {1: [["orders", 7, 2, [1, 2, 3]]], 2: [["orders", 7, 2, [2, 3]]], 3: [["orders", 7, 0, [2, 3]]]}
    assert located(answers, "orders") == {"name": "orders", "uid": 7, "leader": 2, "members": [2, 3]}


def test_a_member_that_knows_a_leader_is_believed_before_one_that_knows_none() -> None:
    answers = {1: [["orders", 7, 0, [1, 2, 3]]], 3: [["orders", 7, 2, [2, 3]]]}
    assert located(answers, "orders")["leader"] == 2


def test_a_group_that_nobody_has_is_unknown() -> None:
    with pytest.raises(UnknownGroup):
        located({1: [], 2: []}, "orders")


def test_a_group_is_not_unknown_while_a_node_that_may_have_it_does_not_answer() -> None:
    with pytest.raises(Busy):
        located({1: Busy("the node", 1.0), 2: [], 3: []}, "orders")
