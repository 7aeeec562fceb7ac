"""`logyard scrub` while nodes come and go: it waits for those that it began with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.protocol.errors import BadRequest
from logyard.service.cli import admin
from logyard.service.cli.root import cli


class Yard:
    """Nodes that scrub: after some looks they have ended, and are others."""

    def __init__(self, after: Sequence[int]) -> None:
        self.here: Sequence[int] = (1, 2)
        self.after = after
        self.looks = 0

    def scrub(self, node: int | None = None, *, start: bool = False) -> dict[int, dict[str, Any]]:
        if node is not None and node not in self.here:
            raise BadRequest(f"there is no node {node}")
        self.looks += not start
        assert self.looks < 50, "it waits for ever"
        found = {each: self.row(start) for each in self.here if node in (None, each)}
        if self.looks >= 2:
            self.here = self.after
        return found

    def row(self, start: bool) -> dict[str, Any]:
        passes = int(self.looks >= 6)
        more: dict[str, Any] = {"last": {}, "findings": [], "error": "", "left": 0}
        return {"wanted": int(start), "passes": passes, "epoch": 1, **more}


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
