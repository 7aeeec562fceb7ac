"""Who is trusted, and what a node says of it: at its start, of administrative verbs, and where it refuses to begin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from logyard import connect_sync
from logyard.protocol.verbs import ADMINISTRATIVE
from logyard.service.door.dispatch import HANDLERS, shown
from logyard.service.local_cluster import ClusterFailed, LocalCluster

ROOT = Path(__file__).resolve().parents[2]
ORDINARY = {
    "catalog",
    "list", "describe", "locate", "poll", "read_body", "latest", "producer", "epoch", "epoch_done",
    "epoch_state", "session_open", "session_close",
    "heartbeat", "session_reply", "wait_applied", "query", "status", "board", "key_metrics", "logs", "changed_logs",
    "scan", "seek",
    "audit", "fetch", "kv_events", "kv_change",
}  # fmt: skip


@pytest.mark.parametrize("tls", [False, True])
def test_a_line_of_the_log_says_who_administered(tmp_path: Path, tls: bool) -> None:
    with LocalCluster(tmp_path, 1, tls=tls) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses, tls=cluster.client_tls) as yard:
            yard.create("orders")
            yard.log("orders").append(b"x")
            yard.log("orders").latest()
            yard.log("orders").truncate(1)
            yard.delete("orders")
        with connect_sync([f"unix:{cluster.nodes[1].data}/admin.sock"]) as yard:
            yard.compact()
        cluster.stop()
        log = cluster.nodes[1].log_path.read_text()
    lines = [line.partition("logyard.audit: ")[2] for line in log.splitlines() if "logyard.audit: " in line]
    who = "client local" if tls else "anybody"
    for line, want in zip(
        lines,
        (
            rf"create names=.*orders.*: done, by {who} at 127\.0\.0\.1:\d+",
            rf"truncate name='orders' before='1': done, by {who} at 127\.0\.0\.1:\d+",
            rf"delete name='orders'.*: done, by {who} at 127\.0\.0\.1:\d+",
            rf"compact : done, by user {os.getuid()} \(process \d+\) at the node's own socket",
        ),
        strict=True,
    ):
        assert re.fullmatch(want, line), line
    assert ("every user of this machine is trusted" in log) is not tls


def test_every_verb_is_administrative_or_is_not() -> None:
    assert set(HANDLERS) == ADMINISTRATIVE | ORDINARY and not ADMINISTRATIVE & ORDINARY


def test_what_a_line_shows_is_short_and_one_line() -> None:
    found = shown({"name": "a\nb" * 500, "specs": [{"name": f"n{number}"} for number in range(9)], "changes": ["x"]})
    assert "\n" not in found and "and 5 more" in found and len(found) < 800


def refusal(cluster: LocalCluster) -> str:
    with pytest.raises(ClusterFailed) as caught:
        cluster.start()
    return str(caught.value)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "one", 2) as one:
        one.start()
        with LocalCluster(tmp_path / "other", 2) as other:
            other.prepare()
            for key in ("client_listen", "peer_listen"):
                config = other.nodes[1].config_path
                text = config.read_text()
                taken = one.nodes[1].client_address if key == "client_listen" else one.nodes[1].peer_address
                config.write_text(re.sub(rf'{key} = ".*"', f'{key} = "{taken}"', text))
                said = refusal(other)
                other.stop()
                assert f"{taken} (node.{key}): Address already in use" in said and "Errno" not in said
                config.write_text(text)


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 1) as cluster:
        cluster.start()
        cluster.stop()
        cluster.nodes[1].data.chmod(0o777)
        assert f"chmod o-w {cluster.nodes[1].data}" in refusal(cluster)
        cluster.nodes[1].data.chmod(0o700)
        cluster.start()


def test_a_tree_without_links_is_not_built(tmp_path: Path) -> None:
    """A wheel of three files was built and installed without a word."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "logyard", tmp_path / "logyard", ignore=lambda *_: ["service", "__pycache__"])
    (tmp_path / "logyard" / "service").write_text("../service")
    done = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "logyard/service is no link" in done.stderr
