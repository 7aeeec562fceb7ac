"""`logyard etcd` as a process: etcd's flags, a restart after a kill, several nodes, a cluster that is there already."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from click.testing import CliRunner

from logyard.client.aio import Yard, connect
from logyard.engine.disk.lock import lock_directory
from logyard.protocol.errors import BadRequest
from logyard.service import local_cluster
from logyard.service.cli.root import cli
from logyard.service.etcd import launcher
from logyard.service.etcd.cluster import MEMBERS
from logyard.service.etcd.flags import NATIVE_OFFSET, Flags, native_place, parse_flags
from logyard.service.etcd.gateway import Gateway, Limits, Member
from logyard.service.etcd.serving import create_group, serve
from tests.engine.host.cluster import until

from ..kv.test_verbs import served
from .server import Asking, EtcdServer, data, etcd_server, spawned

T = TypeVar("T")


def flags(*words: str, **environ: str) -> Flags:
    return parse_flags(words, environ)


def test_flags_are_read_as_etcd_reads_them() -> None:
    found = flags(
        "--name=infra1", "-data-dir", "/x", "--listen-client-urls", "http://localhost:1,http://[::1]:2",
        "--initial-cluster", "infra1=http://127.0.0.1:2380,infra0=http://127.0.0.1:12380",
        "--initial-cluster-state=existing", "--auto-compaction-retention=1h30m", "--snapshot-count=1",
        "--heartbeat-interval", "50", "--election-timeout", "500", "--log-level=debug", "--initial-cluster-token=",
    )  # fmt: skip
    assert (found.name, found.data_dir, found.is_new, found.level) == ("infra1", "/x", False, "debug")
    assert found.binds == ["127.0.0.1:1", "[::1]:2"] and found.token == "etcd-cluster"
    assert found.names == ["infra0", "infra1"] and found.peer_url == "http://127.0.0.1:2380"
    assert str(native_place(found.peer_url)) == "127.0.0.1:3380" and native_place("http://[::1]:65000").port == 64000
    assert found.retention == 5400 and not found.by_revision and not found.warnings
    assert found.limits == {"snapshot_entries": 16, "liveness_interval_ms": 50, "liveness_timeout_ms": 500}
    by_revision = flags("--auto-compaction-mode=revision", "--auto-compaction-retention=1000")
    assert by_revision.by_revision and by_revision.retention == 1000
    assert flags("--auto-compaction-retention=2").retention == 7200
    assert found.request_s == 6 and flags().request_s == 7
    assert flags().data_dir == "default.etcd" and flags().binds == ["127.0.0.1:2379"]


def test_notifications_of_progress_come_as_seldom_as_etcds() -> None:
    """0 is etcd's own interval, and no other one is below what it takes."""
    for text, seconds in (("0s", 600.0), ("1ms", 0.1), ("100ms", 0.1), ("2s", 2.0)):
        assert flags(f"--watch-progress-notify-interval={text}").progress_s == seconds
    assert flags("--experimental-watch-progress-notify-interval=1ms").progress_s == 0.1
    assert flags().progress_s == 600.0


def test_the_environment_counts_and_a_flag_wins() -> None:
    found = flags("--name", "flag", ETCD_NAME="variable", ETCD_MAX_TXN_OPS="7", HOME="/", ETCD_SOMETHING="else")
    assert found.name == "flag" and found.txn_operations == 7
    assert found.warnings == ("--something is unknown and is ignored",)


