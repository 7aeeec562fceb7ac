"""The table of hibernating groups: sums that do not depend on the order, rows that come back as they went in."""

from __future__ import annotations

import random

from logyard.engine.quiesce.quiesced_table import LED, QuiescedTable, Row, Shape, bucket, mark, quorum_lives, row_fresh
from logyard.engine.types import Spec

SHAPE = Shape((1, 2, 3), (), (2, 3), (), "log")


def row(term: int = 1, leader: int = 1, shape: Shape = SHAPE) -> Row:
    return Row(term, 7, 0, 2, 5, leader, 100, shape)


def test_a_leaders_sums_are_those_of_its_followers_whatever_the_order() -> None:
    draw = random.Random(1)
    leader, follower = QuiescedTable(1), QuiescedTable(2)
    groups = {draw.getrandbits(64) | 1: draw.randint(1, 9) for _ in range(300)}
    for table in (leader, follower):
        order = list(groups)
        draw.shuffle(order)
        for uid in order:
            table.add(uid, row(groups[uid]))
    assert leader.led_with[2] == leader.led_with[3] == follower.under[1] != 0
    assert leader.parts(1, 2) == follower.parts(1, 2) and (leader.led, follower.led) == (300, 0)
    gone = next(iter(groups))
    assert follower.pop(gone) == row(groups[gone]) and follower.pop(gone) is None
    assert (leader.led_with[2] - follower.under[1]) % (1 << 64) == mark(gone, groups[gone])
    differ = {number for number in leader.parts(1, 2) if leader.parts(1, 2)[number] != follower.parts(1, 2).get(number)}
    assert differ == {bucket(gone)}
    follower.add(gone, row(groups[gone] + 1))
    assert leader.led_with[2] != follower.under[1], "another term is another group"


def test_a_group_without_a_leader_is_in_no_sum() -> None:
    table = QuiescedTable(2)
    table.add(9, row())
    table.follow(9, 0)
    assert table.under[1] == 0 and table.row(9).leader == 0 and 9 in table
    table.follow(9, 3)
    assert (table.under[3], table.entries, table.bytes) == (mark(9, 1), 7, 100)
    assert list(table.between(3, 2)) == [(9, row(leader=3))]


def test_a_quorum_is_one_of_voters() -> None:
    assert quorum_lives(SHAPE, {1, 3}) and not quorum_lives(SHAPE, {3, 4, 5})


def test_a_walk_meets_nobody_who_went_before_its_turn() -> None:
    table = QuiescedTable(2)
    for uid in range(1, 1000):
        table.add(uid, row())
    met = []
    for uid, _ in table.rows("leader = ?", 1):
        met.append(uid)
        table.follow(uid, 0)
        if uid % 300 == 1:
            table.pop(uid + 1)
            table.pop(uid + 2)
            table.add(uid + 2, row(leader=3))
    assert met == [uid for uid in range(1, 1000) if uid % 300 not in (2, 3)]


def test_a_leaders_groups_are_found_without_a_look_at_those_that_were_never_used() -> None:
    table = QuiescedTable(1)
    table.extend((uid, row_fresh(Spec(uid, f"g{uid}", "log", {}, (1, 2, 3), 0))) for uid in range(1000, 3000))
    slept = {5: row(leader=0)._replace(under=2, epoch=6), 1500 << 20: row(leader=2), 6: row(), 7: row(leader=2)}
    table.extend(slept.items())
    steps = [0]
    table._table.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 100)
    assert [uid for uid, _ in table.rows(f"leader = ? AND {LED}", 2)] == [7, 1500 << 20]
    assert [uid for uid, _ in table.rows(f"leader = 0 AND {LED} AND under = ? AND epoch = ?", 2, 6)] == [5]
    assert [uid for uid, _ in table.led_where(lambda shape: True)] == [6] == [uid for uid, _ in table.between(1, 2)]
    assert steps[0] < 10, "hundreds of instructions, and not tens of thousands"
    table.follow(5, 3)
    assert table.pop(7) == slept[7] and [uid for uid, _ in table.rows(f"leader = ? AND {LED}", 3)] == [5]
    assert len(table) == 2003 and len(list(table.rows("last = 0"))) == 2000


def test_who_is_not_there_is_nobodys() -> None:
    table = QuiescedTable(2)
    assert table.pop(9) is None and 9 not in table and table.named("a") == 0
    table.add(9, row()._replace(name="a"))
    assert table.pop(8) is None and 8 not in table and table.named("a") == 9
    assert table.pop(9) == row()._replace(name="a") and not len(table) and table.named("a") == 0


def test_a_walk_meets_the_last_two_numbers_there_are() -> None:
    table = QuiescedTable(2)
    last = [(1 << 63) - 2, (1 << 63) - 1]
    for uid in last:
        table.add(uid, row())
    assert [uid for uid, _ in table.rows()] == last
