"""The verbs against a real cluster of three processes, and the processes' own lives: ready, Ctrl-C, kill, orphans."""

from __future__ import annotations

import base64
import fnmatch
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner

from logyard.client.sync import Log, connect_sync
from logyard.protocol.errors import Gone
from logyard.protocol.records import Record
from logyard.service import local_cluster
from logyard.service.cli.root import cli
from logyard.service.local_cluster import ClusterFailed, LocalCluster, free_ports

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "logyard.service.cli"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3) as found:
        found.start()
        yield found


@pytest.fixture
def ask(cluster: LocalCluster) -> Callable[..., dict[str, Any]]:
    """Run a verb with --json; returns its object, checks the exit code, which may be any where that is None."""

    def run(*words: str, text: str | bytes | None = None, code: int | None = 0) -> dict[str, Any]:
        done = CliRunner().invoke(cli, [*words, "--servers", ",".join(cluster.addresses), "--json"], input=text)
        assert code is None or done.exit_code == code, done.output
        assert len(done.stdout.splitlines()) == 1
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["ok"] == (done.exit_code == 0)
        return found

    return run


def reach(condition: Callable[..., bool], timeout_s: float = 20.0) -> bool:
    """Look until something outside of this process is so."""
    wait, deadline = threading.Event().wait, time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        wait(0.02)
    return True


def transferred(ask: Callable[..., dict[str, Any]], name: str, node: int) -> bool:
    """Hand a leadership over: refused while who is to take it stands still, which a busy machine has it do."""
    return reach(lambda: bool(ask("transfer", name, "--to", str(node), code=None)["ok"]))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rot(cluster: LocalCluster, node: int, body: bytes) -> bool:
    """Flip a bit of a payload in a running node's generations; False: none of them holds it yet."""
    hurt = 0
    for path in (cluster.nodes[node].data / "payloads").glob("gen-*/data.mdb"):
        at = path.read_bytes().find(body)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([body[100] ^ 1]))
            hurt += 1
    assert hurt <= 1
    return hurt == 1


def test_scrub_repairs_what_others_have_and_names_what_is_left(
    ask: Callable[..., dict[str, Any]], cluster: LocalCluster
) -> None:
    body = random.Random(5).randbytes(3000)
    ask("create", "shared")
    ask("append", "shared", text=base64.b64encode(body))
    rows = ask("scrub")["nodes"]
    assert set(rows) == {"1", "2", "3"} and not any(row["findings"] for row in rows.values())
    # Two of three acknowledged the append: the second may have it later.
    assert reach(lambda: bool(ask("compact")) and rot(cluster, 2, base64.b64encode(body)))
    found = ask("scrub", "--node", "2")["nodes"]["2"]
    assert found["last"]["generation"]["repaired"] == 1 and found["findings"][0]["group"] == "shared"
    ask("create", "lonely", "--members", "2")
    lonely = random.Random(6).randbytes(3000)
    ask("append", "lonely", text=base64.b64encode(lonely))
    ask("compact")
    assert rot(cluster, 2, base64.b64encode(lonely))
    (left,) = ask("scrub", "--node", "2", code=1)["nodes"]["2"]["findings"]
    assert left["group"] == "lonely" and not left["repaired"]
    assert ask("status")["nodes"][1]["scrub"]["left"] == 1
    assert ask("scrub", "--node", "2", "--last", code=1)["nodes"]["2"]["findings"] == [left]
    ask("delete", "lonely", "--yes")
    assert not ask("scrub")["nodes"]["2"]["findings"]
    ask("delete", "shared", "--yes")


def test_a_snapshot_is_taken_where_the_log_is(ask: Callable[..., dict[str, Any]]) -> None:
    ask("create", "apart", "--members", "1,2")
    ask("append", "apart", text="one\ntwo\n")
    assert set(ask("snapshot", "apart")["nodes"]) == {"1", "2"}
    assert ask("snapshot", "apart", "nowhere", code=1)["error"]["code"] == "unknown_group"
    ask("delete", "apart", "--yes")


