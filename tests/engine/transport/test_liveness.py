"""Liveness as a pure state machine, with the time given."""

from __future__ import annotations

import pytest

from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import Renewal
from logyard.engine.transport.liveness import Liveness

CONFIG = TransportConfig()


def pair() -> tuple[Liveness, Liveness]:
    a, b = Liveness(1, 11, CONFIG), Liveness(2, 22, CONFIG)
    for own, other in ((a, b), (b, a)):
        own.add(other.node)
        own.on_epoch(other.node, other.epoch)
        own.tick(0)
    return a, b


def exchange(a: Liveness, b: Liveness, now: float, *, forth: bool = True, back: bool = True) -> None:
    """One interval of both, over a link that may work in one direction only."""
    for own in (a, b):
        own.tick(now)
        own.advance()
    if forth:
        b.on_renewal(a.node, a.renewal(b.node), now)
    if back:
        a.on_renewal(b.node, b.renewal(a.node), now)


def run(a: Liveness, b: Liveness, begin: float, seconds: float, *, forth: bool = True, back: bool = True) -> float:
    for step in range(1, round(seconds * 10) + 1):
        exchange(a, b, begin + step / 10, forth=forth, back=back)
    return begin + seconds


def test_self_is_always_live_and_a_new_peer_is_not() -> None:
    shared: set[int] = set()
    liveness = Liveness(1, 1, CONFIG, shared)
    liveness.add(2)
    assert shared == {1} and liveness.live is shared


def test_both_are_live_after_two_intervals_and_stay_so() -> None:
    a, b = pair()
    now = run(a, b, 0, 0.2)
    assert a.live == b.live == {1, 2}
    run(a, b, now, 5)
    assert a.live == b.live == {1, 2}


def test_answers_out_of_turn_make_a_new_link_count_within_a_round_trip() -> None:
    a, b = pair()
    a.advance()
    b.advance()
    assert b.on_renewal(1, a.renewal(2), 0.001) == (False, True)
    assert a.on_renewal(2, b.renewal(1), 0.001) == (True, True)
    assert b.on_renewal(1, a.renewal(2), 0.002) == (True, False), "the answer's own limit ends the ping-pong"
    assert a.live == b.live == {1, 2}


def test_answers_out_of_turn_are_limited() -> None:
    a, b = pair()
    a.advance()
    answers = sum(b.on_renewal(1, a.renewal(2), n / 1000)[1] for n in range(100))
    assert answers == 10


def test_silence_is_death_after_the_timeout() -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    for step in range(1, 7):
        assert not a.tick(now + step / 10 - 0.01)
    assert a.tick(now + 0.7)
    assert a.live == {1}


@pytest.mark.parametrize(("forth", "back"), [(True, False), (False, True)])
def test_a_one_way_link_is_dead_on_both_sides(forth: bool, back: bool) -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    now = run(a, b, now, 1.4, forth=forth, back=back)
    assert a.live == {1} and b.live == {2}
    run(a, b, now, 0.3)
    assert a.live == b.live == {1, 2}


def test_echoes_of_another_epoch_or_of_the_future_do_not_count() -> None:
    a, _ = pair()
    a.advance()
    assert a.on_renewal(2, Renewal(22, 1, 10, 1, 0), 0)[0] is False
    assert a.on_renewal(2, Renewal(22, 2, 11, 2, 0), 0)[0] is False
    assert a.on_renewal(2, Renewal(21, 3, 11, 1, 0), 0) == (False, False)
    assert a.on_renewal(3, Renewal(22, 3, 11, 1, 0), 0) == (False, False)
    assert a.on_renewal(2, Renewal(22, 4, 11, 1, 77), 0)[0] is True
    assert a.digest_of(2) == 77


def test_a_restarted_node_is_dead_once_before_it_is_alive() -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    assert a.on_epoch(2, 23)
    assert a.live == {1}
    assert a.on_renewal(2, b.renewal(1), now)[0] is False, "a renewal of the old process"
    fresh = Liveness(2, 23, CONFIG)
    fresh.add(1)
    fresh.on_epoch(1, 11)
    fresh.tick(now)
    run(a, fresh, now, 0.2)
    assert a.live == fresh.live == {1, 2}
    assert not a.on_epoch(2, 23)


def test_a_broken_connection_with_a_refused_redial_is_dead_soon() -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    a.on_lost(2, now)
    assert not a.on_refused(2, now + 0.01)
    assert not a.tick(now + 0.1)
    assert a.on_refused(2, now + 0.16)
    assert a.live == {1}


@pytest.mark.parametrize("cure", ["redial", "renewal"])
def test_suspicion_ends_with_a_redial_or_a_renewal(cure: str) -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    a.on_lost(2, now)
    a.on_refused(2, now + 0.01)
    if cure == "redial":
        a.on_connected(2)
    else:
        a.on_renewal(2, b.renewal(1), now + 0.05)
    assert not a.tick(now + 0.3)
    assert a.live == {1, 2}


def test_a_broken_connection_alone_is_not_death() -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    a.on_lost(2, now)
    assert not a.tick(now + 0.3)


def test_a_pause_of_this_node_is_not_the_death_of_the_others() -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    assert not a.tick(now + 30)
    died = next(step for step in range(1, 20) if a.tick(now + 30 + step / 10))
    assert 4 <= died <= 7, "and yet they have no more time than usual after it"


def test_an_unhealthy_node_goes_silent_and_sees_the_others_on() -> None:
    a, b = pair()
    now = run(a, b, 0, 1)
    for _ in range(20):
        now += 0.1
        a.tick(now)
        b.tick(now)
        b.advance()
        a.on_renewal(2, b.renewal(1), now)
    assert b.live == {2} and a.live == {1, 2}


def test_a_removed_peer_is_forgotten() -> None:
    a, b = pair()
    run(a, b, 0, 1)
    assert a.remove(2)
    a.on_lost(2, 1)
    a.on_connected(2)
    assert not a.on_refused(2, 2)
    assert not a.on_epoch(2, 99)
    assert a.live == {1} and a.epoch_of(2) == 0
