"""The catalogue's section of topics: which slot lies where, and what a command may change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.client.numbering import slot_of
from logyard.engine.machine import Reject
from logyard.machines.catalog.section import At
from logyard.machines.catalog.topics import Topics
from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.rehearsal import Command, Rehearsal
from logyard.protocol.errors import BadRequest, GroupExists, LogyardError
from logyard.protocol.topics import (
    SLOTS,
    Topic,
    enveloped,
    first_layout,
    grown_layout,
    opened_envelope,
    pack_layout,
    section_answer,
    section_command,
    section_question,
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


def test_what_is_asked_twice_happens_once() -> None:
    run = Rehearsal(TopicsAlone)
    create = section_command("create", {"name": "a", "partitions": 1}, bytes(16))
    first = run.command(create)
    run.command(section_command("delete", {"name": "a"}, b"1" * 16))
    assert run.command(create) == first
    with pytest.raises(Reject):
        run.command(b"nonsense")
    with pytest.raises(Reject):
        run.command(section_command("create", {"name": "b"}, b"2" * 16))
    for name in ("", "_a", "x" * 201):
        with pytest.raises(BadRequest):
            section_answer(
                run.command(section_command("create", {"name": name, "partitions": 1}, name.encode()[:16].ljust(16)))
            )


def test_it_is_deterministic_and_its_snapshot_is_all_of_it() -> None:
    told: list[tuple[str, dict[str, Any]]] = [
        ("create", {"name": "a", "partitions": 2}),
        ("made", {"id": 1, "uids": [[0, 1], [1, 2]]}),
        ("create", {"name": "b", "partitions": 1, "options": {"bytes": 5}}),
        ("add", {"name": "a", "partitions": 3}),
        ("added", {"id": 1, "epoch": 2, "fences": [[0, 1], [1, 1]], "uids": [[2, 3]]}),
        ("delete", {"name": "b"}),
        ("deleted", {"id": 2}),
    ]
    steps = [
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