def test_what_means_nothing_is_warned_about() -> None:
    found = flags("--enable-v2", "--quota-backend-bytes=1", "--nonsense", "word", "--logger=zap", "stray")
    assert found.warnings == (
        "'stray' is no flag and is ignored",
        "--enable-v2 means nothing here and is ignored",
        "--nonsense is unknown and is ignored",
        "--quota-backend-bytes means nothing here and is ignored",
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--listen-client-urls=http://0.0.0.0:2379",), ("--listen-client-urls=https://127.0.0.1:2379",),
        ("--listen-peer-urls=http://10.0.0.1:2380",), ("--listen-client-urls=127.0.0.1",), ("--cert-file=x",),
        ("--client-cert-auth",), ("--config-file", "x"), ("--force-new-cluster",), ("--name",), ("--max-txn-ops=0",),
        ("--initial-cluster=a=http://127.0.0.1:1",), ("--initial-cluster=default",), ("--log-level=loud",),
        ("--initial-cluster-state=old",), ("--auto-compaction-retention=soon",), ("--auto-compaction-mode=never",),
        ("--initial-cluster=default=http://127.0.0.1:1,default=http://127.0.0.1:2",),
        ("--auto-compaction-mode=revision", "--auto-compaction-retention=1h"),
        ("--listen-client-urls=http://127.0.0.1:99999",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_cannot_be_done_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest):
        flags(*words)


def test_bad_flags_end_it_with_2(tmp_path: Path) -> None:
    with spawned(tmp_path, "--listen-client-urls=http://0.0.0.0:2379") as process:
        assert process.wait(60) == 2
    assert "loopback" in (tmp_path / "errors.txt").read_text()


def refusal(directory: Path, *words: str) -> str:
    """The one line with which it ends, at once, with 1."""
    with spawned(directory, *words) as process:
        assert process.wait(60) == 1
    (line,) = [one for one in (directory / "errors.txt").read_text().splitlines() if not one.startswith("{")]
    return line


def said(directory: Path, text: str, process: subprocess.Popen[bytes]) -> str:
    """What it wrote to standard error, as soon as `text` is in it."""
    with (directory / "errors.txt").open() as lines:
        found = ""
        while text not in found:
            assert process.poll() is None, found
            found += lines.read()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_it_serves_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """A service manager stops a gateway whose cluster is not there: trio said that strange things would happen."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        # It takes connections, and never answers.
        port = held.getsockname()[1]
        with spawned(tmp_path, f"--servers=127.0.0.1:{port}", "--listen-client-urls=http://127.0.0.1:0") as process:
            waits = said(tmp_path, "answers yet", process)
            assert f"none of --servers 127.0.0.1:{port}" in waits
            process.send_signal(number)
            assert process.wait(60) == 0
    errors = (tmp_path / "errors.txt").read_text()
    assert "stopped before it served" in errors and "Traceback" not in errors and "abandoned" not in errors
    assert all(line.startswith("{") for line in errors.splitlines()), errors


def test_a_signal_while_its_node_waits_for_the_one_before_ends_both(tmp_path: Path) -> None:
    """The directory is a node's that was started by hand: the log says what is waited for."""
    where = tmp_path / "data/data"
    where.mkdir(parents=True)
    lock = lock_directory(str(where))
    try:
        with spawned(tmp_path, "--listen-client-urls=http://127.0.0.1:0") as process:
            waits = said(tmp_path, "waiting up to", process)
            assert f"{where} is in use by process {os.getpid()}" in waits
            process.terminate()
            assert process.wait(60) == 0
    finally:
        os.close(lock)
    errors = (tmp_path / "errors.txt").read_text()
    assert "stopped before it served" in errors and "Traceback" not in errors


def test_a_directory_in_use_is_refused_at_once_and_its_node_toml_stays(tmp_path: Path) -> None:
    """It waited 17 s, and the second had written its own configuration over the first one's by then."""
    with etcd_server(tmp_path) as server:
        written = (tmp_path / "data/node.toml").read_text()
        with spawned(tmp_path / "second", "--data-dir", str(tmp_path / "data")) as second:
            began = time.monotonic()
            assert second.wait(60) == 1
            assert time.monotonic() - began < launcher.TAKE_OVER_S / 2
        line = (tmp_path / "second/errors.txt").read_text().splitlines()[-1]
        assert line == (
            f"logyard etcd: --data-dir {tmp_path / 'data'} is in use by process {server.process.pid}; stop it first"
        )
        assert (tmp_path / "data/node.toml").read_text() == written


def test_what_it_cannot_have_is_named_with_its_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        found = refusal(tmp_path / "port", f"--listen-client-urls={url}")
        assert found == f"logyard etcd: --listen-client-urls {url}: Address already in use"
    assert not (tmp_path / "port/data").exists(), "nothing was begun"
    any_port = "--listen-client-urls=http://127.0.0.1:0"
    found = refusal(tmp_path / "directory", any_port, "--data-dir=/proc/x")
    assert found == "logyard etcd: --data-dir /proc/x: No such file or directory"
    (tmp_path / "node/wal").mkdir(parents=True)
    found = refusal(tmp_path / "of-a-node", any_port, "--data-dir", str(tmp_path / "node"))
    assert found.startswith(f"logyard etcd: --data-dir {tmp_path / 'node'} is the data directory of a node")
    assert [one.name for one in (tmp_path / "node").iterdir()] == ["wal"], "nothing was written there"


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_the_version_is_printed_behind_any_flag(word: str) -> None:
    done = CliRunner().invoke(cli, ["etcd", "--quota-backend-bytes", "10", "--data-dir", "/proc/x", word])
    assert done.exit_code == 0
    assert done.output.startswith("etcd Version: 3." if word == "--version" else "Usage: ")


def test_it_comes_back_after_a_kill_with_what_it_had(tmp_path: Path) -> None:
    with etcd_server(tmp_path, "--unsafe-no-fsync", environment={"ETCD_NAME": "one"}) as server:
        assert '"ready to serve client requests"' in server.lines and "--unsafe-no-fsync means nothing" in server.lines
        put = server.call("/v3/kv/put", key=b"a", value=b"kept")
        assert server.call("/v3/cluster/member/list")["members"][0]["name"] == "one"
        with server.watch(b"a") as answers:
            assert next(answers)["result"]["created"] is True
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(60)
            with suppress(http.client.HTTPException, OSError):
                assert next(answers, None) is None, "a cut is no answer"
    with etcd_server(tmp_path, environment={"ETCD_NAME": "one"}) as server:
        found = server.call("/v3/kv/range", key=b"a")
        assert data(found["kvs"][0]["value"]) == b"kept"
        assert found["header"]["cluster_id"] == put["header"]["cluster_id"]
        with server.watch(b"a") as answers:
            assert next(answers)["result"]["created"] is True
            assert server.stop() == 0
            assert list(answers) == [], "a stream ends with its last chunk"


@pytest.mark.long
def test_a_client_that_reads_nothing_does_not_hold_the_process(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server, socket.create_connection((server.host, server.port)) as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"create_request": {"key": "YQ=="}}).encode()
        idle.sendall(b"POST /v3/watch HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert b"200" in idle.recv(100)
        for _ in range(12):
            server.call("/v3/kv/put", key=b"a", value=bytes(1_000_000))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "reads nothing" in server.lines


@pytest.mark.long
def test_another_gateway_in_front_of_the_same_cluster(tmp_path: Path) -> None:
    with etcd_server(tmp_path, "--auto-compaction-retention=500ms") as first:
        native = tomllib.loads((tmp_path / "data/node.toml").read_text())["node"]["client_listen"]
        flags_ = ("--servers", native, "--group=etcd", "--name=second")
        with etcd_server(tmp_path / "second", *flags_) as second:
            old = int(first.call("/v3/kv/put", key=b"a", value=b"1")["header"]["revision"])
            assert data(second.call("/v3/kv/range", key=b"a")["kvs"][0]["value"]) == b"1"
            # Until what was there half a second ago is all that is kept.
            status = 200
            while status == 200:
                first.call("/v3/kv/put", key=b"a", value=b"2")
                status, answer = second.ask("/v3/kv/range", {"key": b"a", "revision": old})
            assert (status, answer["code"]) == (400, 11)
            members: list[dict[str, Any]] = []
            while len(members) < 2:
                members = second.call("/v3/cluster/member/list")["members"]
            assert [(one["name"], one["clientURLs"]) for one in members] == [
                ("default", [first.url]), ("second", [second.url])]  # fmt: skip
            assert second.stop() == 0
        assert first.call("/v3/kv/range", key=b"a")["count"] == "1"


def free_peers(count: int) -> list[int]:
    """Peer ports that are free, with those of the nodes' own clients: of this worker's."""
    low, high = local_cluster.PORTS
    bases = list(range(low, high - NATIVE_OFFSET - count))
    random.shuffle(bases)
    for base in bases:
        ports = [base + number for number in range(count)]
        with ExitStack() as held:
            try:
                for port in (*ports, *(native_place(f"http://127.0.0.1:{port}").port for port in ports)):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return ports
    raise AssertionError("no ports")


def test_three_nodes_make_one_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    names = ("a", "b", "c")
    urls = [f"http://127.0.0.1:{port}" for port in free_peers(3)]
    cluster = "--initial-cluster=" + ",".join(f"{name}={url}" for name, url in zip(names, urls, strict=True))
    with ExitStack() as running:
        started = {
            name: running.enter_context(
                spawned(tmp_path / name, f"--name={name}", cluster, "--listen-client-urls=http://127.0.0.1:0")
            )
            for name in names
        }
        servers = {name: EtcdServer(process, tmp_path / name / "errors.txt") for name, process in started.items()}
        servers["a"].call("/v3/kv/put", key=b"k", value=b"1")
        found = [server.call("/v3/kv/range", key=b"k") for server in servers.values()]
        assert {data(one["kvs"][0]["value"]) for one in found} == {b"1"}
        assert len({one["header"]["cluster_id"] for one in found}) == 1
        assert len({one["header"]["member_id"] for one in found}) == 3
        assert (tmp_path / "state/logyard/etcd-peer.secret").stat().st_mode & 0o777 == 0o600
        status = servers["b"].call("/v3/maintenance/status")
        members = servers["c"].call("/v3/cluster/member/list")["members"]
        assert [(one["name"], one["peerURLs"]) for one in members] == [
            (name, [url]) for name, url in zip(names, urls, strict=True)
        ]
        (leader,) = [one["name"] for one in members if one["ID"] == status["leader"]]
        left = [server for name, server in servers.items() if name != leader]
        with left[0].watch(b"k", start_revision=1) as answers:
            assert next(answers)["result"]["created"] is True
            servers[leader].process.send_signal(signal.SIGKILL)
            left[1].call("/v3/kv/put", key=b"k", value=b"2")
            seen = [data(next(answers)["result"]["events"][0]["kv"]["value"]) for _ in range(2)]
        assert seen == [b"1", b"2"]


@asynccontextmanager
async def gateway(yard: Yard, request_s: float = 7.0, **limits: int) -> AsyncIterator[Asking]:
    """A gateway in this process, in front of the group "kv"."""
    made = Gateway(yard.kv("kv"), yard.kv(MEMBERS), limits=Limits(request_s=request_s, **limits))
    stop = trio.Event()
    await create_group(yard, "kv", True)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, made, ["127.0.0.1:0"], Member("default"), stop.wait))
        yield Asking(urls[0])
        stop.set()


