"""The catalogue's section of topics: which slot lies where, and what a command may change."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.client.numbering import slot_of
from logyard.engine.machine import Reject
from logyard.machines.catalog.section import At
from logyard.machines.catalog.topics import Topics
from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.rehearsal import Command, Rehearsal, Step, Upgrade
from logyard.protocol.errors import BadRequest, GroupExists, LogyardError
from logyard.protocol.topics import (
    SLOTS,
    Layout,
    Topic,
    enveloped,
    first_layout,
    grown_layout,
    moved_slots,
    opened_envelope,
    pack_layout,
    packed_topic,
    section_answer,
    section_command,
    section_question,
    shrunk_layout,
    slots_of,
    topic_of,
    unpack_layout,
)
from logyard.testing import check_deterministic, check_restore


class Alone:
    """The section's machine, asked as clients do."""

    def __init__(self) -> None:
        self.run = Rehearsal(TopicsAlone)
        self.requests = 0

    def tell(self, command: str, **values: Any) -> Topic:
        self.requests += 1
        request = self.requests.to_bytes(16, "little")
        return topic_of(section_answer(self.run.command(section_command(command, values, request))))

    def find(self, name: str) -> Topic:
        return topic_of(section_answer(self.run.machine.query(section_question("find", {"name": name}))))  # type: ignore[attr-defined]


def grown_slot_by_slot(layout: Layout, new: Sequence[int]) -> Layout:
    """`grown_layout`, slot by slot: whoever has most gives next, of equals the lowest number."""
    old = sorted({partition for _, partition in layout})
    count = len(old) + len(new)
    held = {one: sum(slots for slots, owner in layout if owner == one) for one in old}
    wanted = [SLOTS * (at + 1) // count - SLOTS * at // count for at in range(len(new))]
    give = dict.fromkeys(old, 0)
    # Whoever has most gives next.
    richest = [(-held[one], one) for one in old]
    heapq.heapify(richest)
    for _ in range(sum(wanted)):
        has, one = richest[0]
        give[one] += 1
        heapq.heapreplace(richest, (has + 1, one))
    slots = slots_of(layout)
    takers = [one for one, share in zip(new, wanted, strict=True) for _ in range(share)]
    # The last slots of each go, so that what stays is one run.
    for slot in range(SLOTS - 1, -1, -1):
        if give.get(slots[slot], 0):
            give[slots[slot]] -= 1
            slots[slot] = takers.pop()
    return runs_of(slots)


def shrunk_slot_by_slot(layout: Layout, gone: Collection[int]) -> Layout:
    """`shrunk_layout`, slot by slot: whoever has least takes next, of equals the lowest number."""
    held = dict.fromkeys(sorted({partition for _, partition in layout} - set(gone)), 0)
    for slots, owner in layout:
        if owner in held:
            held[owner] += slots
    poorest = [(count, one) for one, count in held.items()]
    heapq.heapify(poorest)
    takers: list[int] = []
    for _ in range(SLOTS - sum(held.values())):
        count, one = poorest[0]
        takers.append(one)
        heapq.heapreplace(poorest, (count + 1, one))
    # Each one's in a run, so that the layout stays short.
    takers.sort(reverse=True)
    return runs_of(owner if owner in held else takers.pop() for owner in slots_of(layout))


def runs_of(slots: Iterable[int]) -> Layout:
    found: list[tuple[int, int]] = []
    for one in slots:
        if found and found[-1][1] == one:
            found[-1] = (found[-1][0] + 1, one)
        else:
            found.append((1, one))
    return tuple(found)


@given(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=4))
def test_adding_partitions_moves_slots_to_new_ones_only(first: int, steps: list[int]) -> None:
    layout, count = first_layout(range(first)), first
    for more in steps:
        grown = grown_layout(layout, range(count, count + more))
        old, new = slots_of(layout), slots_of(grown)
        assert len(new) == SLOTS
        assert all(before == after or after >= count for before, after in zip(old, new, strict=True))
        layout, count = grown, count + more
        shares = [new.count(number) for number in range(count)]
        assert max(shares) - min(shares) <= 1 + len(steps), shares
        assert unpack_layout(pack_layout(layout)) == layout


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=6))
def test_partitions_that_go_move_their_slots_only(first: int, steps: list[tuple[bool, int]]) -> None:
    layout, numbers = first_layout(range(first)), list(range(first))
    for grows, count in steps:
        old = slots_of(layout)
        if grows:
            new = [number for number in range(100) if number not in numbers][:count]
            layout, numbers = grown_layout(layout, new), sorted(numbers + new)
            continue
        gone = numbers[max(1, len(numbers) - count) :]
        numbers = numbers[: max(1, len(numbers) - count)]
        layout = shrunk_layout(layout, gone)
        after = slots_of(layout)
        assert len(after) == SLOTS and set(after) == set(numbers)
        assert all(now == then or then in gone for now, then in zip(after, old, strict=True))
        shares = [after.count(number) for number in numbers]
        assert max(shares) - min(shares) <= 1 + len(steps), shares
        assert unpack_layout(pack_layout(layout)) == layout


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=6))
def test_runs_are_counted_out_as_slots_would_be(first: int, steps: list[tuple[bool, int]]) -> None:
    """Machines of all versions must come to the same layouts."""
    layout, numbers = first_layout(range(first)), list(range(first))
    for grows, count in steps:
        before = layout
        if grows:
            new = [number for number in range(100) if number not in numbers][:count]
            layout, numbers = grown_layout(layout, new), sorted(numbers + new)
            assert layout == grown_slot_by_slot(before, new)
        else:
            gone = numbers[max(1, len(numbers) - count) :]
            layout, numbers = shrunk_layout(layout, gone), numbers[: max(1, len(numbers) - count)]
            assert layout == shrunk_slot_by_slot(before, gone)
        moved = {pair for pair in zip(slots_of(before), slots_of(layout), strict=True) if pair[0] != pair[1]}
        assert set(moved_slots(before, layout)) == moved


