"""Three processes under TLS: what `logyard up --tls` starts, with peers, clients, refusals and SIGHUP."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from logyard.client.sync import connect_sync
from logyard.protocol.tls import make_context
from logyard.service.certificates import Authority
from logyard.service.cli.root import cli
from logyard.service.local_cluster import LocalCluster, tls_files

from .cli.test_cluster import reach


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3, tls=True) as found:
        found.start()
        yield found


def run(cluster: LocalCluster, *words: str, tls: bool = True, code: int = 0) -> dict[str, object]:
    files = cluster.client_tls
    assert files is not None
    environment = {"LOGYARD_TLS_CA": str(files.ca), "LOGYARD_TLS_CERT": str(files.certificate)}
    words = (*words, "--servers", ",".join(cluster.addresses), "--json")
    if tls:
        words += ("--tls-key", str(files.key))
    done = CliRunner().invoke(cli, list(words), env=environment if tls else {})
    assert done.exit_code == code, done.output
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_cluster_under_tls_serves_its_clients(cluster: LocalCluster) -> None:
    run(cluster, "create", "orders")
    with connect_sync(cluster.addresses, tls=cluster.client_tls) as yard:
        log = yard.log("orders")
        bodies = [bytes([n]) * (3 << 20) for n in range(5)]
        assert [log.append(b"m", body) for body in bodies] == list(range(5))
        for node in (1, 2, 3):
            assert reach(lambda node=node: log.latest(node=node).end == 5)
            assert [log.read(n, node=node).payload for n in range(5)] == bodies
    found = run(cluster, "status", tls=False, code=2)
    assert "this port speaks TLS only" in str(found["error"])


def test_hangup_reads_new_certificates(cluster: LocalCluster) -> None:
    node = cluster.nodes[1]
    assert node.process is not None
    good = tls_files(cluster.directory / "tls", "node-1")
    authority = Authority(cluster.directory / "tls", "local")
    other = authority.node(7)
    files = cluster.client_tls
    assert files is not None

    def shown() -> bytes:
        """The certificate that the client door shows now."""
        host, _, port = node.client_address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=10) as raw,
            make_context(files, server=False).wrap_socket(raw) as link,
        ):
            return link.getpeercert(binary_form=True) or b""

    before = shown()
    Path(good.certificate).write_bytes(other.read_bytes())
    node.process.send_signal(signal.SIGHUP)
    assert reach(lambda: "stay as they were" in node.log_tail()), "a certificate without its key is not taken"
    assert shown() == before
    Path(good.key).write_bytes(other.with_name("node-7-key.pem").read_bytes())
    node.process.send_signal(signal.SIGHUP)
    assert reach(lambda: "is for node 7 of cluster 'local', not for node 1" in node.log_tail()), "nor another node's"
    assert shown() == before
    Path(good.certificate).unlink()
    Path(good.key).unlink()
    authority.node(1)
    assert "has mode" not in node.log_path.read_text(), "a key of its owner's alone is not remarked upon"
    Path(good.key).chmod(0o644)
    node.process.send_signal(signal.SIGHUP)
    assert reach(lambda: shown() != before)
    taken = f"certificates for new connections: [tls] {good.certificate}, valid until "
    assert reach(lambda: taken in node.log_tail()), "an operator sees that a renewal took"
    assert reach(lambda: f"[client_tls] key: {good.key} has mode 0644: chmod 600" in node.log_tail())
    run(cluster, "status")


def test_a_node_does_not_start_with_a_certificate_of_another(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 1, tls=True)
    cluster.prepare()
    path = cluster.nodes[1].config_path
    Authority(tmp_path / "tls", "local").node(2)
    path.write_text(path.read_text().replace("node-1.pem", "node-2.pem").replace("node-1-key", "node-2-key"))
    done = CliRunner().invoke(cli, ["serve", "--config", str(path)])
    assert (
        done.exit_code == 2 and "[tls] the certificate is for node 2 of cluster 'local', not for node 1" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1
