"""Real processes whose disks fail, or whose data directories are lost: exit codes, what the others show, the way
back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from logyard import connect_sync
from logyard.client.sync_log import Log
from logyard.protocol.errors import LogyardError
from logyard.service.check.run import check_directory
from logyard.service.cli.root import cli
from logyard.service.daemon import EXIT_OUTDATED, EXIT_WAL_FAILED
from logyard.service.local_cluster import ClusterFailed, LocalCluster
from tests.wipe import wipe

PATIENCE_S = 20.0


def is_at(log: Log, end: int) -> bool:
    """Whether node 1 has all of it."""
    return log.latest(node=1)[1] == end


class FailingCluster(LocalCluster):
    """Its nodes' disks fail while the file `trigger(node)` is there."""

    def trigger(self, node_id: int) -> Path:
        return self.nodes[node_id].directory / "fail-now"

    def spawn(self, node_id: int) -> None:
        node = self.nodes[node_id]
        command = [sys.executable, "-m", "tests.service.failing_node", str(node.config_path)]
        with node.log_path.open("ab") as log:
            node.process = subprocess.Popen(
                [*command, str(self.trigger(node_id))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        node.pids.append(node.process.pid)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FailingCluster]:
    with FailingCluster(tmp_path / "yard", 3) as found:
        found.start()
        yield found


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; client errors are none."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except LogyardError:
            pass
    raise AssertionError(f"never happened: {what}")


def ended(cluster: LocalCluster, node_id: int) -> int:
    process = cluster.nodes[node_id].process
    assert process is not None
    code = process.wait(PATIENCE_S)
    cluster.nodes[node_id].forget()
    return code


def ask(cluster: LocalCluster, *words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*words, "--servers", ",".join(cluster.addresses), "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_failed_sync_ends_a_node_with_its_own_code_and_the_others_go_on(cluster: FailingCluster) -> None:
    with connect_sync(cluster.addresses) as yard:
        names = ["a", "b", "c"]
        yard.create_many(names, members=(1, 2, 3))
        for name in names:
            yard.log(name).append(b"", b"before")
            yard.transfer(name, 1)
        cluster.trigger(1).touch()
        for name in names:
            # The client finds the new leader by itself; nothing acknowledged is lost.
            assert yard.log(name).append(b"", b"after") >= 1
        assert ended(cluster, 1) == EXIT_WAL_FAILED
        assert "acknowledges nothing more" in cluster.nodes[1].log_tail()
        report = check_directory(cluster.nodes[1].data)
        assert "disk_failed" in {finding["kind"] for finding in report["findings"]} and report["ok"]
        with pytest.raises(ClusterFailed, match=f"code {EXIT_WAL_FAILED}"):
            cluster.restart(1)
        cluster.trigger(1).unlink()
        cluster.restart(1)
        for name in names:
            end = yard.log(name).latest()[1]
            log = yard.log(name)
            until(partial(is_at, log, end), f"{name} is whole on node 1")
            assert (yard.log(name).read(0).payload, yard.log(name).read(end - 1).payload) == (b"before", b"after")
        assert not (cluster.nodes[1].data / "failed").exists()


@pytest.mark.long
def test_a_wiped_node_is_refused_shown_and_comes_back_when_it_was_forgotten(cluster: FailingCluster) -> None:
    with connect_sync(cluster.addresses) as yard:
        yard.create("kept", members=(1, 2, 3))
        yard.log("kept").append(b"", b"before")
        until(lambda: yard.log("kept").latest(node=3)[1] == 1, "node 3 has it")
        cluster.kill9(3)
        wipe(cluster.nodes[3].data)
        cluster.spawn(3)
        assert ended(cluster, 3) == EXIT_OUTDATED
        assert "is not the one it had" in cluster.nodes[3].log_tail()
        (row,) = [row for row in yard.status(1)["peers"] if row["node"] == 3]
        assert "is not the one it had" in row["outdated"]
        shown = CliRunner().invoke(cli, ["status", "--servers", cluster.addresses[0], "--node", "1"]).output
        assert "node 3 is refused: its data directory" in shown
        findings = check_directory(cluster.nodes[3].data)["findings"]
        assert [finding["kind"] for finding in findings if finding["severity"] == "damage"] == ["outdated"]
        assert "still a member" in ask(cluster, "forget", "--node", "3", code=1)["failed"]["1"]
        ask(cluster, "members", "remove", "kept", "--node", "3")
        # Each of them must have heard of the removal first.
        until(lambda: [yard.forget_node(3, node) for node in (1, 2)], "both forget it")
        assert ask(cluster, "forget", "--node", "3")["forgotten_by"] == [1, 2]
        wipe(cluster.nodes[3].data)
        cluster.restart(3)
        ask(cluster, "members", "add", "kept", "--node", "3")
        yard.log("kept").append(b"", b"after")
        until(lambda: yard.log("kept").latest(node=3)[1] == 2, "node 3 has all")
