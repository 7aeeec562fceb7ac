"""Nodes that join by invitation: real processes, a data directory that keeps its number, and no restart of others."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.client.sync import Yard, connect_sync
from logyard.protocol.errors import UnknownGroup
from logyard.service.catalog.join import joined_config, said
from logyard.service.catalog.places import joined
from logyard.service.certificates import Authority
from logyard.service.cli.root import cli
from logyard.service.local_cluster import ClusterFailed, LocalCluster, LocalNode, free_ports

PATIENCE_S = 60.0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until something holds."""
    pause, deadline = threading.Event().wait, time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause(0.05)


def run(*arguments: str) -> Any:
    """What a command says with --json."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[tuple[LocalCluster, Yard]]:
    with LocalCluster(tmp_path, 1, catalog=True) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            yield cluster, yard


def invited(cluster: LocalCluster) -> str:
    """A token, once there is a catalogue."""
    found: dict[str, Any] = {}

    def told() -> bool:
        found.update(run("nodes", "invite", "--servers", cluster.nodes[1].client_address))
        return bool(found["ok"])

    until(told, "there is a catalogue")
    return str(found["token"])


def states(cluster: LocalCluster, node: int) -> dict[int, str]:
    """What a node knows of the nodes."""
    found = run("nodes", "list", "--servers", cluster.nodes[node].client_address)
    return {row["node"]: row["state"] for row in found.get("nodes", ())}


def test_a_cluster_grows_from_one_node_to_three(growing: tuple[LocalCluster, Yard]) -> None:
    cluster, yard = growing
    first, asked = cluster.nodes[1].pids[:], cluster.nodes[1].client_address
    token = invited(cluster)
    with pytest.raises(ClusterFailed, match="no such invitation"):
        cluster.join(9, "guessed", asked)
    del cluster.nodes[9]
    cluster.join(2, token, asked)
    with pytest.raises(ClusterFailed, match="another directory has used it"):
        cluster.join(9, token, asked)
    del cluster.nodes[9]
    cluster.join(3, invited(cluster), asked)
    for node in (1, 2, 3):
        until(lambda node=node: states(cluster, node) == dict.fromkeys((1, 2, 3), "active"), f"node {node} knows all")  # type: ignore[misc]
    assert run("create", "orders", "--servers", cluster.nodes[1].client_address)["ok"]
    assert yard.members("orders")["members"] == [1, 2, 3] and cluster.nodes[1].pids == first
    yard.log("orders").append(b"x", b"y")

    # The founder's configuration knows nobody: what it learnt stands in its directory.
    cluster.kill9(1)
    cluster.kill9(3)
    for node in (1, 3):
        cluster.spawn(node)
        cluster.wait_ready(node)
    until(lambda: states(cluster, 1) == dict.fromkeys((1, 2, 3), "active"), "they meet again")
    yard.log("orders").append(b"x", b"z")
    shown = run("nodes", "list", "--servers", cluster.nodes[1].client_address)
    assert [row["node"] for row in shown["nodes"]] == [1, 2, 3] and shown["nodes"][0]["held"] == 1


def test_a_node_that_joins_may_listen_on_every_address(tmp_path: Path) -> None:
    """It has no number yet that [clients] could say its address under."""
    tls = "ca = 'ca.pem'\ncertificate = 'c.pem'\nkey = 'k.pem'\n"
    path = tmp_path / "node.toml"
    path.write_text(
        "[node]\ndirectory = 'data'\nclient_listen = '0.0.0.0:7004'\npeer_listen = '0.0.0.0:7104'\n"
        f"client_address = 'node-4:7204'\n[tls]\n{tls}[client_tls]\n{tls}"
    )
    (tmp_path / "data").mkdir()
    told = {"directory": 7, "node": 4, "cluster": "c", "nodes": [[1, "10.0.0.1:7101", "10.0.0.1:7001"]]}
    joined(tmp_path / "data").write_text(json.dumps(told))
    config = joined_config(path, {}, None)
    assert said(config) == {"peer": "node-4:7104", "client": "node-4:7204", "directory": 7}
    assert config.client_addresses == {1: ("10.0.0.1", 7001), 4: ("node-4", 7204)}


def test_what_is_of_a_join_is_refused_without_one(tmp_path: Path) -> None:
    """It was read, and nothing was done with it."""
    path = tmp_path / "node.toml"
    path.write_text("[node]\nid = 1\ndirectory = 'data'\n")
    for more in (("--token", "x"), ("--replaces", "3")):
        found = CliRunner().invoke(cli, ["serve", "--config", str(path), *more], env={"LOGYARD_TOKEN": "y"})
        assert found.exit_code == 2 and "--join" in found.stderr, more
    found = CliRunner().invoke(cli, ["serve", "--config", str(path), "--zone", "a"])
    assert found.exit_code == 2 and "catalog" in found.stderr
    for zone in ("\udce9", "z" * 300, ""):
        found = CliRunner().invoke(cli, ["serve", "--config", str(path), "--zone", zone])
        assert found.exit_code == 2 and "zone is a text" in found.stderr, "it goes to the catalogue at each start"


def test_a_node_that_has_moved_says_where_it_is(tmp_path: Path) -> None:
    """Nobody dials it there, so it heard of no leader, and asked nobody."""
    with LocalCluster(tmp_path, 3, catalog=True) as cluster:
        cluster.start()
        asked = cluster.nodes[1].client_address
        for one in (1, 3):
            until(lambda one=one: states(cluster, one) == dict.fromkeys((1, 2, 3), "active"), f"node {one} knows all")  # type: ignore[misc]
        # Drawn while its own are in use.
        node, moved = cluster.nodes[3], f"127.0.0.1:{free_ports(1)[0]}"
        cluster.end(3)
        text = node.config_path.read_text(encoding="utf-8")
        node.config_path.write_text(text.replace(node.peer_address, moved), encoding="utf-8")
        cluster.options[3] = ("--zone", "b")
        cluster.restart(3)

        def told() -> bool:
            rows = run("nodes", "list", "--servers", asked).get("nodes", ())
            return [3, moved, "active", "b"] in [
                [row[key] for key in ("node", "peer", "state", "zone")] for row in rows
            ]

        until(told, "the others know where it is")
        until(lambda: run("create", "orders", "--servers", node.client_address)["ok"], "and it hears them")


@pytest.mark.long
def test_a_node_that_lost_everything_is_replaced_by_one_command(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 3, catalog=True) as cluster:
        cluster.start()
        token = invited(cluster)
        until(lambda: states(cluster, 1) == dict.fromkeys((1, 2, 3), "active"), "it knows its nodes")
        until(lambda: run("create", "orders", "--servers", cluster.nodes[1].client_address)["ok"], "it is made")
        with connect_sync(cluster.addresses) as yard:
            yard.log("orders").append(b"x", b"y")
            cluster.kill9(3)
            lost = cluster.nodes.pop(3)
            shutil.rmtree(lost.data)
            node = cluster.nodes[4] = LocalNode(4, lost.directory, lost.client_address, lost.peer_address)
            text = node.config_path.read_text(encoding="utf-8")
            node.config_path.write_text(text.replace("id = 3\n", "").replace('name = "node-3"\n', ""), encoding="utf-8")
            cluster.environment = {"LOGYARD_TOKEN": token}
            cluster.options[4] = ("--join", cluster.nodes[1].client_address, "--replaces", "3")
            cluster.spawn(4)
            cluster.wait_ready(4)
            until(lambda: yard.leader_view("orders")["voters"] == [1, 2, 4], "its members are its successor's")
            yard.log("orders").append(b"x", b"z")
        until(lambda: states(cluster, 4) == {1: "active", 2: "active", 3: "dead", 4: "active"}, "and all is well")


def test_a_node_joins_under_tls_by_its_own_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(tmp_path, 1, tls=True, catalog=True) as cluster:
        cluster.start()
        files = cluster.client_tls
        assert files is not None
        for key, path in (("CA", files.ca), ("CERT", files.certificate), ("KEY", files.key)):
            monkeypatch.setenv(f"LOGYARD_TLS_{key}", str(path))
        asked = cluster.nodes[1].client_address
        cluster.join(2, invited(cluster), asked)
        until(lambda: states(cluster, 2) == {1: "active", 2: "active"}, "they know one another")
        assert re.search(r"join .*: done, by node 2 at 127\.0\.0\.1:", cluster.nodes[1].log_tail())

        # A certificate of another number than the one that the cluster gave: it says which, and the join holds.
        with pytest.raises(
            ClusterFailed, match=r"for node 9 .* not for node 3 .*tls init DIR --cluster local --nodes 3"
        ):
            cluster.join(9, invited(cluster), asked)
        wrong = cluster.nodes.pop(9)
        node = cluster.nodes[3] = LocalNode(3, wrong.directory, wrong.client_address, wrong.peer_address)
        Authority(tmp_path / "tls", "local").node(3)
        text = node.config_path.read_text(encoding="utf-8")
        node.config_path.write_text(text.replace("node-9.pem", "node-3.pem").replace("node-9-key", "node-3-key"))
        cluster.options[3] = cluster.options[9]
        cluster.restart(3)
        until(lambda: states(cluster, 3) == dict.fromkeys((1, 2, 3), "active"), "and the third")


def test_a_node_that_was_removed_says_so(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 2, catalog=True) as cluster, ExitStack() as stack:
        cluster.start()
        first, second = (cluster.nodes[node].client_address for node in (1, 2))
        until(lambda: states(cluster, 1) == {1: "active", 2: "active"}, "they know one another")
        old = stack.enter_context(connect_sync([first, second], exactly_once=False))
        assert old.nodes() == [1, 2]
        assert run("nodes", "drain", "2", "--servers", first)["ok"]
        until(lambda: run("nodes", "remove", "2", "--servers", first)["ok"], "it has nothing left")
        words = "node 2 was removed from this cluster"
        for life in ("it is there", "it was started again", "it has no copy of the catalogue"):
            until(lambda: words in cluster.nodes[2].log_tail(), "its log says so")
            for asked in (first, second):
                error = run("create", "x", "--members", "1,2", "--servers", asked)["error"]
                assert error["code"] == "refused" and words in error["message"], asked
            cluster.end(2)
            cluster.nodes[2].log_path.write_text("")
            if life == "it was started again":
                shutil.rmtree(cluster.nodes[2].data)
            cluster.restart(2)
        assert run("create", "x", "--members", "1", "--servers", first)["ok"]
        # Who was connected all the while stops naming it when it is gone.
        cluster.end(2)
        with pytest.raises(UnknownGroup):
            old.log("nowhere").latest()
        assert old.nodes() == [1]
        old.create("y")
        # Its configuration names the removed one still.
        cluster.end(1)
        cluster.restart(1)
        until(lambda: run("create", "z", "--servers", first)["ok"], "a log without named members is made")
