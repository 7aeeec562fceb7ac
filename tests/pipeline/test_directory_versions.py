"""Directories of logs in version 2: upgrades, producers and timers that rang are applied by who reads or checks a
stopped node, as a start would apply them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from logyard.engine.replica.leadership import wait
from logyard.machines.log import AppendLog
from logyard.pipeline.directory.source import DirectorySource
from logyard.service.check.run import check_directory
from logyard.service.embedded import open_system
from tests.crash.agree import disagreements
from tests.inside import engine_of

from .test_directory import CONFIG, rows, wanted

HOUR_NS = 3600 * 10**9


async def write(path: Path, snapshots: bool) -> tuple[int, int]:
    """A log whose limits gave records up, by appends and by its timer; its bounds."""
    async with open_system(path, CONFIG) as system:
        host, ahead = engine_of(system), 0
        clock = host.clocks
        wall, base = clock.wall_ns, clock.monotonic_ns
        clock.wall_ns, clock.monotonic_ns = lambda: wall() + ahead, lambda: base() + ahead
        log = await system.start_group("a", AppendLog())
        await log.append_many([(b"old", b"x" * 5000)] * 3)
        await log.retain(age=3600)
        producer = await log.producer("p")
        for number in range(1, 21):
            for _ in range(2):
                await producer.append(b"%d" % number, b"y" * 300, sequence=number)
            ahead += HOUR_NS // 10
            if snapshots and number == 8:
                await log.snapshot()
        start = log.bounds()[0]
        assert start > 3, "appends gave some up"
        ahead += HOUR_NS // 2
        with trio.fail_after(20):
            await wait(host.member("a"), lambda: log.bounds()[0] > start)
        if snapshots:
            await log.snapshot()
            await producer.append(b"last", b"z")
        return log.bounds()


@pytest.mark.parametrize("snapshots", [False, True])
async def test_a_stopped_log_of_version_2_is_what_it_was(tmp_path: Path, snapshots: bool) -> None:
    start, end = await write(tmp_path / "data", snapshots)
    assert await disagreements(tmp_path / "data", tmp_path / "copy", CONFIG) == []
    report = check_directory(tmp_path / "data")
    assert report["ok"] and not report["findings"], report["findings"]
    source = DirectorySource(tmp_path / "data")
    try:
        (info,) = [one for one in source.logs(pattern="a")]
        assert (info.start, info.end) == (start, end)
        found = rows(source, wanted(info))
        assert [row["offset"] for row in found] == list(range(start, end))
        assert [row["meta"] for row in found][:2] == [b"%d" % (start - 2), b"%d" % (start - 1)]
    finally:
        source.close()
    async with open_system(tmp_path / "data", CONFIG) as system:
        log = await system.start_group("a", AppendLog())
        assert log.bounds() == (start, end) and (await log.producer("p")).last == 20 + snapshots