@given(st.binary(max_size=100) | st.none(), st.binary(max_size=100))
def test_the_envelope_gives_back_key_and_metadata(key: bytes | None, metadata: bytes) -> None:
    assert opened_envelope(enveloped(key, metadata)) == (key, metadata)


def test_what_has_no_envelope_has_no_key() -> None:
    for metadata in (b"", b"plain", b"\xf5", b"\xf5\x01\xff\xff", b"\xf5\x07\x00\x00"):
        assert opened_envelope(metadata) == (None, metadata)
    with pytest.raises(BadRequest):
        enveloped(b"k" * 1025, b"")
    # So that no release puts a key elsewhere.
    assert (slot_of(b""), slot_of(b"a"), slot_of(b"order-17")) == (5314, 3615, 3006)


def test_a_topic_is_made_grown_and_deleted() -> None:
    alone = Alone()
    made = alone.tell("create", name="orders", partitions=3, members=[1, 2])
    assert (made.id, made.state, made.epoch, [one.log for one in made.partitions]) == (
        1, "making", 1, ["orders.0", "orders.1", "orders.2"],
    )  # fmt: skip
    assert alone.tell("create", name="orders", partitions=3) == made
    with pytest.raises(GroupExists):
        alone.tell("create", name="orders", partitions=4)
    with pytest.raises(LogyardError, match="is making"):
        alone.tell("add", name="orders", partitions=4)
    live = alone.tell("made", id=1, uids=[[0, 100], [1, 101], [2, 102]])
    assert live.state == "live" and live.partitions[1].uid == 101 and live.revision > made.revision
    assert alone.tell("made", id=1, uids=[]) == live
    adding = alone.tell("add", name="orders", partitions=5)
    assert adding.state == "adding" and adding.epoch == 1 and adding.layout == live.layout
    assert [one.number for one in adding.live] == [0, 1, 2] and adding.coming is not None
    assert alone.tell("add", name="orders", partitions=5) == adding
    with pytest.raises(LogyardError, match="is adding"):
        alone.tell("add", name="orders", partitions=6)
    with pytest.raises(LogyardError, match="no fence yet"):
        alone.tell("added", id=1, epoch=2, fences=[[0, 5]], uids=[])
    grown = alone.tell("added", id=1, epoch=2, fences=[[0, 5], [1, 6], [2, 7]], uids=[[3, 103], [4, 104]])
    assert grown.state == "live" and grown.epoch == 2 and grown.coming is None
    assert all(fence == 5 + source for one in grown.partitions[3:] for source, fence in one.sources)
    assert {source for one in grown.partitions[3:] for source, _ in one.sources} == {0, 1, 2}
    assert alone.tell("added", id=1, epoch=2, fences=[], uids=[]) == grown
    assert alone.tell("options", name="orders", options={"age": 60.0}).options == {"age": 60.0}
    with pytest.raises(LogyardError):
        alone.tell("options", name="orders", options={"colour": 1})
    assert alone.tell("delete", name="orders").state == "deleting"
    with pytest.raises(GroupExists):
        alone.tell("create", name="orders", partitions=3)
    alone.tell("deleted", id=1)
    with pytest.raises(LogyardError, match="no topic") as refused:
        alone.find("orders")
    assert refused.value.code == "unknown_topic"
    assert alone.tell("create", name="orders", partitions=1).id == 2, "an id is never used again"


