"""Who is silent and who is dead, from whom the nodes hear."""

from __future__ import annotations

import pytest

from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, JOINING, RETURNED, SILENT
from logyard.service.catalog.silence import Silence, too_many

ALL = {1, 2, 3, 4, 5}
STATES = dict.fromkeys(ALL, ACTIVE)


def views(*without: int) -> dict[int, set[int]]:
    """What each hears when some are gone."""
    return {node: ALL - set(without) for node in ALL - set(without)}


def test_silent_then_dead_after_its_time() -> None:
    silence, states = Silence(1, 600.0), STATES
    assert silence.look(0.0, states, {}, (1, 2, 3), views(5)) == [("silent", 5)]
    states = {**STATES, 5: SILENT}
    assert silence.look(599.0, states, {}, (1, 2, 3), views(5)) == []
    assert silence.look(600.0, states, {}, (1, 2, 3), views(5)) == [("declare_dead", 5)]
    assert silence.look(601.0, {**states, 5: DEAD}, {}, (1, 2, 3), views(5)) == []
    assert silence.look(602.0, {**states, 5: DEAD}, {}, (1, 2, 3), views()) == [("heard", 5)]
    assert silence.look(603.0, {**states, 5: SILENT}, {}, (1, 2, 3), views(5)) == [], "its time begins anew"


def test_a_dead_node_that_was_heard_a_moment_ago_is_not_back() -> None:
    silence, states = Silence(1, 600.0), {**STATES, 5: DEAD}
    assert silence.look(0.0, states, {}, (1, 2, 3), views()) == [], "killed and declared dead at once: stale views"
    assert silence.look(1.0, states, {}, (1, 2, 3), {1: ALL - {5}}) == [], "a new leader that nobody told anything"
    assert silence.look(2.0, states, {}, (1, 2, 3), views(5)) == []
    assert silence.look(3.0, states, {}, (1, 2, 3), views()) == [("heard", 5)], "it was away, and is back"
    silence = Silence(1, 600.0)
    assert silence.look(0.0, states, {}, (1, 2, 3), views()) == []
    assert silence.look(9.9, states, {}, (1, 2, 3), views()) == []
    assert silence.look(10.0, states, {}, (1, 2, 3), views()) == [("heard", 5)], "it never went"
    assert silence.look(11.0, STATES, {}, (1, 2, 3), views()) == []
    assert silence.look(12.0, states, {}, (1, 2, 3), views()) == [], "dead once more"


def test_who_was_back_and_goes_again_is_dead_after_its_time() -> None:
    silence, states = Silence(1, 600.0), {**STATES, 5: RETURNED}
    assert silence.look(0.0, states, {}, (1, 2, 3), views(5)) == []
    assert silence.look(600.0, states, {}, (1, 2, 3), views(5)) == [("declare_dead", 5)]


def test_a_word_begins_the_time_anew() -> None:
    silence, states = Silence(1, 600.0), {**STATES, 5: SILENT}
    silence.look(0.0, states, {}, (1, 2, 3), views(5))
    assert silence.look(500.0, states, {}, (1, 2, 3), views()) == [("heard", 5)]
    silence.look(501.0, states, {}, (1, 2, 3), views(5))
    assert silence.look(700.0, states, {}, (1, 2, 3), views(5)) == []


def test_whom_a_quorum_hears_is_not_silent_though_the_leader_does_not() -> None:
    silence = Silence(1)
    heard = {**views(), 1: ALL - {5}}
    assert silence.look(0.0, STATES, {}, (1, 2, 3), heard) == []
    assert silence.look(0.0, STATES, {}, (1, 2, 3), {**heard, 2: ALL - {5}}) == [("silent", 5)]


def test_what_was_not_said_yet_counts_as_hearing() -> None:
    silence, states = Silence(1, 0.0), {**STATES, 5: SILENT}
    assert silence.look(0.0, states, {}, (1, 2, 3), {1: ALL - {5}}) == [("heard", 5)]
    some = {**views(5)}
    del some[4]
    assert silence.look(0.0, states, {}, (1, 2, 3), some) == [], "node 4 may hear it"


def test_nobody_is_dead_who_is_heard_by_anybody() -> None:
    silence, states = Silence(1, 0.0), {**STATES, 5: SILENT}
    assert silence.look(0.0, states, {}, (1, 2, 3), {**views(5), 4: ALL}) == []
    assert silence.look(0.0, {**STATES, 5: JOINING}, {}, (1, 2, 3), views()) == [("heard", 5)]
    assert silence.look(0.0, {**STATES, 5: DRAINING}, {}, (1, 2, 3), views(5)) == [("declare_dead", 5)]


@pytest.mark.parametrize(
    ("silent", "zones", "stops"),
    [
        ({5}, {}, False),
        ({4, 5}, {}, True),
        ({1}, {1: "a"}, False),
        ({5}, {5: "a"}, False),
    ],
)
def test_what_stops_it(silent: set[int], zones: dict[int, str], stops: bool) -> None:
    states = {**STATES, **dict.fromkeys(silent, SILENT)}
    assert bool(too_many(states, zones)) == stops


def test_a_whole_zone_or_a_third_stops_it() -> None:
    states = dict.fromkeys(range(1, 10), ACTIVE)
    assert not too_many({**states, 8: SILENT, 9: SILENT}, dict.fromkeys(range(5, 10), "b"))
    assert "zone 'b'" in too_many({**states, 8: SILENT, 9: SILENT}, {8: "b", 9: "b"})
    assert "a third" in too_many({**states, 7: SILENT, 8: SILENT, 9: SILENT}, {})
    silence = Silence(1, 0.0)
    silent = {**states, 7: SILENT, 8: SILENT, 9: SILENT}
    heard = {node: set(range(1, 7)) for node in range(1, 7)}
    assert silence.look(0.0, silent, {}, (1, 2, 3), heard) == []
    assert silence.look(0.0, {**silent, 8: DEAD, 9: DEAD}, {}, (1, 2, 3), heard) == [("declare_dead", 7)]
