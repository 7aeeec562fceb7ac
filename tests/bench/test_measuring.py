"""The instruments of the bench: histogram, bodies, file systems, the arithmetic of the report."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from click.testing import CliRunner

from logyard.bench import settings
from logyard.bench.calibrate import fdatasync_us, filesystem_of, memcpy_mb_per_s
from logyard.bench.histogram import BUCKETS, Histogram, bucket_of, lower_edge
from logyard.bench.load import Load, LoadSpec
from logyard.bench.processes import cpu_seconds, family, resident_bytes
from logyard.bench.report import append_figures, shares
from logyard.bench.terms import Holder, Sent, Terms
from logyard.bench.workload import Workload
from logyard.protocol.frame import RECORD_BYTES_MAX
from logyard.protocol.kv import VALUE_BYTES_MAX
from logyard.service.cli.root import cli


def test_buckets_are_dense_and_in_order() -> None:
    for bucket in range(BUCKETS - 1):
        assert lower_edge(bucket) < lower_edge(bucket + 1)
        assert bucket_of(lower_edge(bucket)) == bucket
        assert bucket_of(lower_edge(bucket + 1) - 1) == bucket
    assert bucket_of(1 << 60) == BUCKETS - 1


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_quantiles_are_within_a_bucket_of_the_truth(share: float) -> None:
    draw = random.Random(1)
    samples = sorted(draw.lognormvariate(-6, 1.5) for _ in range(20_000))
    histogram = Histogram()
    for sample in samples:
        histogram.add(sample)
    truth = samples[int(share * len(samples))]
    assert histogram.quantile(share) == pytest.approx(truth, rel=0.04)
    assert histogram.mean == pytest.approx(sum(samples) / len(samples))
    assert histogram.worst_seconds == samples[-1]


def test_histograms_of_processes_merge_through_their_dumps() -> None:
    parts, whole = [Histogram(), Histogram()], Histogram()
    for number in range(1000):
        seconds = number * 1e-5
        parts[number % 2].add(seconds, 3)
        whole.add(seconds, 3)
    merged = Histogram()
    for part in parts:
        merged.merge(Histogram.load(**part.dump()))  # type: ignore[arg-type]
    assert merged.counts == whole.counts
    assert merged.samples == 3000
    assert merged.quantile(0.5) == whole.quantile(0.5)


def paced(monkeypatch: pytest.MonkeyPatch, begins: float, ends: float) -> Load:
    """A load of an append a hundredth of a second for three seconds, answered at once but between two times, the last
    of which may be after its time."""
    clock = SimpleNamespace(now=0.0)
    waiting: list[Any] = []

    class Log:
        def append_nowait(self, key: bytes, body: bytes) -> Any:
            pending = SimpleNamespace(error=None, on_done=waiting.append, value=SimpleNamespace(first=0))
            batch = SimpleNamespace(pending=pending)
            return SimpleNamespace(batch=batch, position=0)

    class Runtime:
        def event(self) -> trio.Event:
            return trio.Event()

        async def sleep(self, seconds: float) -> None:
            clock.now += seconds
            if not begins <= clock.now < ends:
                for answer in waiting:
                    answer()
                waiting.clear()

    monkeypatch.setattr("logyard.bench.load.time", SimpleNamespace(perf_counter=lambda: clock.now))
    spec = LoadSpec([], ["a"], 64, 8, 1, 1, 0, 0.0, 3.0, 1 << 30, rate=100.0)
    load = Load(spec, cast(Any, [Log()]), cast(Any, Runtime()))
    load.measure_until = 3.0

    async def main() -> None:
        await load.pace(0.0)
        clock.now = max(clock.now, ends)
        for answer in waiting:
            answer()

    trio.run(main)
    assert load.number == 300 and load.outstanding == 0 and load.drained.is_set()
    return load


def test_a_stall_is_in_the_latency_of_all_that_was_due_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without intended send times one of them would have been slow."""
    load = paced(monkeypatch, 1.0, 2.0)
    assert load.counted == pytest.approx(300, abs=2)
    assert load.histogram.worst_seconds == pytest.approx(1.0, abs=0.02)
    # A third of all were due during the stall, and waited for half a second on average.
    assert load.histogram.mean == pytest.approx(1 / 6, rel=0.05)
    assert load.histogram.quantile(0.5) < 0.01 and load.histogram.quantile(0.8) > 0.3


