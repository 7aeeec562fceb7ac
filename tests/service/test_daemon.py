"""The process of a node and its signals, at moments that its own start and stop choose."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from logyard.client.sync import connect_sync
from logyard.service.local_cluster import LocalCluster

SIGNALLED = """
import os, signal, sys
from functools import partial
from pathlib import Path
from logyard.service import node
from logyard.service.daemon import run_node

where, number = sys.argv[2], int(sys.argv[3])
original = getattr(node.System, where)

def signalled(self, *arguments):
    os.kill(os.getpid(), number)
    return original(self, *arguments)

setattr(node.System, where, signalled)
node.Node.reload_tls = lambda self: print("read again", flush=True) or []
sys.exit(run_node(Path(sys.argv[1]), until_eof=True))
"""


@pytest.mark.parametrize(("where", "first"), [("open", True), ("part", False)])
def test_a_hangup_ends_no_node_that_starts_or_stops(tmp_path: Path, where: str, first: bool) -> None:
    """Who renews certificates does not ask whether the node is recovering; what was missed is read afterwards."""
    config = tmp_path / "node.toml"
    config.write_text(
        '[node]\nid = 1\ndirectory = "data"\nclient_listen = "127.0.0.1:0"\npeer_listen = "127.0.0.1:0"\n'
    )
    command = [sys.executable, "-c", SIGNALLED, str(config), where, str(int(signal.SIGHUP))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        said = []
        for line in process.stdout:
            said.append(line.split()[0])
            if said[-1] == "ready":
                break
        process.stdin.close()
        said += [line.split()[0] for line in process.stdout]
        assert process.wait(30) == 0, process.stderr.read()
    assert said == (["read", "ready"] if first else ["ready", "read"])


STOPPED = """
import os, signal, sys
from pathlib import Path
from logyard.engine import descriptors
from logyard.service import node
from logyard.service.cli.root import Terminate
from logyard.service.daemon import run_node

number = int(sys.argv[3])
owner, name = {"start": (descriptors, "raise_limit"), "stop": (node.System, "part")}[sys.argv[2]]
original = getattr(owner, name)

def signalled(*arguments):
    os.kill(os.getpid(), number)
    return original(*arguments)

setattr(owner, name, signalled)
for each in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, Terminate())
sys.exit(run_node(Path(sys.argv[1]), until_eof=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["start", "stop"])
def test_a_signal_while_a_node_starts_or_stops_is_no_bug_of_ours(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    """systemd sends SIGTERM to every process of a service, and `logyard up` one more to its nodes."""
    config = tmp_path / "node.toml"
    config.write_text(
        '[node]\nid = 1\ndirectory = "data"\nclient_listen = "127.0.0.1:0"\npeer_listen = "127.0.0.1:0"\n'
    )
    command = [sys.executable, "-c", STOPPED, str(config), moment, str(int(number))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        ready = process.stdout.readline().startswith("ready")
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(30) == 0, said
    assert "Traceback" not in said
    assert ready is (moment == "stop" or number == signal.SIGHUP)


def test_port_0_is_a_free_one_that_is_printed_and_told(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[node]\nid = 1\nname = "first"\ndirectory = "data"\nclient_listen = "127.0.0.1:0"\n')
    command = [sys.executable, "-m", "logyard.service.cli", "serve", "--config", str(config), "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        ready = dict(word.split("=") for word in process.stdout.readline().split()[1:])
        try:
            with connect_sync([ready["client"]], timeout=10.0) as yard:
                yard.create("orders")
                assert yard.log("orders").append(b"", payload=b"first") == 0
                assert yard.cluster()["nodes"] == {1: ready["client"]}
                assert yard.status()["name"] == "first"
        finally:
            process.stdin.close()
        assert process.wait(30) == 0


def test_a_directory_that_cannot_be_made_is_named_with_its_key(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(
        '[node]\nid = 1\ndirectory = "/proc/x"\nclient_listen = "127.0.0.1:0"\npeer_listen = "127.0.0.1:0"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "logyard.service.cli", "serve", "--config", str(config)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "logyard serve: [node] directory: /proc/x: No such file or directory"


def test_copies_of_all_stopped_nodes_are_a_backup(tmp_path: Path) -> None:
    """What docs/operating.md says of backups: put back together they are the cluster of that moment."""
    with LocalCluster(tmp_path / "yard", 3) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            for name, machine in (("k", "kv"), ("q", "queue"), ("l", "log")):
                yard.create(name, machine=machine)
            revision = yard.kv("k").put(b"key", b"kept" * 1000).revision
            yard.queue("q").publish(b"kept")
            yard.log("l").append(b"kept")
        cluster.stop()
        shutil.copytree(tmp_path / "yard", tmp_path / "copy")
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            yard.kv("k").delete(b"key")
            yard.queue("q").purge()
            yard.log("l").append(b"by mistake")
    shutil.rmtree(tmp_path / "yard")
    (tmp_path / "copy").rename(tmp_path / "yard")
    with LocalCluster(tmp_path / "yard", 3) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            found = yard.kv("k").get(b"key")
            assert found is not None and (found.value, found.mod_revision) == (b"kept" * 1000, revision)
            assert yard.queue("q").stats()["ready"] == 1
            assert [one.metadata for one in yard.log("l").poll(0)] == [b"kept"]
            yard.log("l").append(b"it goes on")