def test_a_log_keeps_what_it_is_told_and_is_read_from_a_time_on(ask: Callable[..., dict[str, Any]]) -> None:
    ask("create", "kept")
    ask("append", "kept", text="".join(f"{number}\n" for number in range(8)))
    for number in range(8, 40):
        ask("append", "kept", text=f"{number}\n")
    stamps = [record["timestamp"] for record in ask("read", "kept")["records"]]
    found = ask("read", "kept", "--since", str(stamps[20]), "--count", "2")["records"]
    assert [record["offset"] for record in found] == [stamps.index(stamps[20]), stamps.index(stamps[20]) + 1]
    assert ask("read", "kept", "--since", "2999-01-01")["records"] == []
    done = ask("retain", "kept", "--records", "16", "--age", "7d", "--bytes", "1GiB")
    assert done["age_s"] == 7 * 86_400 and done["bytes"] == 1 << 30
    for number in range(40, 60):
        ask("append", "kept", text=f"{number}\n")
    shown = ask("describe", "kept")
    assert shown["retention"] == {"ms": 604_800_000, "bytes": 1 << 30, "records": 16} and shown["producers"] == 0
    assert 16 <= shown["end"] - shown["start"] <= 18
    assert ask("retain", "kept")["records"] == 0
    for words in (
        ("retain", "kept", "--age", "soon"),
        ("retain", "kept", "--bytes", "much"),
        ("read", "kept", "--since", "x"),
    ):
        assert ask(*words, code=2)["error"]["code"]
    assert ask("read", "kept", "--since", "1", "--from", "1", code=2)["error"]["code"]
    ask("create", "profiles", "--compact", "key")
    for text in ("one", "two"):
        ask("append", "profiles", "--key", "ann", text=text)
    assert [record["payload"] for record in ask("read", "profiles")["records"]] == ["two"]
    assert "needs a key" in ask("append", "profiles", text="x", code=2)["error"]["message"]
    ask("delete", "kept", "profiles", "--yes")


def test_a_log_lives_through_its_verbs(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert ask("create", "orders", "other")["created"] == ["orders", "other"]
    assert {log["name"] for log in ask("list", "--prefix", "or")["logs"]} == {"orders"}
    done = ask("append", "orders", "--metadata", "m", text="first\nsecond\n")
    assert (done["first"], done["last"], done["records"]) == (0, 1, 2)
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(range(256)) * 1000)
    assert ask("append", "orders", str(blob))["first"] == 2
    records = ask("read", "orders")["records"]
    assert [record["offset"] for record in records] == [0, 1, 2]
    assert records[0] | {"metadata": "m", "payload": "first", "size": 5} == records[0]
    assert records[2]["metadata"] == str(blob)
    assert "payload_base64" in records[2]
    for node in (1, 2, 3):
        assert reach(lambda node=node: len(ask("read", "orders", "--node", str(node))["records"]) == 3)
    assert [record["offset"] for record in ask("read", "orders", "--from", "1", "--count", "1")["records"]] == [1]
    assert "payload" not in ask("read", "orders", "--metadata-only")["records"][0]
    ask("truncate", "orders", "--before", "2")
    assert [record["offset"] for record in ask("read", "orders")["records"]] == [2]
    assert ask("describe", "orders")["start"] == 2
    ask("delete", "other", "--yes")
    assert reach(lambda: [log["name"] for log in ask("list")["logs"]] == ["orders"])
    ask("delete", "orders", "--yes", "--force-on", "2")
    assert reach(lambda: not ask("list")["logs"])