def live(alone: Alone, partitions: int) -> Topic:
    """Topic 1, which has partitions of the uids 100 and so on, in version 2."""
    alone.run.step(Upgrade(2))
    alone.tell("create", name="orders", partitions=partitions)
    return alone.tell("made", id=1, uids=[[number, 100 + number] for number in range(partitions)])


def test_partitions_are_taken_away_and_their_numbers_used_again() -> None:
    alone = Alone()
    before = live(alone, 4)
    removing = alone.tell("remove", name="orders", partitions=2)
    assert (removing.state, removing.epoch, removing.layout) == ("removing", 1, before.layout)
    assert removing.coming is not None and removing.coming[2] == (2, 3)
    assert [one.number for one in removing.live] == [0, 1, 2, 3], "until they are fenced they take records"
    assert alone.tell("remove", name="orders", partitions=2) == removing
    for command, more in (("remove", 3), ("add", 5)):
        with pytest.raises(LogyardError, match="is removing"):
            alone.tell(command, name="orders", partitions=more)
    with pytest.raises(LogyardError, match="partition 1 of topic 'orders' has no fence yet"):
        alone.tell("removed", id=1, epoch=2, fences=[[0, 5], [2, 7], [3, 8]])
    shrunk = alone.tell("removed", id=1, epoch=2, fences=[[0, 5], [1, 6], [2, 7], [3, 8]])
    assert (shrunk.state, shrunk.epoch, shrunk.coming) == ("live", 2, None)
    assert alone.tell("removed", id=1, epoch=2, fences=[]) == shrunk
    assert [one.number for one in shrunk.live] == [0, 1] and [one.end for one in shrunk.draining] == [7, 8]
    joined = {one.number: one.joins for one in shrunk.live}
    assert [(one.epoch, one.offset) for one in joined[0] + joined[1]] == [(2, 5), (2, 6)]
    assert {source for one in joined[0] + joined[1] for source in one.sources} == {(2, 7), (3, 8)}
    for command in ("retire", "drained"):
        assert alone.tell(command, id=1, numbers=[2, 3], uids=[2, 3]) == shrunk, "those had their numbers before"
    # One of the two is read; neither number is free before its log is gone.
    retired = alone.tell("retire", id=1, numbers=[0, 3])
    assert [one.number for one in retired.partitions if one.retired] == [3], "0 takes records"
    assert [one.number for one in retired.readable] == [0, 1, 2]
    assert [one.number for one in alone.tell("add", name="orders", partitions=3).partitions] == [0, 1, 2, 3, 4]
    alone.tell("added", id=1, epoch=3, fences=[[0, 9], [1, 9]], uids=[[4, 104]])
    assert any(one.retired for one in alone.tell("drained", id=1, numbers=[3], uids=[3]).partitions)
    with_five = alone.tell("drained", id=1, numbers=[2, 3], uids=[102, 103])
    assert [one.number for one in with_five.partitions] == [0, 1, 2, 4], "2 is not retired"
    assert with_five.ended == (("orders.3", 103, 8),)
    assert {source for one in with_five.live for join in one.joins for source in join.sources} == {(2, 7)}
    assert alone.tell("drained", id=1, numbers=[3]) == with_five
    alone.tell("add", name="orders", partitions=5)
    again = alone.tell("added", id=1, epoch=4, fences=[[0, 9], [1, 9], [4, 3]], uids=[[3, 203], [5, 105]])
    assert [(one.number, one.uid, one.born) for one in again.live] == [
        (0, 100, 0), (1, 101, 0), (4, 104, 0), (3, 203, 4), (5, 105, 0),
    ]  # fmt: skip
    for wanted in (0, 9):
        with pytest.raises(BadRequest, match="at least one is left"):
            alone.tell("remove", name="orders", partitions=wanted)
    assert alone.tell("remove", name="orders", partitions=5) == again, "there are so many"


