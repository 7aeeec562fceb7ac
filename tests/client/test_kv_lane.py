"""Which operations share a frame of a KV group's pipeline."""

from __future__ import annotations

import math
import random

from logyard.client.kv_lane import KvLane
from logyard.client.lane import Window


def test_operations_with_other_patience_do_not_share_a_frame() -> None:
    one = KvLane("a", Window(1 << 40, lambda: None), lambda: 0.0, lambda lane: None, random.Random(1))
    hasty, _ = one.add_operation(b"1", (), 0.5)
    patient, _ = one.add_operation(b"2", (), 30.0)
    shared, position = one.add_operation(b"3", (), 29.999)
    one.expire(1.0)
    assert hasty.pending.done and not patient.pending.done
    assert shared is patient and position == 1


def test_operations_that_may_wait_for_ever_share_a_frame() -> None:
    one = KvLane("a", Window(1 << 40, lambda: None), lambda: 0.0, lambda lane: None, random.Random(1))
    first, _ = one.add_operation(b"1", (), math.inf)
    assert one.add_operation(b"2", (), math.inf) == (first, 1)


def test_what_may_have_a_long_answer_has_a_frame_of_its_own() -> None:
    """The replies of a frame are kept together, or none of them is."""
    one = KvLane("a", Window(1 << 40, lambda: None), lambda: 0.0, lambda lane: None, random.Random(1))
    found = [one.add_operation(b"%d" % at, (), 30.0, at in (2, 3)) for at in range(6)]
    assert [position for _, position in found] == [0, 1, 0, 0, 0, 1]
    batches = [batch for batch, _ in found]
    assert [batches.index(batch) for batch in batches] == [0, 0, 2, 3, 4, 4]
    one.close()
    assert one.queue == [batches[at] for at in (0, 2, 3, 4)]
