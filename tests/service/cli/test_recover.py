"""Which copy of the catalogue becomes its only voter when the majority is lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.protocol.errors import Busy
from logyard.service.cli import cluster as cluster_verbs
from logyard.service.cli.root import cli


class Yard:
    """Nodes with copies: {node: what its key metrics say}."""

    def __init__(self, copies: Mapping[int, Mapping[str, Any]]) -> None:
        self.copies = copies
        self.told: list[Any] = []

    def nodes(self) -> list[int]:
        return [1, 2, *self.copies]

    def key_metrics(self, names: Sequence[str], node: int) -> list[Mapping[str, Any]]:
        if node == 1:
            raise Busy("a dead node", 1.0)
        return [self.copies[node]] if node in self.copies else []

    def force_shrink(self, name: str, node: int) -> int:
        self.told.append(("shrink", name, node))
        return int(self.copies[node]["last"]) + 1

    def change_catalog(self, section: str, change: str, values: Mapping[str, Any]) -> str:
        self.told.append((section, change))
        return "paused"


def recovered(monkeypatch: pytest.MonkeyPatch, yard: Yard) -> tuple[int, dict[str, Any]]:
    @contextlib.contextmanager
    def opened(servers: Sequence[str]) -> Iterator[Yard]:
        yield yard

    monkeypatch.setattr(cluster_verbs, "opened", opened)
    result = CliRunner().invoke(cli, ["cluster", "recover", "--yes-the-majority-is-lost", "--json"])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def copy(last_term: int, last: int, term: int = 0, leader: int = 0) -> dict[str, Any]:
    return {"state": "running", "term": term or last_term, "last": last, "last_term": last_term, "leader": leader}


@pytest.mark.parametrize(
    ("copies", "best"),
    [
        ({3: copy(7, 90), 4: copy(7, 100)}, 4),
        ({3: copy(8, 90), 4: copy(7, 100)}, 3),
        # Who voted for a leader that it then never heard of has its term, and not its entries.
        ({3: copy(7, 90, term=8), 4: copy(7, 100)}, 4),
        ({3: copy(7, 100), 4: copy(7, 100)}, 3),
    ],
    ids=["longer", "newer", "a term alone", "equal"],
)
def test_the_newest_copy_is_recovered(
    monkeypatch: pytest.MonkeyPatch, copies: Mapping[int, Mapping[str, Any]], best: int
) -> None:
    yard = Yard(copies)
    code, found = recovered(monkeypatch, yard)
    assert code == 0 and found["node"] == best and found["copies"] == [3, 4] and found["paused"]
    assert yard.told == [("shrink", "_catalog", best), ("plan", "pause")]


def test_where_a_leader_is_heard_nothing_is_recovered_and_the_rest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a recovery that was cut short of its second half: the one voter that is left leads."""
    yard = Yard({3: copy(7, 90), 4: copy(7, 100, leader=4)})
    code, found = recovered(monkeypatch, yard)
    assert code == 1 and not found["ok"] and yard.told == []
    assert "nodes [4] hear a leader" in str(found) and "logyard plan pause" in str(found)