def test_a_stall_across_the_end_of_the_time_is_in_the_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    load = paced(monkeypatch, 2.0, 4.0)
    assert load.counted == pytest.approx(200, abs=2)
    assert load.histogram.samples == pytest.approx(300, abs=2)
    assert load.histogram.worst_seconds == pytest.approx(2.0, abs=0.02) and load.histogram.quantile(0.7) > 1.0


def test_a_paced_load_ends_when_its_last_answers_come_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paced(monkeypatch, 2.985, 2.997).counted == pytest.approx(300, abs=2)


def test_an_empty_histogram_says_nothing() -> None:
    assert Histogram().quantile(0.99) == 0.0
    assert Histogram().mean == 0.0


@pytest.mark.parametrize("size", [16, 17, 256, 65_536, 3 << 20])
def test_bodies_are_distinct_and_rebuilt_from_their_number(size: int) -> None:
    workload, again, other = Workload(size, 7, 0), Workload(size, 7, 0), Workload(size, 7, 1)
    bodies = [workload.body(number) for number in range(50)]
    assert {len(body) for body in bodies} == {size}
    assert len(set(bodies)) == 50
    assert bodies == [again.body(number) for number in range(50)]
    assert [workload.number_of(body) for body in bodies] == list(range(50))
    assert other.body(3) != bodies[3]
    assert other.number_of(bodies[3]) is None
    assert workload.number_of(b"short") is None


def test_bodies_do_not_compress() -> None:
    import zstandard

    body = Workload(65_536, 7, 0).body(11)
    assert len(zstandard.compress(body)) > 0.99 * len(body)


def test_the_longest_mount_point_names_the_file_system() -> None:
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmp/disk xfs rw 0 0\nx /tm btrfs rw 0 0\n"
    assert filesystem_of(Path("/tmp/x"), mounts) == "tmpfs"
    assert filesystem_of(Path("/tmp/disk/y"), mounts) == "xfs"
    assert filesystem_of(Path("/tmpfile"), mounts) == "ext4"
    assert filesystem_of(Path("/anything"), "") == "unknown"


def test_the_machine_is_measured(tmp_path: Path) -> None:
    assert 0 < fdatasync_us(tmp_path, rounds=4) < 1e6
    assert memcpy_mb_per_s(1 << 20, 2) > 10


def test_a_process_has_memory_and_time() -> None:
    assert os.getpid() in family([os.getpid()])
    assert resident_bytes(os.getpid()) > 1 << 20
    assert cpu_seconds(os.getpid()) > 0
    assert resident_bytes(2**22 + 1) == 0


def test_figures_of_a_steady_run_agree_with_the_window() -> None:
    histogram = Histogram()
    histogram.add(0.010, 100_000)  # 2,500 outstanding for 10 ms each: 250,000 a second
    result = {
        "counted": 100_000, "acknowledged": 120_000, "failed": 0, "verified": 1200, "lost": 0, "problems": [],
        "histogram": histogram.dump(), "cpu_s": 0.1,
    }  # fmt: skip
    figures = append_figures([result, result], size=256, clients=5, window=500, seconds=0.8)
    assert figures["ops_per_s"] == 250_000
    assert figures["mb_per_s"] == 64
    assert figures["window_agreement"] == pytest.approx(1.0)
    assert figures["acknowledged"] == 240_000
    assert figures["p50_ms"] == pytest.approx(10, rel=0.04)


def test_shares_are_even_and_complete() -> None:
    assert shares(5, 2) == [3, 2]
    assert shares(64, 2) == [32, 32]
    assert sum(shares(7, 3)) == 7