async def blocking(call: Callable[..., T], *arguments: Any, **fields: Any) -> T:
    return await trio.to_thread.run_sync(partial(call, *arguments, **fields))


async def test_writes_and_watches_go_on_over_a_leader_change(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, _, yard), gateway(yard) as asking:
        with ExitStack() as open_:
            answers = await blocking(open_.enter_context, asking.watch(b"k"))
            assert (await blocking(next, answers))["result"]["created"] is True
            lease = (await blocking(asking.call, "/v3/lease/grant", TTL=600))["ID"]
            for number in range(12):
                await blocking(asking.call, "/v3/kv/put", key=b"k", value=b"%d" % number, lease=lease)
                if number % 4 == 2:
                    leader = next(one for one in run.ids if run.member(one, "kv").raft.leader == one)
                    await run.lead(leader % 3 + 1, "kv")
            seen = [await blocking(next, answers) for _ in range(12)]
        found = [event["kv"] for one in seen for event in one["result"]["events"]]
        assert [data(one["value"]) for one in found] == [b"%d" % number for number in range(12)]
        assert [one["version"] for one in found] == [str(number) for number in range(1, 13)], "none was put twice"
        left = await blocking(asking.call, "/v3/lease/timetolive", ID=lease, keys=True)
        assert [data(one) for one in left["keys"]] == [b"k"] and int(left["TTL"]) > 0
        assert int(left["header"]["revision"]) == int(seen[-1]["result"]["header"]["revision"])