def test_before_its_second_version_nothing_is_taken_away() -> None:
    alone = Alone()
    alone.tell("create", name="orders", partitions=2)
    alone.tell("made", id=1, uids=[[0, 1], [1, 2]])
    with pytest.raises(LogyardError, match="topics is of version 1, the command is for 2"):
        alone.tell("remove", name="orders", partitions=1)
    assert [one.number for one in alone.tell("add", name="orders", partitions=3).partitions] == [0, 1, 2]


def test_a_row_of_which_nothing_was_taken_is_packed_as_it_always_was() -> None:
    alone = Alone()
    row = live(alone, 2)
    packed = packed_topic(row)
    assert len(packed) == 11 and all(len(one) == 5 for one in packed[6]) and topic_of(packed) == row
    shrunk = alone.tell("remove", name="orders", partitions=1)
    shrunk = alone.tell("removed", id=1, epoch=2, fences=[[0, 5], [1, 6]])
    assert [len(one) for one in packed_topic(shrunk)[6]] == [7, 8]
    alone.tell("retire", id=1, numbers=[1])
    alone.tell("drained", id=1, numbers=[1])
    assert topic_of(packed_topic(alone.find("orders"))) == alone.find("orders")


def test_what_is_asked_twice_happens_once() -> None:
    run = Rehearsal(TopicsAlone)
    create = section_command("create", {"name": "a", "partitions": 1}, bytes(16))
    first = run.command(create)
    run.command(section_command("delete", {"name": "a"}, b"1" * 16))
    assert run.command(create) == first
    with pytest.raises(Reject):
        run.command(b"nonsense")
    with pytest.raises(BadRequest, match="topics create: KeyError"):
        section_answer(run.command(section_command("create", {"name": "b"}, b"2" * 16)))
    for name in ("", "_a", "x" * 201):
        with pytest.raises(BadRequest):
            section_answer(
                run.command(section_command("create", {"name": name, "partitions": 1}, name.encode()[:16].ljust(16)))
            )


def topics_of(alone: Alone) -> dict[str, bytes]:
    """Return what a snapshot has of the section, without the catalogue's answers."""
    return {name: data for name, data in alone.run.snapshot().items() if name.startswith("topics")}


@pytest.mark.parametrize("number", [float("inf"), 1e30, "9" * 40])
def test_numbers_that_no_snapshot_could_hold_are_refused(number: Any) -> None:
    alone = Alone()
    alone.tell("create", name="orders", partitions=1)
    for command, values in (
        ("create", {"name": "other", "partitions": number}),
        ("create", {"name": "other", "partitions": 1, "members": [number]}),
        ("made", {"id": 1, "uids": [[0, number]]}),
        ("deleted", {"id": number}),
    ):
        before = topics_of(alone)
        with pytest.raises((Reject, LogyardError)):
            alone.tell(command, **values)
        assert topics_of(alone) == before, command


def test_it_is_deterministic_and_its_snapshot_is_all_of_it() -> None:
    told: list[tuple[str, dict[str, Any]]] = [
        ("create", {"name": "a", "partitions": 2}),
        ("made", {"id": 1, "uids": [[0, 1], [1, 2]]}),
        ("create", {"name": "b", "partitions": 1, "options": {"bytes": 5}}),
        ("add", {"name": "a", "partitions": 3}),
        ("added", {"id": 1, "epoch": 2, "fences": [[0, 1], [1, 1]], "uids": [[2, 3]]}),
        ("delete", {"name": "b"}),
        ("deleted", {"id": 2}),
        ("remove", {"name": "a", "partitions": 1}),
        ("removed", {"id": 1, "epoch": 3, "fences": [[0, 3], [1, 4], [2, 5]]}),
        ("retire", {"id": 1, "numbers": [1, 2]}),
        ("drained", {"id": 1, "numbers": [2]}),
    ]
    steps: list[Step] = [Upgrade(2)]
    steps += [
        Command(section_command(command, values, number.to_bytes(16, "little")))
        for number, (command, values) in enumerate(told)
    ]
    check_restore(TopicsAlone, steps)
    check_deterministic(TopicsAlone, steps)


def test_a_small_change_leaves_the_other_shards_as_they_were() -> None:
    topics, at = Topics(), At(1, 0, 1)
    for number in range(200):
        topics.apply(at, "create", {"name": f"t{number}", "partitions": 1})
    before = dict(topics.snapshot())
    topics.apply(at, "made", {"id": 3, "uids": [[0, 9]]})
    after = topics.snapshot()
    assert [name for name in after if after[name] is not before[name]] == ["own", "rows0"]