def test_a_lease_that_is_over_before_its_time_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lease:
        id = 7

    class Kv:
        """A group whose leases last 0.6 s, whatever is asked for."""

        granted = 0.0

        async def grant(self, length_s: float) -> Lease:
            self.granted = trio.current_time()
            return Lease()

        async def put(self, key: bytes, value: bytes, *, lease: int) -> None:
            """It is there."""

        async def get(self, key: bytes) -> bytes | None:
            await trio.sleep(0)
            return None if trio.current_time() - self.granted > 0.6 else b""

    one = Kv()

    class Yard:
        def kv(self, name: str) -> Kv:
            return one

    async def look() -> Terms:
        terms, yard = Terms(), Yard()
        monkeypatch.setattr("logyard.bench.terms.time", SimpleNamespace(monotonic=trio.current_time))
        await terms._lease(cast(Any, yard), "k", 1, 1.0)
        await terms._lease(cast(Any, yard), "k", 2, 0.5)
        return terms

    terms = trio.run(look, clock=trio.testing.MockClock(autojump_threshold=0))
    assert terms.checked == 2 and len(terms.early) == 1 and "lease 1 of 1 s was over 0.6" in terms.early[0]
    assert 0 < terms.late_s < 0.2


@pytest.mark.parametrize(
    ("held_by", "fails", "after_s", "early"),
    [
        ("one", "", 0.0, True),
        ("one", "one", 2.0, False),
        ("one", "one", 60.0, True),
        ("one", "other", 2.0, True),
        ("nobody known", "other", 2.0, False),
    ],
    ids=["without a cause", "the holder failed", "it failed much later", "another one failed", "it may have been that"],
)
def test_a_delivery_before_its_time_has_a_cause_or_is_noticed(
    monkeypatch: pytest.MonkeyPatch, held_by: str, fails: str, after_s: float, early: bool
) -> None:
    now = [100.0]
    monkeypatch.setattr("logyard.bench.terms.time", SimpleNamespace(monotonic=lambda: now[0]))
    terms, holders = Terms(), {"one": Holder(), "other": Holder()}
    message = cast(Any, SimpleNamespace(id=1, body=b"1", deliveries=0))
    sent = {b"1": Sent(0.0, holders.values())}
    if held_by == "one":
        terms._took(cast(Any, None), holders["one"], message, "q", sent)
    now[0] += 0.7
    message.deliveries = 1
    terms._took(cast(Any, None), holders["other"], message, "q", sent)
    now[0] += after_s
    if fails:
        holders[fails].fail()
    assert terms.checked == 1 and len(terms.early) == early and terms.row()["terms_early"] == early


def test_no_size_is_taken_that_no_frame_takes() -> None:
    """--size 999999999999 was an OverflowError in a load process."""
    assert (settings.BODY_BYTES_MAX, settings.VALUE_BYTES_MAX) == (RECORD_BYTES_MAX, VALUE_BYTES_MAX)
    for verb in ("append", "kv", "queue", "groups", "mixed"):
        done = CliRunner().invoke(cli, ["bench", verb, "--size", "999999999999"])
        most = VALUE_BYTES_MAX if verb == "kv" else RECORD_BYTES_MAX
        assert done.exit_code == 2 and f"16<=x<={most}" in done.output, done.output


@pytest.mark.parametrize("module", ["load", "upload"])
def test_a_load_process_ends_with_who_started_it(module: str) -> None:
    """A killed `bench run` left it loading the next run's nodes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}"]
        spec = LoadSpec(addresses, ["a"], 64, 1, 1, 0, 0, 0.0, 1.0, 1)._asdict()
        words = spec if module == "load" else {"addresses": addresses, "log": "a", "bytes": 1, "seed": 1}
        with subprocess.Popen(
            [sys.executable, "-m", f"logyard.bench.{module}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words).encode() + b"\n")
            process.stdin.flush()
            try:
                connection, _ = server.accept()
                with connection:
                    # It waits for an answer now, for 30 s.
                    process.stdin.close()
                    assert process.wait(15) == 1
            finally:
                process.kill()