async def test_the_term_of_a_header_is_that_of_the_answer(tmp_path: Path) -> None:
    """Clients that change gateways compare the terms: patroni takes one that is lower for a node that fell behind."""
    async with served(tmp_path, 3) as (run, doors, _), AsyncExitStack() as open_:
        askings = []
        for _ in range(3):
            own = await open_.enter_async_context(connect(list(doors.addresses.values())))
            askings.append(await open_.enter_async_context(gateway(own)))
        reads: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v3/kv/range", {"key": b"k"}), ("/v3/cluster/member/list", {}), ("/v3/lease/leases", {}),
        )  # fmt: skip
        writes = (
            ("/v3/kv/put", {"key": b"k"}), ("/v3/kv/txn", {"success": [{"request_put": {"key": b"k"}}]}),
            ("/v3/lease/grant", {"TTL": 60}),
        )  # fmt: skip
        seen = 0
        for number in range(6):
            leader = next(one for one in run.ids if run.member(one, "kv").raft.leader == one)
            await run.lead(leader % 3 + 1, "kv")
            for at in range(3):
                # What one gateway read is known to the others when they have written.
                path, fields = (writes if at else reads)[number % 3]
                term = int((await blocking(askings[(number + at) % 3].call, path, **fields))["header"]["raft_term"])
                assert term >= seen, f"{path} says term {term} after {seen}"
                seen = term
            assert seen == max(run.member(one, "kv").raft.term for one in run.ids)


