"""Names of logs: intents and how they end, what is seen, imports, and deletions that wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from logyard.engine.types import FORCED_TERMS, position
from logyard.machines.catalog.logs import Log, Logs
from logyard.protocol.errors import BadRequest, GroupExists, Refused, UnknownGroup

from .told import Told, wanted


def states(told: Told) -> dict[str, str]:
    return {log.name: log.state for log in told.logs}


def test_an_intent_lives_and_its_equal_is_the_same_group() -> None:
    told = Told()
    (made,) = told("logs", "create", logs=[wanted("a", 7)])
    assert (made["uid"], made["state"], made["copies"]) == (7, "making", 3)
    (again,) = told("logs", "create", logs=[wanted("a", 9, 3, 2, 1)])
    assert again["uid"] == 7
    assert told("logs", "live", uids=[7]) == ["live"] and told("logs", "live", uids=[7]) == ["live"]
    other = told("logs", "create", logs=[wanted("a", 9, 1, 2), wanted("b", 10), wanted("_x", 11), wanted("a/b", 12)])
    assert [one[0] if isinstance(one, list) else one["uid"] for one in other] == [
        "group_exists", 10, "bad_request", "bad_request",
    ]  # fmt: skip
    (own,) = told("logs", "create", logs=[wanted("_x", 11)], system=True)
    assert own["uid"] == 11


def test_what_is_decided_first_holds() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("a", 7), wanted("b", 8)])
    assert told("logs", "undo", uids=[7]) == ["undoing"] and told("logs", "live", uids=[7]) == ["undoing"]
    assert told("logs", "live", uids=[8]) == ["live"] and told("logs", "undo", uids=[8]) == ["live"]


def test_what_had_a_leader_is_finished_and_never_undone() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("a", 7), wanted("b", 8)])
    assert told("logs", "report", logs=[(7, 1, (1, 2, 3), ())]) == [True]
    assert told("logs", "undo", uids=[7]) == ["live"]
    # Its leader was heard only after the decision: it has entries that were acknowledged, perhaps.
    assert told("logs", "undo", uids=[8]) == ["undoing"]
    assert told("logs", "report", logs=[(8, 1, (1, 2, 3), ())]) == [True]
    assert states(told) == {"a": "live", "b": "live"} and told.logs.find("b") is not None


def test_its_name_was_given_to_another_meanwhile() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("b", 8, 1, 2, 3)])
    told("logs", "undo", uids=[8])
    told("logs", "create", logs=[wanted("b", 9, 4, 5, 6)])
    told("logs", "report", logs=[(8, 1, (1, 2, 3), ())])
    found = told.logs.find("b"), told.logs.of_uid(8)
    assert found[0] is not None and found[0].uid == 9 and found[1] is not None and found[1].state == "conflicting"


def test_an_older_report_changes_nothing() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("a", 7)])
    told("logs", "live", uids=[7])
    assert told("logs", "report", logs=[(7, 9, (2, 3, 4), (5,)), (7, 8, (1, 2, 3), ()), (7, 9, (1,), ())]) == [
        True, False, False,
    ]  # fmt: skip
    assert told("logs", "report", logs=[(99, 3, (1,), ())]) == [False]
    found = told.logs.find("a")
    assert found is not None and (found.seen, found.voters, found.learners) == (9, (2, 3, 4), (5,))
    assert [told.logs.held(node) for node in range(1, 6)] == [0, 1, 1, 1, 1]


def test_a_member_that_was_forced_to_be_the_only_one_may_have_been_behind() -> None:
    """Its configuration stands at a lower index than the newest that was seen; of what came before nothing counts."""
    told = Told()
    told("logs", "create", logs=[wanted("a", 7)])
    told("logs", "report", logs=[(7, 100, (1, 2, 3), ())])
    before = told.logs.of_uid(7)
    forced = [position(FORCED_TERMS + 5, index) for index in range(100)]
    reports = [(7, forced[91], (3,), ()), (7, 200, (1, 2, 3), ()), (7, forced[90], (2,), ())]
    assert told("logs", "report", logs=reports) == [True, False, False]
    found = told.logs.of_uid(7)
    assert before is not None and found is not None
    assert (found.voters, found.seen, found.copies) == ((3,), forced[91], before.copies), "three are wanted as before"
    assert told("logs", "report", logs=[(7, forced[95], (3, 4), ())]) == [True]
    found = told.logs.of_uid(7)
    assert found is not None and found.copies == 2, "that was by hand"


def test_a_deleted_name_waits_for_its_nodes() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("a", 7)])
    with pytest.raises(Refused, match="being made"):
        told("logs", "delete", name="a")
    told("logs", "report", logs=[(7, 5, (1, 2), (4,))])
    assert told("logs", "delete", name="a")["waiting"] == [1, 2, 3, 4]
    with pytest.raises(UnknownGroup):
        told("logs", "delete", name="a")
    ((code, why),) = told("logs", "create", logs=[wanted("a", 8, 4, 5)])
    assert code == "refused" and "[4] have not let it go" in why
    assert told("logs", "create", logs=[wanted("a", 8, 5, 6)])[0]["state"] == "making"
    for node in (1, 2, 4):
        assert told("logs", "gone", uids=[7], node=node) == [False]
    assert told("logs", "gone", uids=[7], node=3) == [True] and told("logs", "gone", uids=[7], node=3) == [True]
    assert told.logs.of_uid(7) is None and told.logs.held(1) == 0 and told.logs.held(5) == 1
    assert told("logs", "gone", uids=[8], node=5) == [False], "it lives"


def imported(name: str, uid: int, created: int, *voters: int) -> dict[str, object]:
    return {"name": name, "uid": uid, "machine": "log", "created": created, "voters": voters, "index": 1}


def test_an_import_keeps_the_older_definition_then_the_lower_uid() -> None:
    told = Told()
    assert told("logs", "import", logs=[imported("a", 7, 50, 1, 2), imported("a", 3, 60, 3, 4)]) == [
        "live", "conflicting",
    ]  # fmt: skip
    assert told("logs", "import", logs=[imported("a", 9, 40, 5)]) == ["live"]
    assert told("logs", "import", logs=[imported("a", 8, 40, 6)]) == ["live"]
    assert told("logs", "import", logs=[imported("a", 7, 50, 1, 2)]) == ["conflicting"], "as it was"
    assert {log.uid: log.state for log in told.logs} == {
        7: "conflicting", 3: "conflicting", 9: "conflicting", 8: "live",
    }  # fmt: skip
    assert told("logs", "rename", uid=7, name="a-old")["state"] == "live"
    with pytest.raises(GroupExists):
        told("logs", "rename", uid=3, name="a-old")
    with pytest.raises(BadRequest, match="the cluster's own"):
        told("logs", "rename", uid=3, name="_a")
    found = told.logs.find("a-old")
    assert found is not None and found.uid == 7
    assert [row["uid"] for row in told.ask("logs", "list", state="conflicting")] == [3, 9]


def test_an_import_of_what_nobody_ever_led_is_an_intent() -> None:
    told = Told()
    assert told("logs", "import", logs=[{**imported("a", 7, 50, 1, 2), "index": 0}]) == ["making"]
    assert told("logs", "undo", uids=[7]) == ["undoing"], "as it may have been taken back elsewhere"
    assert told("logs", "import", logs=[{**imported("b", 8, 50, 1, 2), "index": 0}]) == ["making"]
    assert told("logs", "report", logs=[(8, 1, (1, 2), ())]) == [True] and states(told)["b"] == "live"


def test_the_pages_of_a_list_have_each_name_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    told, names = Told(), [f"n{number:03}" for number in range(200)]
    random.Random(7).shuffle(names)
    told("logs", "create", logs=[wanted(name, uid) for uid, name in enumerate(names, 1)])
    told("logs", "live", uids=list(range(1, 151)))

    def pages(**values: Any) -> list[str]:
        found, after = list[str](), ""
        while page := told.ask("logs", "list", after=after, limit=9, **values):
            assert len(page) <= 9
            found += [row["name"] for row in page]
            after = found[-1]
        return found

    assert pages() == sorted(names)
    assert pages(state="live") == sorted(names[:150]) and pages(state="making") == sorted(names[150:])
    told("logs", "rename", uid=1, name="a")
    told("logs", "delete", name=names[1])
    told("logs", "create", logs=[wanted("z", 999)])
    assert pages() == sorted(["a", *names[1:], "z"]) and pages(state="live") == sorted(["a", *names[2:150]])
    assert told.ask("logs", "list", limit=0) == [] == told.ask("logs", "list", limit=-1)
    # The second page of a list looks at its own rows, and at those on the way to them.
    looked = 0
    kept = Logs._kept

    def counted(self: Logs, number: int) -> Log:
        nonlocal looked
        looked += 1
        return kept(self, number)

    monkeypatch.setattr(Logs, "_kept", counted)
    told.ask("logs", "list", after="n100", limit=9)
    assert looked < 25


def test_names_of_old_with_an_underline_stay_and_one_stops_the_import() -> None:
    told = Told()
    assert told("logs", "import", logs=[imported("_mine", 7, 50, 1)]) == ["live"]
    with pytest.raises(Refused, match="'_catalog': rename or delete it first"):
        told("logs", "import", logs=[imported("_catalog", 8, 50, 1)])


def test_what_is_wanted_and_whose_it_is() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("t.0", 7, owner="topic t"), wanted("a", 8, options={"x": 1})])
    told("logs", "live", uids=[7, 8])
    for name in ("delete", "rename"):
        with pytest.raises(Refused, match="topic t"):
            told("logs", name, uid=7, name="other")
    assert told("logs", "delete", uid=7, owner="topic t")["state"] == "deleting"
    assert told("logs", "want", name="a", copies=5, pins=(4, 2))["pins"] == [2, 4]
    with pytest.raises(BadRequest, match="1 to 9"):
        told("logs", "want", name="a", copies=0)
    assert told("logs", "options", name="a", options={"y": 2})["options"] == {"x": 1, "y": 2}
    assert told.ask("logs", "find", name="a")["copies"] == 5
    with pytest.raises(UnknownGroup, match="'b'"):
        told.ask("logs", "find", name="b")


def test_what_an_operator_made_of_it_is_what_is_wanted() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("a", 7), wanted("b", 8)])
    told("logs", "report", logs=[(7, 1, (1, 2, 3), ()), (8, 1, (1, 2, 3), ())])
    told("plan", "propose", moves=[{"uid": 8, "kind": "add", "source": 0, "target": 4, "why": "short"}])
    told("logs", "report", logs=[(7, 2, (1, 2), ()), (8, 2, (1, 2), ())])
    copies = {log.name: log.copies for log in told.logs}
    assert copies == {"a": 2, "b": 3}, "only who moves by plan is wanted as before"


def test_options_are_bounded_and_what_is_refused_changes_nothing() -> None:
    told = Told()
    told("logs", "create", logs=[wanted("a", 7)])
    assert told("logs", "options", name="a", options={"note": "x" * 10_000})["options"]["note"]
    before = told.machine.snapshot()
    with pytest.raises(BadRequest, match="at most"):
        told("logs", "options", name="a", options={"other": "x" * 10_000})
    kept = told.machine.snapshot()
    assert {name: kept[name] for name in kept if name.startswith("logs")} == {
        name: before[name] for name in before if name.startswith("logs")
    }
