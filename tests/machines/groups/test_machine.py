"""The coordinator's machine, command by command."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Reject
from logyard.machines.groups import Groups, machine, state
from logyard.machines.rehearsal import Command, Rehearsal, Step, Upgrade, Wait
from logyard.protocol.groups import (
    Commit,
    PartitionShape,
    Shape,
    Standing,
    beat_command,
    describe_question,
    join_command,
    leave_command,
    list_question,
    offsets_question,
    reset_command,
    standing_of,
    unpacked,
)
from logyard.testing import check_deterministic, check_restore

SHAPE = Shape(7, "orders", 1, tuple(PartitionShape(number) for number in range(4)))
GROW = Shape(7, "orders", 2, (*SHAPE.partitions, PartitionShape(4, "", ((0, 10), (1, 20)))))


def join(run: Rehearsal, instance: int, name: str = "", ttl: int = 10_000, shape: Shape = SHAPE) -> Standing:
    return standing_of(run.command(join_command("g", name, instance, ttl, "", [shape])))


def beat(run: Rehearsal, member: int, *more: Any, name: str = "", version: int = 0) -> Standing:
    return standing_of(run.command(beat_command("g", name, member, version, *more)))


def described(run: Rehearsal) -> Any:
    return unpacked(run.machine.query(describe_question("g")))  # type: ignore[attr-defined]


def test_a_partition_goes_over_when_its_owner_has_given_it_up() -> None:
    run = Rehearsal(Groups)
    first = join(run, 1)
    assert first.owned is not None and [one.key[1] for one in first.owned] == [0, 1, 2, 3]
    second = join(run, 2)
    assert second.owned == ()
    asked = beat(run, first.member, version=first.version).owned
    assert asked is not None
    going = [one for one in asked if one.revoking]
    assert len(going) == 2
    # Still its own: what it commits counts.
    done = beat(run, first.member, [Commit(one.key, one.epoch, 5) for one in going])
    assert done.refused == ()
    done = beat(run, first.member, [], [(one.key, one.epoch) for one in going])
    assert done.owned is not None and len(done.owned) == 2
    # Given up is given up.
    late = beat(run, first.member, [Commit(one.key, one.epoch, 9) for one in going])
    assert late.refused == tuple(one.key for one in going)
    taken = beat(run, second.member).owned
    assert taken is not None and [(one.key, one.offset, one.epoch > 1) for one in taken] == [
        (one.key, 5, True) for one in going
    ]


def test_what_is_not_given_up_is_taken_after_a_minute_from_the_first_asking() -> None:
    run = Rehearsal(Groups)
    first = join(run, 1, ttl=100_000)
    for instance in (2, 3, 4):
        join(run, instance, ttl=100_000)
        run.wait(19_000)
    assert len(described(run)["members"]) == 4
    run.wait(2000)
    owned = beat(run, first.member).owned
    assert owned is not None and len(owned) == 4, "59 s after the first asking for two of them"
    run.wait(2000)
    owned = beat(run, first.member).owned
    assert owned is not None and len(owned) == 2
    run.wait(38_000)
    owned = beat(run, first.member).owned
    assert owned is not None and len(owned) == 1


def test_a_silent_members_partitions_go_to_the_others() -> None:
    run = Rehearsal(Groups)
    first, second = join(run, 1), join(run, 2)
    run.wait(6000)
    beat(run, second.member)
    run.wait(6000)
    owned = beat(run, second.member).owned
    assert owned is not None and len(owned) == 4
    with pytest.raises(Reject, match="silent") as refused:
        beat(run, first.member)
    assert refused.value.code == "unknown_member"


def test_a_newer_process_of_a_name_has_what_the_older_one_had() -> None:
    run = Rehearsal(Groups)
    first, other = join(run, 1, "a"), join(run, 2, "b")
    beat(run, first.member, [], [((7, number), 1) for number in range(4)], name="a")
    before = {tuple(row[:2]): row[2] for row in described(run)["partitions"]}
    changes = described(run)["rebalances"]
    newer = join(run, 3, "a")
    after = {tuple(row[:2]): row[2] for row in described(run)["partitions"]}
    assert described(run)["rebalances"] == changes
    assert {key: newer.member if owner == first.member else owner for key, owner in before.items()} == after
    with pytest.raises(Reject, match="newer process") as refused:
        beat(run, first.member, name="a")
    assert refused.value.code == "fenced"
    assert beat(run, other.member, name="b").owned


def test_new_partitions_wait_until_what_was_before_them_is_read() -> None:
    run = Rehearsal(Groups)
    first = join(run, 1)
    owned = beat(run, first.member, [], [], [GROW]).owned
    assert owned is not None and len(owned) == 4
    for offsets, count in (((10, 19), 4), ((10, 20), 5)):
        commits = [Commit((7, number), 1, offset) for number, offset in enumerate(offsets)]
        owned = beat(run, first.member, commits).owned
        assert owned is not None and len(owned) == count
    assert beat(run, first.member).revisions == {7: 2}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_from_version_3_on_what_comes_to_a_known_topic_is_read_from_its_start(version: int) -> None:
    run = Rehearsal(Groups)
    if version > 1:
        run.step(Upgrade(version))
    run.command(reset_command("g", [((7, 0), 5, 0)]))
    first = join(run, 1)
    assert [row[4] for row in described(run)["partitions"]] == [5, -1, -1, -1], "a topic that it did not know"
    run = run.restored()
    beat(run, first.member, [], [], [GROW])
    assert described(run)["partitions"][4][4] == (0 if version > 2 else -1)
    if version > 1:
        # Another one under a number that was read.
        again = GROW._replace(revision=3, partitions=(PartitionShape(0, "", (), 3), *GROW.partitions[1:]))
        join(run, 2, shape=again)
        assert described(run)["partitions"][0][4] == (0 if version > 2 else -1)


def test_a_new_leader_gives_everybody_all_of_their_time_again() -> None:
    run = Rehearsal(Groups)
    member = join(run, 1).member
    run.wait(9000)
    machine_ = run.machine
    assert isinstance(machine_, Groups)
    context = run._context()._replace(term=2, timestamp=run.now)
    machine_.on_timer(context, machine.TIMER)
    machine_.on_timer(context._replace(timestamp=run.now + 9000), machine.TIMER)
    assert machine_.groups["g"].members.keys() == {member}
    machine_.on_timer(context._replace(timestamp=run.now + 10_001), machine.TIMER)
    assert not machine_.groups["g"].members


def test_offsets_of_a_group_that_nobody_uses_are_forgotten() -> None:
    run = Rehearsal(lambda: Groups(idle_ms=50_000))
    member = join(run, 1).member
    beat(run, member, [Commit((7, 0), 1, 3)])
    run.command(leave_command("g", "", member))
    run.wait(49_000)
    assert described(run)["partitions"][0][4] == 3
    run.wait(2000)
    assert unpacked(run.machine.query(list_question())) == ()  # type: ignore[attr-defined]
    # A number is never another member's, so that nobody speaks for a group of the same name.
    assert join(run, 2).member > member


def test_log_time_jumps_over_no_groups_idle_time() -> None:
    """Which nothing gives it again: neither a new leader nor a command."""
    run = Rehearsal(Groups)
    run.command(leave_command("g", "", join(run, 1).member))
    machine_ = run.machine
    assert isinstance(machine_, Groups) and machine_.timer > run.now, "a term is running"
    assert not getattr(machine_, "renews_terms", False) and not getattr(machine_, "wall_time", False)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GROUPS_MAX", 1)
    monkeypatch.setattr(state, "MEMBERS_MAX", 2)
    monkeypatch.setattr(state, "PARTITIONS_MAX", 5)
    run = Rehearsal(Groups)
    join(run, 1), join(run, 2)
    for code, command in (
        ("too_many_members", join_command("g", "", 3, 10_000, "", [SHAPE])),
        ("too_many_groups", join_command("h", "", 3, 10_000, "", [SHAPE])),
        ("too_many_groups", reset_command("h", [((7, 0), 3, 0)])),
        ("bad_request", join_command("g", "", 3, 1, "", [SHAPE])),
        ("bad_request", join_command("g", "", 3, 10_000, "", [])),
        ("bad_request", join_command("", "", 3, 10_000, "", [SHAPE])),
        ("bad_request", beat_command("g", "", 1, 0, [Commit((7, 0), 1, -1)])),
        ("bad_request", b"\x93\x01"),
        ("bad_request", b""),
    ):
        before = run.snapshot()
        with pytest.raises(Reject) as refused:
            run.command(command)
        assert refused.value.code == code and run.snapshot() == before, command
    more = GROW._replace(partitions=(*GROW.partitions, PartitionShape(5)))
    with pytest.raises(Reject) as refused:
        beat(run, 1, [], [], [more])
    assert refused.value.code == "too_many_partitions"


@pytest.mark.parametrize("number", [float("inf"), 1e30, "9" * 40])
def test_numbers_that_no_snapshot_could_hold_are_refused(number: Any) -> None:
    run = Rehearsal(Groups)
    join(run, 1)
    for command in (
        ["join", "h", "", 2, 10_000, "", [[number, "orders", 1, [[0, "", []]]]]],
        ["join", "h", "", 2, 10_000, "", [[7, "orders", 1, [[0, "", [[number, number]]]]]]],
        ["beat", "g", "", 1, 0, [[[7, number], 1, 1]], [], []],
        ["beat", "g", "", 1, 0, [[[7, 0], 1, number]], [], []],
        ["beat", "g", "", 1, 0, [], [[[number, 0], 1]], []],
        ["reset", "h", [[[number, 0], 1]]],
        ["reset", "h", [[[7, 0], number]]],
    ):
        before = run.snapshot()
        with pytest.raises(Reject) as refused:
            run.command(msgpack.packb(command))
        assert refused.value.code == "bad_request" and run.snapshot() == before, command


def test_a_group_whose_name_is_no_text_does_not_hide_the_others() -> None:
    run = Rehearsal(Groups)
    join(run, 1)
    run.command(msgpack.packb(["join", b"g", "", 2, 10_000, "", [SHAPE.packed()]]))
    for question in (list_question(), offsets_question(7)):
        assert [row[0] for row in unpacked(run.machine.query(question))] == [b"g", "g"]  # type: ignore[attr-defined]


def test_it_is_deterministic_and_its_snapshot_is_all_of_it() -> None:
    steps: list[Step] = [
        Command(join_command("g", "a", 1, 10_000, "x", [SHAPE])),
        Command(join_command("g", "", 2, 5000, "y", [SHAPE])),
        Command(join_command("h", "", 3, 5000, "", [SHAPE])),
        Wait(4000),
        Command(beat_command("g", "a", 1, 0, [Commit((7, 0), 1, 10), Commit((7, 1), 1, 20)], [((7, 2), 1)], [GROW])),
        Command(beat_command("g", "a", 1, 0, [Commit((7, 9), 1, 10)])),
        Wait(4000),
        Command(join_command("g", "a", 4, 10_000, "x", [GROW])),
        Command(beat_command("g", "a", 1, 0)),
        Command(leave_command("g", "a", 4)),
        Command(reset_command("g", [((7, 0), 3, 0)])),
        Wait(8 * 24 * 3_600_000),
    ]
    check_restore(Groups, steps)
    check_deterministic(Groups, steps)