def test_a_queue_lives_through_its_verbs(
    cluster: LocalCluster, ask: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def rows(*words: str, text: str = "") -> list[list[str]]:
        done = CliRunner().invoke(cli, ["queue", *words, "--servers", ",".join(cluster.addresses)], input=text)
        assert done.exit_code == 0, done.output
        return [line.split("\t") for line in done.stdout.splitlines()]

    made = ask("queue", "create", "jobs", "--delivery-limit", "3", "--max-length", "50", "--overflow", "reject")
    assert made["created"] == ["jobs"]
    assert ask("queue", "create", "odd", "--members", "9", code=2)["error"]["code"] == "bad_request"
    assert ask("describe", "jobs")["machine"] == "queue"
    done = ask("queue", "publish", "jobs", "--metadata", "m", text="first\nsec\\o\tnd\n")
    assert (done["messages"], done["first"], done["last"]) == (2, 1, 2)
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(range(256)) * 100)
    assert rows("publish", "jobs", str(blob), "--priority", "high") == [["1", "3", "3"]]
    ask("queue", "publish", "jobs", "--delay", "3600", "--whole", text="one day")
    assert ask("queue", "publish", "jobs", text="x\n" * 48, code=1)["error"]["code"] == "queue_full"
    seen = ask("queue", "consume", "jobs", "--requeue", "--count", "3", "--wait", "20")["messages"]
    assert [one["id"] for one in seen] == [3, 1, 2] and base64.b64decode(seen[0]["body_base64"]) == blob.read_bytes()
    assert seen[1] | {"metadata": "m", "body": "first", "deliveries": 0} == seen[1]
    raw = CliRunner().invoke(
        cli,
        ["queue", "consume", "jobs", "--raw", "--count", "1", "--wait", "20", "--servers", ",".join(cluster.addresses)],
    )
    assert raw.exit_code == 0 and raw.stdout_bytes == blob.read_bytes()
    rest = rows("consume", "jobs", "--count", "2", "--wait", "20")
    assert rest == [["1", "0", "m", "first"], ["2", "0", "m", "sec\\\\o\\tnd"]]
    stats = ask("queue", "stats", "jobs")["queues"]["jobs"]
    assert (stats["ready"], stats["delayed"], stats["acknowledged"], stats["consumers"]) == (0, 1, 3, 0)
    assert ["jobs", "delayed", "1"] in rows("stats", "jobs")
    assert ask("queue", "purge", "jobs", "--yes")["purged"] == 0
    assert rows("purge", "jobs", "--delayed", "--no-ready", "--yes") == [["1"]]
    assert ask("queue", "purge", "jobs", "--no-ready", "--yes", code=2)["error"]["code"] == "bad_request"
    assert ask("queue", "consume", "jobs", "--dead", "--wait", "0.1")["messages"] == []
    assert ask("queue", "stats", "nothing", code=1)["error"]["code"] == "unknown_group"
    ask("delete", "jobs", "--yes")


def test_raw_payloads_and_following(cluster: LocalCluster, ask: Callable[..., dict[str, Any]]) -> None:
    ask("create", "followed")
    servers = ["--servers", cluster.addresses[0]]
    reader = subprocess.Popen(
        [*COMMAND, "read", "followed", "--follow", "--count", "2", "--raw", *servers], stdout=subprocess.PIPE
    )
    ask("append", "followed", "--whole", text=b"\x00one")
    ask("append", "followed", "--whole", text=b"two\n")
    output, _ = reader.communicate(timeout=30)
    assert output == b"\x00onetwo\n"
    assert reader.returncode == 0


