"""What operating.md says of members and leaderships, done on a cluster with a catalogue, which is none of the logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.service.cli.root import cli
from logyard.service.local_cluster import LocalCluster

from .test_cluster import reach, transferred

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Run a verb with --json and look at its exit code, which may be any where that is None; a failure has an error."""
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3, catalog=True) as cluster:
        cluster.start()

        def run(*words: str, code: int | None = 0) -> dict[str, Any]:
            done = CliRunner().invoke(cli, [*words, "--json", "--servers", ",".join(cluster.addresses)])
            assert code is None or done.exit_code == code, done.output
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            assert found["ok"] == (done.exit_code == 0) == ("error" not in found)
            return found

        def founded() -> bool:
            words = ["describe", "_catalog", "--node", "1", "--json", "--servers", cluster.addresses[0]]
            done = CliRunner().invoke(cli, words)
            return done.exit_code == 0 and json.loads(done.stdout.splitlines()[-1])["voters"] == [1, 2, 3]

        assert reach(founded)
        run("create", "orders", "payments")
        yield run


def test_the_catalogue_is_described_and_its_leadership_is_moved(ask: Ask) -> None:
    leader = ask("describe", "_catalog")["leader"]
    assert ask("members", "_catalog")["members"] == [1, 2, 3]

    def drained() -> bool:
        """It may be elected again."""
        found = ask("drain", "--node", str(leader))
        assert found["failures"] == {} and found["still_led"] == 0
        return ask("describe", "_catalog")["leader"] not in (0, leader)

    assert reach(drained)
    assert transferred(ask, "_catalog", leader)


def test_its_members_are_its_own_business(ask: Ask) -> None:
    found = ask("members", "remove", "--all", "--node", "3")
    assert (found["done"], found["groups"]) == (2, 2)
    assert ask("members", "add", "--all", "--node", "3")["done"] == 2
    assert ask("members", "remove", "orders", "--node", "3")["done"] == 1
    assert ask("members", "replace", "--node", "2", "--with", "3")["failures"] == {}
    assert ask("describe", "_catalog")["voters"] == [1, 2, 3]
    for words in (("add", "_catalog", "--node", "4"), ("remove", "_catalog", "--node", "3")):
        assert "is the cluster's own" in ask("members", *words, code=1)["error"]["message"]


def test_every_failure_says_what_it_is_in_json(ask: Ask) -> None:
    ask("create", "shared")
    ask("create", "alone", "--members", "2")
    assert transferred(ask, "shared", 2)
    for words, why in (
        ("members add shared --node 77", "shared: node 77 is not one of this cluster's"),
        ("forget --node 9", "node 1: "),
        ("members remove alone --node 2", "alone: node 2 is its last voter"),
        ("drain --node 2", "alone: node 2 is its only voter"),
        ("campaign shared --node {follower} --wait 0", "node {follower} does not lead shared"),
    ):
        # Which it is by now: a drain that failed for one log has moved the leaderships of the others.
        follower = min({1, 2, 3} - {ask("describe", "shared")["leader"]})
        error = ask(*words.format(follower=follower).split(), code=1)["error"]
        assert error["code"] == "failed" and why.format(follower=follower) in error["message"], words
