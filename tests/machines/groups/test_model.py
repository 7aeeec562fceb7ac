"""Random histories of consumer groups against the rules, as seen from outside; planted bugs, each of which shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logyard.machines.groups import state
from logyard.machines.groups.state import Group, Part

from .model import World

SEEDS = 60
STEPS = 250


@pytest.mark.parametrize("seed", range(SEEDS))
def test_histories(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()


def test_histories_do_something() -> None:
    world = World(1)
    for _ in range(2000):
        world.step()
    assert world.accepted > 200 and len(world.asked) > 5


def _restarts(self: Part, target: int, due: int) -> None:
    self.target, self.due = target, due


def _in_one_epoch(self: Part, member: int) -> None:
    self.owner, self.due, self.target = member, 0, member


def _whatever_epoch(self: Group, member: Any, key: Any, epoch: int) -> Any:
    part = self.parts.get(key)
    return part if part is not None and part.owner == member.number else None


def _not_while_revoking(self: Group, member: Any, key: Any, epoch: int) -> Any:
    part = self.parts.get(key)
    owns = part is not None and (part.owner, part.epoch, part.due) == (member.number, epoch, 0)
    return part if owns else None


def _at_once(self: Part, target: int, due: int) -> None:
    self.grant(target)


def _anybody(self: Group, member: Any, key: Any, epoch: int) -> Any:
    return self.parts.get(key)


def _nothing(*_: object) -> None:
    return None


def _true(*_: object) -> bool:
    return True


def _back(self: Part, offset: int) -> None:
    self.offset = offset


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "an owner loses its partition at once": (Part, "ask_back", _at_once),
    "ownership moves in one epoch": (Part, "grant", _in_one_epoch),
    "a commit of an earlier epoch counts": (Group, "_owned", _whatever_epoch),
    "a commit does not count while revoking": (Group, "_owned", _not_while_revoking),
    "anybody's commit counts": (Group, "_owned", _anybody),
    "reset while members live": (Group, "check_idle", _nothing),
    "new partitions are read at once": (Group, "_past", _true),
    "an offset goes back": (Part, "commit", _back),
    "the silent stay": (Group, "pass_time", _nothing),
    "what nobody owns stays so": (Group, "_waits", lambda self: False),
    "a newer process waits for the older one": (Group, "_replace", _nothing),
    "what was read to its end is read on": (Group, "_is_read", lambda self, key: False),
    "slots of others are read at once": (Group, "_passed", lambda self, key: max((0, *_epochs(self, key)))),
    "what had its number before counts": (Part, "become", _nothing),
    "what comes later has no offset": (Part, "reset", _nothing),
    "who is asked for one that is read gives it to others": (Group, "_holds_read", lambda self: False),
}


def _epochs(self: Group, key: Any) -> list[int]:
    return [join.epoch for join in self._joins.get(key, ())]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, bug = PLANTED[name]
    monkeypatch.setattr(owner, method, bug)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(SEEDS):
            world = World(seed)
            for _ in range(STEPS):
                world.step()


def test_asking_again_does_not_begin_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rebalance` never asks twice; if it did, the time would still run from the first."""
    part = state.Part()
    part.grant(1)
    part.ask_back(2, 100)
    part.ask_back(3, 200)
    assert (part.due, part.target) == (100, 3)