def test_payloads_of_any_size_stream_in_and_out(
    cluster: LocalCluster, ask: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    ask("create", "films")
    blob, copy = tmp_path / "blob", tmp_path / "copy"
    blob.write_bytes(random.Random(1).randbytes(9 << 20))
    done = ask("append", "films", "--file", str(blob), "--metadata", "m")
    assert (done["first"], done["records"], done["payload_bytes"]) == (0, 1, 9 << 20)
    ask("append", "films", "--whole", text=blob.read_bytes()[: 2 << 20])
    ask("append", "films", str(blob), str(blob))
    records = ask("read", "films", "--body-to", str(copy))["records"]
    assert [record["size"] for record in records] == [9 << 20, 2 << 20, 9 << 20, 9 << 20]
    assert records[0]["metadata"] == "m" and "payload" not in records[0]
    whole = blob.read_bytes()
    assert copy.read_bytes() == whole + whole[: 2 << 20] + whole + whole
    raw = subprocess.run(
        [*COMMAND, "read", "films", "--from", "2", "--raw", "--servers", cluster.addresses[0]],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert raw.stdout == whole + whole
    [shown] = ask("read", "films", "--from", "1", "--count", "1")["records"]
    assert base64.b64decode(shown["payload_base64"]) == whole[: 2 << 20]
    line = subprocess.run(
        [*COMMAND, "read", "films", "--count", "1", "--servers", cluster.addresses[0]],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert line.stdout.startswith("0\tm\t")


def test_a_file_is_kept_until_all_payloads_came(
    ask: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before")
    kept.chmod(0o640)
    (tmp_path / "link").symlink_to(kept)
    ask("create", "streamed")
    ask("append", "streamed", text="one\ntwo\n")
    for words, error in ((["nowhere"], "unknown_group"), (["streamed", "--from", "7"], "out_of_range")):
        for name in ("kept", "new"):
            for more in ([], ["--follow", "--count", "1"]):
                found = ask("read", *words, "--body-to", str(tmp_path / name), *more, code=1)
                assert found["error"]["code"] == error
    assert kept.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr("logyard.service.cli.logs.write_payload", half_a_payload)
        assert ask("read", "streamed", "--body-to", str(kept), code=1)["error"]["code"] == "gone"
    assert kept.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
    ask("read", "streamed", "--body-to", str(tmp_path / "link"))
    assert kept.read_text() == "onetwo" and kept.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2
    ask("read", "streamed", "--body-to", "/dev/null")
    assert Path("/dev/null").is_char_device()
    ask("read", "streamed", "--body-to", str(kept), "--follow", "--count", "1")
    assert kept.read_text() == "one"
    ask("delete", "streamed", "--yes")


def half_a_payload(_log: Log, _record: Record, _node: int | None, out: BinaryIO) -> None:
    """What a transfer does that is cut."""
    out.write(b"o")
    raise Gone("cut")


def test_looking_after_the_cluster(ask: Callable[..., dict[str, Any]]) -> None:
    ask("create", "kept")
    ask("append", "kept", "--whole", text=b"x" * 100_000)
    ask("snapshot", "kept")
    assert set(ask("compact")["nodes"]) == {"1", "2", "3"}
    found = ask("status")
    assert [node["node"] for node in found["nodes"]] == [1, 2, 3]
    for node in found["nodes"]:
        assert {"pid", "groups", "led", "fdatasyncs", "wal_bytes_live", "payload_disk_bytes"} <= set(node)
    assert len(ask("status", "--node", "2")["nodes"]) == 1
    assert sorted(ask("members", "kept")["members"]) == [1, 2, 3]
    leader = ask("members", "kept")["leader"]
    target = leader % 3 + 1
    assert transferred(ask, "kept", target)
    assert reach(lambda: ask("members", "kept")["leader"] == target)


def test_a_log_is_described_as_one_member_has_it(ask: Callable[..., dict[str, Any]]) -> None:
    ask("create", "seen", "--members", "1,2")
    ask("append", "seen", text="one\n")

    def seen(node: int) -> bool:
        """Both may campaign at any time."""
        found, leader = ask("describe", "seen", "--node", str(node)), ask("describe", "seen")["leader"]
        assert found["node"] == node
        return bool(found["end"] == 1) and found["role"] == ("leader" if node == leader else "follower")

    for node in (1, 2):
        assert reach(lambda node=node: seen(node))
    assert ask("describe", "seen", "--node", "3", code=1)["error"]["code"] == "unknown_group"
    assert "node 9" in ask("describe", "seen", "--node", "9", code=1)["error"]["message"]
    ask("delete", "seen", "--yes")


def test_a_deletion_says_what_went_and_what_did_not(ask: Callable[..., dict[str, Any]], cluster: LocalCluster) -> None:
    ask("create", "first", "second")
    found = ask("delete", "first", "absent", "second", "first", "--yes", code=1)
    assert found["deleted"] == ["first", "second"] and list(found["failed"]) == ["absent"]
    assert found["failed"]["absent"]["code"] == "unknown_group" and found["error"] == found["failed"]["absent"]
    assert ask("delete", "absent", "--yes", code=1) == {"ok": False, "error": found["error"]}
    # Where there is no catalogue a member that has not heard yet takes the old log for the new one.
    assert reach(lambda: not {"first", "second"} & {log["name"] for log in ask("list")["logs"]})
    ask("create", "first")
    words = ["delete", "absent", "first", "--yes", "--servers", cluster.addresses[0]]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 1 and done.stdout == "deleted first\n"
    assert done.stderr == f"error: absent: {found['error']['message']}\n"


def test_errors_are_typed_and_leave_one_line(ask: Callable[..., dict[str, Any]]) -> None:
    assert ask("describe", "absent", code=1)["error"]["code"] == "unknown_group"
    assert ask("truncate", "absent", "--before", "1", code=1)["error"]["code"] == "unknown_group"


def test_every_file_of_a_data_directory_is_on_its_page(
    ask: Callable[..., dict[str, Any]], cluster: LocalCluster
) -> None:
    ask("create", "filed")
    ask("append", "filed", text="one\ntwo\n")
    ask("compact")
    ask("snapshot", "filed")
    page = (ROOT / "docs" / "data-directory.md").read_text("utf-8")
    known = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(known) > 15
    for node in cluster.nodes.values():
        files = [str(path.relative_to(node.data)) for path in node.data.rglob("*") if not path.is_dir()]
        assert len(files) > 8
        assert [name for name in files if not any(fnmatch.fnmatchcase(name, pattern) for pattern in known)] == []
    ask("delete", "filed", "--yes")


def test_no_port_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = local_cluster.PORTS
    monkeypatch.setattr(local_cluster, "PORTS", (low, low + (high - low) // 4))
    ports = free_ports(500)
    assert len({*ports}) == 500


def test_a_second_process_on_the_directory_is_refused(cluster: LocalCluster) -> None:
    config = cluster.nodes[1].config_path
    done = subprocess.run([*COMMAND, "serve", "--config", str(config)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_second_cluster_on_the_directory_says_why_and_nothing_of_before(cluster: LocalCluster) -> None:
    log = cluster.nodes[1].log_path
    with log.open("a") as file:
        file.write("an old line\n")
    second = LocalCluster(cluster.directory, 3)
    said = r"(?s)ended with code 1 at start:\n.*is in use by process"
    with second, pytest.raises(ClusterFailed, match=said) as caught:
        second.start()
    assert "old line" not in str(caught.value) and "old line" in log.read_text()


def free_range(count: int) -> int:
    """The first of so many ports that are free now: tests run beside each other."""
    while True:
        # Of this worker's, below those that the system gives to whoever connects.
        low, high = local_cluster.PORTS
        first = random.randrange(low, high - count)
        try:
            free_ports(count, first)
        except ClusterFailed:
            continue
        return first


def start_up(directory: Path, nodes: int, *more: str) -> tuple[subprocess.Popen[str], list[int]]:
    """`logyard up`; returns it and the nodes' process ids when it said that all are there."""
    said = "is in use"
    # Another test may take one of the ports first.
    while "is in use" in said:
        port = str(free_range(2 * nodes))
        process = subprocess.Popen(
            [*COMMAND, "up", "--nodes", str(nodes), "--dir", str(directory), "--port", port, "--json", *more],
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        pids, said = [], ""
        for line in process.stderr:
            said += line
            if line.startswith("node "):
                pids.append(int(line.split()[4]))
            if line.startswith("Ctrl-C"):
                break
    assert len(pids) == nodes, said
    return process, pids


SIGNALLED_AT_EACH_STEP = """
import signal, sys
from logyard.service.signals import StopSignal

def step(frame, event, argument):
    global left
    left -= 1
    if left == 0:
        signal.raise_signal(signal.SIGINT)
    return step

for at in range(1, 60):
    stopping, left = StopSignal(signal.SIGINT), at
    sys.settrace(step)
    came = stopping.wait(0.01)
    sys.settrace(None)
    assert came or left > 0 or stopping.wait(0)
print("stopped")
"""


def test_a_signal_is_taken_at_any_moment() -> None:
    """Also between two instructions of the wait for it."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED_AT_EACH_STEP], capture_output=True, text=True, timeout=30)
    assert done.stdout == "stopped\n", done.stderr


def test_ctrl_c_stops_up_cleanly_and_its_directory_starts_again(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        process, pids = start_up(tmp_path, 2)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        fields = json.loads(output.splitlines()[-1])
        assert fields["exit_codes"] == {"1": 0, "2": 0}
        assert not any(alive(pid) for pid in pids)


def test_nodes_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    process, pids = start_up(tmp_path, 2)
    process.kill()
    process.communicate(timeout=30)
    assert reach(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.long
def test_up_goes_on_when_a_node_is_killed_and_starts_it_again(tmp_path: Path) -> None:
    """Who tries a failover: the others answer meanwhile, and the node comes back as it was."""
    process, pids = start_up(tmp_path, 3, "--restart-after", "2")
    assert process.stderr is not None
    config = tomllib.loads((tmp_path / "node-1" / "node.toml").read_text())
    with connect_sync([config["node"]["client_listen"]]) as yard:
        yard.create("log")
        assert yard.log("log").append(b"", b"before") == 0
        leader = int(yard.describe("log")["leader"])
        os.kill(pids[leader - 1], signal.SIGKILL)
        assert yard.log("log").append(b"", b"meanwhile") == 1
        said = process.stderr.readline()
        assert said.startswith(f"node {leader} was ended by signal 9; it starts again in 2 s"), said
        again = process.stderr.readline()
        assert again.startswith(f"node {leader} runs again, pid "), again
        assert reach(lambda: yard.log("log").latest(node=leader).end == 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    fields = json.loads(output.splitlines()[-1])
    assert process.returncode == 0 and fields["ok"] and fields["ended"] == [[leader, -9]]
    assert fields["exit_codes"] == {"1": 0, "2": 0, "3": 0}


def test_up_leaves_a_node_down_if_told_so_and_ends_with_the_last(tmp_path: Path) -> None:
    process, pids = start_up(tmp_path, 2, "--restart-after", "0")
    assert process.stderr is not None
    os.kill(pids[0], signal.SIGKILL)
    said = process.stderr.readline()
    assert "stays down" in said and f"logyard serve --config {tmp_path / 'node-1' / 'node.toml'}" in said
    assert alive(pids[1])
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    fields = json.loads(output.splitlines()[-1])
    assert process.returncode == 1 and fields["exit_codes"] == {"1": -9, "2": -9} and not fields["ok"]


PRINTING = """
import sys

print("begun", flush=True)
print("ready x", flush=True)
for _ in range(4000):
    print("y" * 99)
"""


def test_a_node_that_prints_is_not_held_up_and_its_words_are_in_its_log(tmp_path: Path) -> None:
    """A machine of one's own may: 64 KiB later its node stood still."""
    with LocalCluster(tmp_path, 1) as cluster:
        cluster.prepare()
        node = cluster.nodes[1]
        node.run([sys.executable, "-c", PRINTING], dict(os.environ))
        cluster.wait_ready(1)
        assert node.process is not None and node.process.wait(10) == 0
    assert reach(lambda: node.log_path.stat().st_size >= 6 + 4000 * 100)
    assert node.log_path.read_text() == "begun\n" + ("y" * 99 + "\n") * 4000


@pytest.mark.long
def test_a_terminated_bench_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "bench", "idle", "--nodes", "1", "--logs", "1", "--seconds", "60", "--volatile"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert any(line.startswith("settling") for line in process.stdout)
    assert list(tmp_path.iterdir())
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert not list(tmp_path.iterdir())