async def test_what_is_asked_of_an_ill_cluster_is_answered_without_a_quorum(tmp_path: Path) -> None:
    """An operator asks for these when a cluster is ill: they waited for a leader for 30 s, and had none."""
    async with served(tmp_path, 3) as (run, doors, yard), gateway(yard, request_s=1.5) as asking:
        put = await blocking(asking.call, "/v3/kv/put", key=b"k", value=b"v")
        revision = int(put["header"]["revision"])
        members: list[dict[str, Any]] = []
        while not members:
            members = (await blocking(asking.call, "/v3/cluster/member/list"))["members"]
        assert "errors" not in await blocking(asking.call, "/v3/maintenance/status")
        await run.applied("kv")
        await run.applied(MEMBERS)
        for number in (2, 3):
            await doors.crash(number)
        await until(lambda: run.member(1, "kv").raft.leader == 0, "the one that is left knows no leader")
        began = trio.current_time()
        status = await blocking(asking.call, "/v3/maintenance/status")
        assert status["errors"] == ["etcdserver: no leader"] and "leader" not in status
        assert int(status["header"]["revision"]) == revision and int(status["header"]["raft_term"]) > 0
        assert (await blocking(asking.call, "/v3/cluster/member/list"))["members"] == members
        assert "alarms" not in await blocking(asking.call, "/v3/maintenance/alarm")
        assert trio.current_time() - began < 5, (
            "three answers, each about as soon as it is seen that there is no quorum"
        )
        for path, fields in (("/v3/kv/put", {"key": b"k"}), ("/v3/cluster/member/list", {"linearizable": True})):
            began = trio.current_time()
            status_code, code, said = await blocking(asking.refusal, path, **fields)
            assert (status_code, code) == (503, 14) and ("no leader" in said or "timed out" in said), said
            assert trio.current_time() - began < 10, "within the time that etcd gives a request, not 30 s"
