"""Which groups lost something, by rows and by what a replay met: values alone."""

from __future__ import annotations

from logyard.engine.log.meta_rows import DEPARTED, KEY, StateRow, state_key
from logyard.engine.log.record import FileHead
from logyard.engine.log.recovered import Recovered
from logyard.engine.log.replay_result import LIFE_BATCHES, Current, Damage, ReplayResult
from logyard.engine.raft.configuration import Configuration
from logyard.engine.recovery.damage import MARKS_MAX, Damaged, blank, cuts_of, judge


def result(*damage: Damage, next_batch: int = 9, first_batch: int = 1) -> ReplayResult:
    found = ReplayResult()
    found.damage = list(damage)
    found.next_batch, found.first_batch = next_batch, first_batch
    return found


def test_damage_without_a_name_may_have_been_anybodys() -> None:
    met = result(Damage(0, 3, 64, "a batch is lost"), Damage(2, 3, 80, "its row points into it"))
    met.cleared, met.sure = {1}, {2}
    found = judge({}, met, {}, [1, 2, 3], [])
    assert found.keys() == {2, 3} and "its row points" in found[2].reason and "a batch is lost" in found[3].reason
    assert not found[2].terms and found[3].terms
    assert found[2].seen == tuple(sorted(one.mark for one in met.damage)) and found[2].through == 8


def test_what_is_known_stays_until_it_is_mended_and_older_damage_takes_all_along() -> None:
    known = {1: Damaged("old", True, 4, False, seen=(5,)), 2: Damaged("old", False, 4, False, sound=True)}
    assert judge(known, result(), {}, [1, 2], []) == {1: known[1]}
    found = judge(known, result(Damage(1, 3, 0, "new"), Damage(2, 3, 0, "new")), {}, [1, 2], [])
    assert all(one.whole and one.seen is None for one in found.values()) and found[1].terms
    many = judge({}, result(*(Damage(3, 3, at, "x") for at in range(MARKS_MAX + 1))), {}, [3], [])
    assert many[3].whole


def test_rows_that_are_lost_may_have_had_the_newest_term() -> None:
    lost = [state_key(1), DEPARTED + KEY.pack(2), b"k" + KEY.pack(3)]
    found = judge({}, result(), {1: None}, [1, 2, 3], lost)
    assert found.keys() == {1, 2} and not found[1].terms and found[2].terms and found[1].whole
    assert judge({}, result(), {}, [1], lost[:1])[1].terms


def test_the_newest_file_of_a_directory_is_behind_those_in_segments() -> None:
    met = result()
    met.look_for_last_file(4, {}, 1)
    assert [(one.uid, one.file) for one in met.damage] == [(0, 5)] and met.cleared == set()
    known = cuts_of(
        {1: Damaged("", False, 8, False, seen=(met.damage[0].mark,)), 2: Damaged("", False, 8, False, seen=())}
    )
    again = result()
    again.look_for_last_file(4, known, 1)
    assert again.cleared == {1}


def test_a_wal_whose_newest_file_is_gone_goes_on_above_all_numbers_that_rows_speak_of() -> None:
    """Files up to the flushed one are recycled, and batches that a row covers are left out of a replay."""
    far = 3 * LIFE_BATCHES
    for through, lives, number in [
        (20, 1, LIFE_BATCHES),
        (20, 3, far),
        (far, 3, far + 1),
        (far, 4, far + LIFE_BATCHES),
    ]:
        known = {1: Damaged("", False, 8, True, sound=True), 2: Damaged("", False, through, True)}
        met = ReplayResult()
        met.begin_file(3)
        met.follow(3, 8192, 40)
        met.look_for_last_file(4, cuts_of(known), lives)
        assert (met.next_epoch, met.next_batch, met.previous) == (5, number, (0, 0))
    # A file that goes on has numbers of its own, one after the other.
    met = ReplayResult()
    met.begin_file(7)
    met.continue_in(Current(FileHead(7, 0, 0, 0, 15), 8192, [], True, False))
    met.go_on(16)
    met.look_for_last_file(4, cuts_of(known), 3)
    assert (met.next_epoch, met.next_batch) == (8, 16) and len(met.damage) == 1


def test_who_begins_with_nothing_keeps_its_promises() -> None:
    state = StateRow(7, term=3, vote=1, commit=9, floor=4)
    state.extra = {"configurations": [[2, 0, Configuration((1, 2)).encode()]]}
    said = Recovered()
    said.hard_state, said.floor = (3, 2, 9), 6
    row = blank(7, state, said)
    assert (row.term, row.vote, row.floor, row.commit) == (3, 2, 6, 0)
    assert row.extra == {"configurations": [[0, 0, Configuration((1, 2)).encode()]]}
    row = blank(7, None, Recovered(), (5, 0), (2, 8), b"now")
    assert (row.term, row.vote, row.floor, row.extra) == (5, 0, 8, {"configurations": [[0, 0, b"now"]]})
