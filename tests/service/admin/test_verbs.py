"""The verbs for many logs on four real nodes: replaced, drained, stopped in the middle and run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.client.board import Standing
from logyard.client.sync import Yard, connect_sync
from logyard.protocol.errors import Refused, UnknownGroup
from logyard.service.cli.members import check_node
from logyard.service.cli.root import cli
from logyard.service.local_cluster import LocalCluster
from tests.pipeline.support import lead
from tests.service.cli.test_cluster import reach

COMMAND = [sys.executable, "-m", "logyard.service.cli"]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 4) as found:
        found.start()
        yield found


@pytest.fixture
def ask(cluster: LocalCluster) -> Ask:
    """Run a verb with --json; returns its object, the last line of standard output; checks the exit code, which may be
    any where that is None."""

    def run(*words: str, code: int | None = 0) -> dict[str, Any]:
        done = CliRunner().invoke(cli, [*words, "--servers", ",".join(cluster.addresses), "--json"])
        assert code is None or done.exit_code == code, done.output
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert found["ok"] == (done.exit_code == 0)
        return found

    return run


@pytest.fixture
def yard(cluster: LocalCluster) -> Iterator[Yard]:
    """Without logs afterwards, whatever became of the test: the next one counts all that there are."""
    with connect_sync(cluster.addresses) as found:
        yield found
        for row in found.list():
            # A node that has not heard yet that a log is deleted lists it for a moment.
            with suppress(UnknownGroup):
                found.delete(row["name"])
        assert reach(lambda: not found.list())


def make(yard: Yard, prefix: str, count: int, members: tuple[int, ...] = (1, 2, 3)) -> list[str]:
    """Logs of one record each, led."""
    names = [f"{prefix}-{number:03d}" for number in range(count)]
    yard.create_many(names, members=members)
    for name in names:
        yard.log(name).append(b"", name.encode())
    return names


def board(yard: Yard, prefix: str) -> dict[str, Standing]:
    return {row.name: row for row in yard.leaders()[0] if row.name.startswith(prefix)}


def voters(yard: Yard, prefix: str) -> set[tuple[int, ...]]:
    return {row.voters for row in board(yard, prefix).values()}


def holds(yard: Yard, name: str, end: int) -> bool:
    """Whether node 4 has all records."""
    return yard.log(name).latest(node=4)[1] == end


@pytest.mark.long
def test_a_replacement_killed_in_the_middle_goes_on(cluster: LocalCluster, ask: Ask, yard: Yard) -> None:
    names = make(yard, "kill", 60)
    words = ["members", "replace", "--node", "3", "--with", "4", "--servers", cluster.addresses[0]]
    command = subprocess.Popen(
        [*COMMAND, *words, "--rate", "20", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert reach(lambda: sum(row.voters == (1, 2, 4) for row in board(yard, "kill").values()) >= 5)
    command.kill()
    command.communicate(timeout=30)
    replaced = sum(row.voters == (1, 2, 4) for row in board(yard, "kill").values())
    assert 5 <= replaced < 60
    # Nothing that was touched is worse off for it: all take writes.
    for name in names:
        yard.log(name).append(b"", b"between")
    found = ask("members", "replace", "--node", "3", "--with", "4")
    assert found["failed"] == 0 and 60 - replaced >= found["done"] >= 60 - replaced - 8
    assert found["groups"] == found["done"] + found["skipped"]
    assert voters(yard, "kill") == {(1, 2, 4)}
    for name in names:
        assert reach(partial(holds, yard, name, 2))
        assert yard.log(name).read(0, node=4).payload == name.encode()
    assert ask("members", "replace", "--node", "3", "--with", "4")["groups"] == 0


def test_draining_moves_leaderships_and_memberships(ask: Ask, yard: Yard) -> None:
    names = make(yard, "drain", 20)
    for name in names[:10]:
        lead(yard, name, 1)
    found = ask("drain", "--node", "1", "--rate", "0")
    assert found["still_led"] == found["failed"] == 0 and found["done"] >= 10
    leaders = [row.leader for row in board(yard, "drain").values()]
    assert 1 not in leaders and min(leaders.count(2), leaders.count(3)) >= 5
    found = ask("drain", "--node", "2", "--members", "--with", "4", "--parallel", "16")
    assert found["members"]["done"] == 20 and found["still_led"] == 0
    assert voters(yard, "drain") == {(1, 3, 4)}
    assert all(row.leader != 2 for row in board(yard, "drain").values())


def test_what_can_not_be_moved_is_said(ask: Ask, yard: Yard) -> None:
    names = make(yard, "only", 2, (1,))
    found = ask("drain", "--node", "1", code=1)
    assert set(found["failures"]) == set(names) and "only voter" in found["failures"][names[0]]
    assert found["still_led"] == 2
    found = ask("members", "remove", *names, "--node", "1", code=1)
    assert found["failed"] == 2 and "last voter" in found["failures"][names[1]]
    # A node that nobody has an address for is refused, and no copy is lost by it.
    found = ask("members", "replace", *names, "--node", "1", "--with", "9", code=1)
    assert "not one of this cluster" in found["failures"][names[0]]
    assert voters(yard, "only") == {(1,)}


def test_adding_promoting_and_removing(ask: Ask, yard: Yard) -> None:
    names = make(yard, "one", 3)
    assert ask("members", "add", names[0], "--node", "4", "--learner")["done"] == 1
    (row,) = [row for row in board(yard, "one").values() if row.learners]
    assert (row.name, row.learners, row.voters) == (names[0], (4,), (1, 2, 3))
    assert ask("members", "promote", "--all", "--node", "4")["done"] == 1
    found = ask("members", "add", "--all", "--node", "4")
    assert (found["done"], found["skipped"]) == (2, 0)
    assert voters(yard, "one") == {(1, 2, 3, 4)}
    assert ask("members", "add", names[0], "--node", "4")["skipped"] == 1
    assert ask("members", "remove", "--all", "--node", "2")["done"] == 3
    assert voters(yard, "one") == {(1, 3, 4)}
    assert ask("members", "promote", names[0], "--node", "2", code=1)["failed"] == 1
    assert ask("members", "absent", code=1)["error"]["code"] == "unknown_group"


def test_a_node_that_there_is_not_is_refused_by_its_number(ask: Ask, yard: Yard) -> None:
    names = make(yard, "typo", 2)
    for words in (
        ("drain", "--node", "9"),
        ("drain", "--node", "9", "--members", "--with", "4"),
        ("leaders", "--node", "9"),
        ("members", "replace", "--node", "9", "--with", "4"),
        ("members", "replace", names[0], "--node", "9", "--with", "4"),
        ("members", "remove", "--all", "--node", "9"),
        ("members", "promote", "--all", "--node", "9"),
    ):
        error = ask(*words, code=1)["error"]
        assert error == {"code": "refused", "message": "node 9 is not known: there are nodes 1, 2, 3, 4"}, words


def test_who_is_no_member_is_not_removed(ask: Ask, yard: Yard) -> None:
    """Unless a part of the logs have it: then an earlier run was stopped, and this one goes on."""
    names = make(yard, "gone", 2)
    for node in (4, 9):
        error = ask("members", "remove", *names, "--node", str(node), code=1)["error"]
        assert error == {"code": "refused", "message": f"node {node} is no member of {', '.join(names)}"}
    assert ask("members", "remove", names[0], "--node", "3")["done"] == 1
    found = ask("members", "remove", *names, "--node", "3")
    assert (found["done"], found["skipped"]) == (1, 1)
    assert ask("members", "remove", names[0], "absent", "--node", "3", code=1)["failures"].keys() == {"absent"}


def test_a_node_without_an_address_is_known_by_its_logs() -> None:
    row = Standing("log", 1, 2, 1, 0, "leader", "running", (2, 3), (7,), (8,))
    for node in (1, 2, 3, 7, 8):
        check_node(node, [1, 2], [row])
    with pytest.raises(Refused, match="node 9 is not known: there are nodes 1, 2, 3, 7, 8"):
        check_node(9, [1, 2], [row._replace(leader=0)])


def test_a_log_named_like_a_verb_is_reached(ask: Ask, yard: Yard) -> None:
    yard.create("add", members=[1, 2, 3])
    yard.log("add").append(b"", b"x")
    assert ask("members", "show", "add")["members"] == [1, 2, 3]
    assert CliRunner().invoke(cli, ["members", "add"]).exit_code == 2
    yard.delete("add")


def test_bad_words_are_bad_usage() -> None:
    for words in (
        ("members", "replace", "--node", "3", "--with", "3"),
        ("members", "add", "--node", "4"),
        ("members", "add", "x", "--all", "--node", "4"),
        ("drain", "--node", "1", "--members"),
        ("drain", "--node", "1", "--with", "2"),
        ("drain", "--node", "1", "--members", "--with", "1"),
    ):
        assert CliRunner().invoke(cli, list(words)).exit_code == 2, words


def test_leaders_without_asking_a_group(ask: Ask, yard: Yard) -> None:
    names = make(yard, "lead", 6)
    found = ask("leaders")
    assert {group["name"] for group in found["groups"]} >= set(names)
    assert sum(found["leaders"].values()) == len(found["groups"])
    group = next(group for group in found["groups"] if group["name"] == names[0])
    assert group["leader"] and group["since_ms"] and group["members"] == [1, 2, 3]
    assert all(group["leader"] == 2 for group in ask("leaders", "--node", "2")["groups"])
    assert [group["name"] for group in ask("leaders", names[1])["groups"]] == [names[1]]
    (row,) = yard.key_metrics([names[0]], 1)
    assert row["commit"] >= 1 and row["membership"] == "voter"


def test_watching(cluster: LocalCluster, ask: Ask) -> None:
    words = ["status", "--watch", "--interval", "0.1", "--servers", cluster.addresses[0]]
    done = CliRunner().invoke(cli, [*words, "--count", "3", "--json"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["ok"] for line in lines] == [True] * 3
    assert not lines[0]["rates"] and lines[2]["rates"]["1"]["fdatasyncs_per_s"] >= 0
    shown = CliRunner().invoke(cli, [*words, "--count", "2"])
    assert shown.exit_code == 0 and "rates" in shown.stdout
    # Ctrl-C is the usual end, and no failure, also of a look that nobody will see.
    process = subprocess.Popen([*COMMAND, *words, "--interval", "1e300", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and json.loads(process.stdout.readline())["ok"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_campaigning(ask: Ask, yard: Yard) -> None:
    names = make(yard, "camp", 1)
    lead(yard, names[0], 2)
    assert reach(lambda: ask("campaign", names[0], "--node", "2", code=None).get("leader") == 2)

    def denied() -> bool:
        """Who follows hears a leader, and wins only where that stands still."""
        leader = board(yard, "camp")[names[0]].leader
        found = ask("campaign", names[0], "--node", str(leader % 3 + 1), "--wait", "0.3", code=None)
        return not found["ok"] and found["leader"] in (0, leader)

    assert reach(denied)
    assert ask("campaign", "absent", "--node", "1", code=1)["error"]["code"] == "unknown_group"
    assert ask("skip", names[0], "--index", "1", "--ordinal", "0", code=1)["error"]["code"] == "refused"


@pytest.mark.long
def test_a_dead_node_is_replaced(cluster: LocalCluster, ask: Ask, yard: Yard) -> None:
    names = make(yard, "dead", 10)
    for name in names[:5]:
        lead(yard, name, 3)
    cluster.kill9(3)
    try:
        assert reach(lambda: all(row.leader not in (0, 3) for row in board(yard, "dead").values()))
        found = ask("members", "replace", "--node", "3", "--with", "4")
        assert (found["done"], found["missing"]) == (10, [3])
        assert ask("leaders", code=1)["missing"] == [3]
        assert ask("status", "--watch", "--count", "1", code=1)["missing"] == [3]
        assert voters(yard, "dead") == {(1, 2, 4)}
        for name in names:
            assert yard.log(name).append(b"", b"more") == 1
            assert reach(partial(holds, yard, name, 2))
    finally:
        cluster.restart(3)


@pytest.mark.long
def test_a_log_whose_quorum_is_lost_is_shrunk_by_force(cluster: LocalCluster, ask: Ask, yard: Yard) -> None:
    names = make(yard, "lost", 2, (1, 2, 3))
    assert ask("members", "show", names[0])["members"] == [1, 2, 3]
    for name in names:
        lead(yard, name, 1)
    words = ["force-shrink", names[0], "--node", "1"]
    assert CliRunner().invoke(cli, [*words, "--servers", cluster.addresses[0]]).exit_code == 2, "not without the flag"
    cluster.kill9(2, 3)
    try:
        assert ask(*words, "--yes-the-quorum-is-lost")["index"] > 1
        log = yard.log(names[0])
        assert log.append(b"", b"after") == 1
        assert log.read(0).payload == names[0].encode()
        assert ask("members", "add", names[0], "--node", "4")["done"] == 1
        assert board(yard, "lost")[names[0]].voters == (1, 4)
        assert reach(partial(holds, yard, names[0], 2))
    finally:
        cluster.restart(2)
        cluster.restart(3)
    # Who comes back finds itself outside, and takes nothing with it.
    assert reach(lambda: all(names[0] not in {row["name"] for row in yard.list(node)} for node in (2, 3)))
    assert log.append(b"", b"still") == 2
    assert board(yard, "lost")[names[0]].voters == (1, 4)
    # The other log was left alone, and goes on with its quorum.
    assert yard.log(names[1]).append(b"", b"more") == 1
