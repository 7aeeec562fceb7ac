"""What a member of a consumer group takes of its coordinator's answers, beside a topic's row that is older or newer."""

from __future__ import annotations

from logyard.client.reading import Membership
from logyard.protocol.groups import Owned, Standing
from logyard.protocol.topics import Partition, Topic, partition_log

KEY = (1, 7)


def row(revision: int, *partitions: Partition) -> Topic:
    """The topic, at a revision."""
    return Topic(1, "work", revision, "live", revision, ((16384, 0),), partitions, 8)


def seventh(born: int, end: int | None = None) -> Partition:
    """The partition of that number that was born then."""
    return Partition(7, partition_log("work", 7), born=born, end=end)


def standing(version: int, epoch: int, revision: int) -> Standing:
    """It owns the partition, says a coordinator that knows the topic at that revision."""
    return Standing(1, version, (Owned(KEY, epoch, 0, False),), (), {1: revision})


def joined() -> Membership:
    """A member that owns nothing yet."""
    found = Membership()
    found.become(1)
    return found


def test_a_partition_of_a_used_number_is_read_when_its_coordinator_heard_of_it_first() -> None:
    member = joined()
    old, new = row(33, seventh(33)), row(35, seventh(35))
    member.take(standing(1, 50, 35), old)
    assert not member.readings, "it would read the one that had the number before"
    assert (member.version, member.revision) == (0, 35), "it asks for the row, and to be told again"
    member.take(standing(1, 50, 35), new)
    assert member.readings[KEY].born == 35 and not member.readings[KEY].at_rest


def test_a_partition_of_a_used_number_waits_for_a_coordinator_that_has_not_heard_of_it() -> None:
    member = joined()
    new = row(35, seventh(35))
    member.take(standing(1, 49, 33), new)
    assert not member.readings and member.version == 0
    member.take(standing(2, 50, 35), new)
    assert member.readings[KEY].epoch == 50


def test_what_is_owned_goes_on_while_the_row_is_older() -> None:
    member = joined()
    member.take(standing(1, 49, 33), row(33, seventh(33)))
    held = member.readings[KEY]
    member.take(standing(2, 49, 34), row(33, seventh(33)))
    assert member.readings[KEY] is held and member.version == 2 and member.revision == 34


def test_a_revision_that_nobody_knows_is_looked_for_once() -> None:
    """Topics that were restored are older than what a coordinator was told."""
    member = joined()
    restored = row(35, seventh(35))
    member.take(standing(1, 50, 100), restored)
    assert not member.readings and member.revision == 100
    member.know(restored, 100)
    member.take(standing(1, 50, 100), restored)
    assert member.readings[KEY].epoch == 50


def test_an_older_standing_that_comes_late_gives_nothing_back() -> None:
    """What was answered beside the loop waits for it, and what the loop asked itself is newer."""
    other = Partition(8, partition_log("work", 8))
    member = joined()
    both = Standing(1, 1, (Owned((1, 8), 1, 0, True), Owned(KEY, 49, 0, False)), (), {1: 33})
    member.take(both, row(33, seventh(33), other))
    # It gave one of them up; of the other it is to be told again.
    member.take(standing(2, 50, 35), row(33, seventh(33), other))
    assert not member.readings and member.version == 0
    member.take(both, row(35, seventh(35), other))
    assert not member.readings and member.version == 0, "they are others' by now"
    member.take(standing(2, 50, 35), row(35, seventh(35), other))
    assert member.readings.keys() == {KEY} and member.version == 2
