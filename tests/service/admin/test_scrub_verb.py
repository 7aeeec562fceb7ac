"""`logyard scrub` while nodes come and go: it waits for those that it began with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.client.admin import all_of
from logyard.client.session import unreachable
from logyard.protocol.errors import BadRequest
from logyard.service.cli import admin
from logyard.service.cli.root import cli


class Yard:
    """Nodes that scrub: after some looks they have ended, and are others."""

    def __init__(self, after: Sequence[int], dead: Sequence[int] = (), again: Sequence[int] = ()) -> None:
        self.here: Sequence[int] = (1, 2)
        self.after = after
        # Of those that scrub by then: nobody reaches them any more, or they were started again.
        self.dead = dead
        self.again = again
        self.looks = 0

    def scrub(self, node: int | None = None, *, start: bool = False) -> dict[int, dict[str, Any]]:
        if node is not None and node not in self.here:
            raise BadRequest(f"there is no node {node}")
        if node is not None and node in self.dead and self.looks >= 2:
            raise unreachable(("127.0.0.1", 7000 + node), "refused")
        self.looks += not start
        assert self.looks < 50, "it waits for ever"
        found = {each: self.row(start, each) for each in self.here if node in (None, each)}
        if self.looks >= 2:
            self.here = self.after
        return found

    def row(self, start: bool, node: int) -> dict[str, Any]:
        passes = int(self.looks >= 6)
        more: dict[str, Any] = {"last": {}, "findings": [], "error": "", "left": 0}
        return {"wanted": int(start), "passes": passes, "epoch": 1 + (node in self.again and self.looks > 2), **more}


def scrub(monkeypatch: pytest.MonkeyPatch, yard: Yard) -> tuple[int, dict[str, Any]]:
    @contextlib.contextmanager
    def opened(servers: Sequence[str]) -> Iterator[Yard]:
        yield yard

    monkeypatch.setattr(admin, "opened", opened)
    monkeypatch.setattr(admin, "SCRUB_LOOK_S", 0.0)
    result = CliRunner().invoke(cli, ["scrub", "--json"])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_a_node_that_joins_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an internal error."""
    code, found = scrub(monkeypatch, Yard((1, 2, 3)))
    assert code == 0 and sorted(found["nodes"]) == ["1", "2"], found


def test_a_node_that_is_taken_out_meanwhile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for without end."""
    code, found = scrub(monkeypatch, Yard((1,)))
    assert code == 2 and found["error"]["message"] == "there is no node 2", found


@pytest.mark.parametrize(
    ("dead", "again", "why"),
    [
        ([2], [], ["node 2 did not do it: cannot reach 127.0.0.1:7002: refused"]),
        ([], [2], ["node 2 did not do it: it was started again meanwhile, and its scrub did not end"]),
        ([1], [2], ["node 1 did not do it: cannot reach", "node 2 did not do it: it was started again"]),
    ],
    ids=["dead", "again", "both"],
)
def test_a_node_that_ends_meanwhile_takes_no_others_result_along(
    dead: list[int], again: list[int], why: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = scrub(monkeypatch, Yard((1, 2), dead, again))
    missing = [*dead, *again]
    assert code == 1 and not found["ok"] and found["missing"] == missing, found
    assert list(found["nodes"]) == [str(node) for node in (1, 2) if node not in missing]
    assert all(part in found["error"]["message"] for part in why) and found["error"]["code"] == "error"


def test_those_that_were_missing_from_the_start_are_named_with_those_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Yard((1, 2), [2])
    first = yard.scrub

    def partly(node: int | None = None, *, start: bool = False) -> dict[int, dict[str, Any]]:
        found = first(node, start=start)
        return all_of({**found, 3: unreachable(("127.0.0.1", 7003), "refused")}) if start else found

    monkeypatch.setattr(yard, "scrub", partly)
    code, found = scrub(monkeypatch, yard)
    assert code == 1 and list(found["nodes"]) == ["1"] and found["missing"] == [3, 2], found
    assert "node 3 did not do it" in found["error"]["message"] and "node 2 did" in found["error"]["message"]
