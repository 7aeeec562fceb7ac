"""What all tests share: where their files are, how they meet Ctrl-C, how hypothesis runs. Everything else is a fixture
beside the tests that use it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from logyard.service import local_cluster

# The machines that run this are shared and noisy: an example may take long without being wrong.
settings.register_profile("logyard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("logyard")

MEMORY = "/dev/shm"
MEMORY_BYTES = 4 << 30
"""What a run may need there at its widest: four workers with a cluster of preallocated files each."""
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of each Spark: to compile twice, and to collect in threads, costs one that lives for seconds more than it gains."""
WORKERS_MAX = 8
"""Workers whose ports lie apart; of more than these some share theirs."""


def pytest_configure(config: pytest.Config) -> None:
    """Put the files of tests into memory, where there is room: what a test says must not hang on how long this
    machine's disk takes for a sync. `--basetemp` or PYTEST_DEBUG_TEMPROOT name another place.

    Signals are met as in a foreground shell: a background one leaves SIGINT ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # As under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    share_ports(os.environ.get("PYTEST_XDIST_WORKER", ""))
    os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def share_ports(worker: str) -> None:
    """Give each worker ports of its own, and tests without workers others: those of a node that is down look free to
    whoever draws some, and are in use when it starts again."""
    number = worker.removeprefix("gw")
    share = int(number) % WORKERS_MAX if number.isdigit() else WORKERS_MAX
    low, high = local_cluster.PORTS
    width = (high - low) // (WORKERS_MAX + 1)
    local_cluster.PORTS = low + share * width, low + (share + 1) * width


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Say which tests must run in one process when several share the work: all that share one Spark (one JVM), all
    that look at the source (one parse), and those of a module that share a cluster or something else that it made. Of
    a test of which a sample is enough, the cases after the first ones are long.

    Only what wraps the others comes before xdist looks for groups, and pytest for the marks that are asked for. That
    it does is looked at in `test_tidy`: without groups tests pass as well, each with a JVM or a cluster of its own."""
    met: Counter[str] = Counter()
    for item in items:
        if sample := item.get_closest_marker("sample"):
            name = item.nodeid.partition("[")[0]
            met[name] += 1
            if met[name] > sample.args[0]:
                item.add_marker(pytest.mark.long)
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
        elif not item.get_closest_marker("xdist_group") and shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(item.config.rootpath).as_posix()))
    yield


def pytest_collection_finish() -> None:
    """Take the modules and the tests from what the collector looks through: seven thousand tests' worth of objects that
    stay, and a sixteenth of all processor time was looking at them."""
    gc.collect()
    gc.freeze()


def shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of a module or of the session that is ours."""
    known = getattr(item, "_fixtureinfo", None)
    found = known.name2fixturedefs.values() if known is not None else ()
    ours = [one[-1] for one in found if one[-1].func.__module__.startswith("tests.") and one[-1].func is not let_go]
    return any(one.scope in ("module", "session") for one in ours)


def let_go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the directories that a module's own fixtures made, once they are done: a cluster's preallocated files
    weigh 770 MB, and where files are in memory a run of all modules would fill it. A failed test's own stays."""
    base = tmp_path_factory.getbasetemp()
    before = {*base.iterdir()}
    yield
    for path in {*base.iterdir()} - before:
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("test_"):
            shutil.rmtree(path, ignore_errors=True)


let_go_of_clusters = pytest.fixture(scope="module", autouse=True)(let_go)
