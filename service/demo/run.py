"""The demo: three real nodes on real files through kills, recovery, snapshots, compaction and truncation.

Nothing is taken on trust: what was acknowledged is read back from each member and compared byte for byte, three times.
`run_demo` returns every figure of the report and `ok`, which is true only if nothing was lost or changed and space came
back. Called by `logyard demo` and by tests; everything the CLI shows comes from the returned mapping.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import trio

from logyard.bench.cluster import holds_everything

from ..cli.output import Output
from ..local_cluster import LocalCluster
from .ingest import Ingest, Ledger
from .source import Source, default_source, log_name, plan, scan
from .verify import Verified, verify_all

if TYPE_CHECKING:
    from logyard.client.aio import Yard

NODES = (1, 2, 3)
CONNECTIONS = 4
CREATE_BATCH = 200
KILL_AT_SHARE = 0.3
"""The kill comes after this share of the records is acknowledged."""
POLL_S = 0.05
"""Between two looks at a condition that only the nodes' status shows."""
LEADERS_S = 60.0
SETTLE_S = 90.0
COMPACT_S = 60.0
CALL_TIMEOUT_S = 60.0

Condition = Callable[[], Awaitable[bool]]


class DemoSettings(NamedTuple):
    """`directory` None: a temporary one, removed at the end. `source` None: the standard library."""

    directory: Path | None
    source: Path | None
    logs: int


class DemoFailed(Exception):
    """A step did not reach its goal in time; the message says which."""


class Steps:
    """Progress bars, one a step; silent where nobody looks."""

    def __init__(self, output: Output) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            TextColumn("{task.description:<34}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(), console=output.console,
        )  # fmt: skip
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str, total: float | None = None) -> Iterator[Callable[[int], None]]:
        """Show a bar for one step; the yielded function advances it."""
        task = self.progress.add_task(name, total=total)
        began = time.monotonic()
        yield lambda size: self.progress.advance(task, size)
        self.seconds[name] = round(time.monotonic() - began, 3)
        self.progress.update(task, total=1, completed=1)


@contextlib.contextmanager
def home(given: Path | None, prefix: str, data: Sequence[str]) -> Iterator[Path]:
    """Yield the place where everything lives: the directory given, else one of its own, of which the plots stay and
    `data` goes."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield directory
    finally:
        for name in data:
            shutil.rmtree(directory / name, ignore_errors=True)
        if not any(directory.iterdir()):
            directory.rmdir()


def run_demo(settings: DemoSettings, output: Output) -> dict[str, object]:
    """Run everything; raise `DemoFailed`, `ClusterFailed` or a client's error when a step can't be finished."""
    steps = Steps(output)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(steps.progress)
        root = settings.source or default_source()
        with steps.step("hash the source"):
            source = scan(root)
        if not source.files:
            raise click.BadParameter(f"{root} holds no readable files", param_hint="--source")
        directory = settings.directory
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="logyard-demo-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        cluster = stack.enter_context(LocalCluster(directory, len(NODES)))
        with steps.step("start three nodes"):
            cluster.start()
        run = DemoRun(settings, source, cluster, steps)
        trio.run(run.everything)
        with steps.step("check the directories"):
            cluster.stop()
            run.check()
    run.fields["seconds"] = round(time.monotonic() - began, 2)
    run.fields["step_seconds"] = steps.seconds
    return run.finish()


class DemoRun:
    """One run: the ledger, the fields of the report, and the steps in order."""

    def __init__(self, settings: DemoSettings, source: Source, cluster: LocalCluster, steps: Steps) -> None:
        self.logs = settings.logs
        self.source = source
        self.cluster = cluster
        self.steps = steps
        self.ledger = Ledger(plan(source.files, settings.logs), settings.logs)
        self.names = [log_name(number) for number in range(settings.logs)]
        self.found = Verified()
        self.fields: dict[str, object] = {"logs": settings.logs, "files": len(source.files)}
        self.fdatasyncs: dict[int, int] = {}
        self.members_verified = len(NODES)

    async def everything(self) -> None:
        """Run all steps, with the nodes running before and after."""
        self.fields["node_pids"] = self.cluster.pids
        async with AsyncExitStack() as stack:
            yards = await self.connect(stack)
            await self.create(yards[0])
            await self.ingest(yards)
            await self.verify("read back from each member", yards)
            await self.count_syncs(yards[0], NODES)
        await self.kill_all("kill -9 all three, restart")
        async with AsyncExitStack() as stack:
            yards = await self.connect(stack)
            await self.settled(yards[0], "all nodes restarted")
            await self.verify("read again after killing all", yards)
            await self.compact(yards[0])
            starts = await self.truncate(yards[0])
            await self.count_syncs(yards[0], NODES)
        # A running node may remember where it moved bytes to; only a new process shows that the disk knows it too.
        await self.kill_all("kill -9 all three once more")
        async with AsyncExitStack() as stack:
            yards = await self.connect(stack)
            await self.settled(yards[0], "all nodes restarted after truncation")
            await self.verify("read what was kept", yards, starts)
            await self.count_syncs(yards[0], NODES)

    async def connect(self, stack: AsyncExitStack) -> list[Yard]:
        """Return several clients, so that one connection's receive path is not the limit."""
        from logyard.client.aio import connect

        addresses = self.cluster.addresses
        return [await stack.enter_async_context(connect(addresses, timeout=CALL_TIMEOUT_S)) for _ in range(CONNECTIONS)]

    async def create(self, yard: Yard) -> None:
        """Create the logs, three members each, and a leader for every one."""
        with self.steps.step("create logs", self.logs) as advance:
            for first in range(0, self.logs, CREATE_BATCH):
                names = self.names[first : first + CREATE_BATCH]
                await yard.create_many(names, members=list(NODES))
                advance(len(names))

            async def led() -> bool:
                return len(set().union(*(await self.leads(yard, NODES)).values())) == self.logs

            await self.reach("a leader for every log", led, LEADERS_S)

    async def leads(self, yard: Yard, nodes: tuple[int, ...]) -> dict[int, set[int]]:
        """Return the numbers of the logs each node leads, by its own account."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return {
            node: {
                numbers[str(group["name"])]
                for group in await yard.list(node=node)
                if group["role"] == "leader" and group["name"] in numbers
            }
            for node in nodes
        }

    async def reach(self, what: str, condition: Condition, timeout_s: float) -> None:
        """Look again and again until the nodes' status shows it; raise `DemoFailed`."""
        with trio.move_on_after(timeout_s):
            while not await condition():
                await trio.sleep(POLL_S)
            return
        raise DemoFailed(f"{what}: not reached within {timeout_s:g} s")

    async def ingest(self, yards: list[Yard]) -> None:
        """Append everything, kill the busiest leader on the way; then restart it and wait until it has caught up."""
        total = sum(record.file.size for record in self.ledger.records)
        with self.steps.step("append, and kill -9 a leader", total) as advance:
            ingest = Ingest(self.ledger, yards, advance)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ingest.run)
                victim = await self.kill_leader(yards[0], ingest)
            seconds = trio.current_time() - began
        with self.steps.step("restart it, wait until it has all"):
            began = trio.current_time()
            await trio.to_thread.run_sync(self.cluster.restart, victim)
            await self.settled(yards[0], f"node {victim} restarted")
            self.fields["recovery_s"] = round(trio.current_time() - began, 3)
        self.fields.update(
            ingest_s=round(seconds, 3),
            records_per_s=round(self.ledger.acknowledged / seconds, 1),
            mb_per_s=round(self.ledger.payload_bytes / seconds / 1e6, 2),
        )

    async def kill_leader(self, yard: Yard, ingest: Ingest) -> int:
        """Send SIGKILL to the node that leads most logs, with appends to them in flight. Return its number."""
        wanted = int(len(self.ledger.records) * KILL_AT_SHARE)
        await ingest.until(lambda: self.ledger.acknowledged >= wanted)
        leads = await self.leads(yard, NODES)
        victim = max(NODES, key=lambda node: len(leads[node]))
        await self.count_syncs(yard, (victim,))
        smallest = min(self.source.files, key=lambda file: file.size)
        ingest.released.set()
        await ingest.until(lambda: ingest.in_flight_to(leads[victim]) > 0)
        self.fields.update(
            killed_node=victim,
            killed_pid=self.cluster.nodes[victim].pids[-1],
            groups_led_by_killed=len(leads[victim]),
            in_flight_at_kill=ingest.in_flight,
            in_flight_to_killed=ingest.in_flight_to(leads[victim]),
        )
        # On the loop, not in a thread: nothing can be acknowledged between the count above and the signal.
        self.cluster.kill9(victim)
        ingest.node_killed(leads[victim], smallest)
        self.fields["failover_s"] = round(await ingest.failover(), 3)
        return victim

    async def settled(self, yard: Yard, what: str) -> None:
        """Wait until every node holds every log and has applied all that its leader committed."""

        async def agreed() -> bool:
            try:
                lists = [await yard.list(node=node) for node in NODES]
            except (OSError, trio.TooSlowError):
                return False
            return holds_everything(lists, self.logs)

        await self.reach(f"{what}: every member holds everything", agreed, SETTLE_S)

    async def verify(self, name: str, yards: list[Yard], starts: list[int] | None = None) -> None:
        """Read everything from each member and unite what was found with the readings before."""
        total = len(NODES) * self.ledger.payload_bytes
        with self.steps.step(name, total) as advance:
            found = await verify_all(yards, self.ledger, NODES, starts, advance)
        self.members_verified = min(self.members_verified, len(found.members))
        self.found.unite(found)

    async def kill_all(self, name: str) -> None:
        """Send SIGKILL to all three at once, then start them on their directories."""
        with self.steps.step(name):
            began = trio.current_time()
            await trio.to_thread.run_sync(lambda: self.cluster.kill9(*NODES))
            await trio.to_thread.run_sync(self.cluster.start)
            self.fields["restart_all_s"] = round(trio.current_time() - began, 3)

    async def statuses(self, yard: Yard) -> dict[int, dict[str, Any]]:
        """Return every node's own figures."""
        return {node: await yard.status(node, CALL_TIMEOUT_S) for node in NODES}

    async def figures(self, yard: Yard, key: str) -> list[int]:
        """Return one figure of every node, in order of their numbers."""
        return [int(status[key]) for status in (await self.statuses(yard)).values()]

    async def generations_on_disk(self, yard: Yard) -> list[int]:
        """Return the allocated bytes of every node's generations, where all payloads live by then. The WAL's files are
        left out: they are allocated ahead, when there is time for it, and used again; with a small source they outweigh
        it."""
        found = await self.statuses(yard)
        return [int(one["payload_disk_bytes"]) - int(one["wal"]["allocated_bytes"]) for one in found.values()]

    async def count_syncs(self, yard: Yard, nodes: tuple[int, ...]) -> None:
        """Add what the running processes counted: a killed process takes its counter with it."""
        for node in nodes:
            status = await yard.status(node, CALL_TIMEOUT_S)
            self.fdatasyncs[int(status["pid"])] = int(status["fdatasyncs"])

    async def compact(self, yard: Yard) -> None:
        """Snapshot every log, then move all live payload bytes into generations."""
        with self.steps.step("snapshot every log"):
            await yard.snapshot(None)
            self.fields["snapshot_bytes"] = max(await self.figures(yard, "snapshot_bytes"))
        with self.steps.step("compact into generations"):
            await yard.compact()

            async def moved() -> bool:
                if any(await self.figures(yard, "wal_bytes_live")):
                    await yard.compact()
                    return False
                return True

            with contextlib.suppress(DemoFailed):  # The report shows what is left and fails.
                await self.reach("no live payload bytes in the WAL", moved, COMPACT_S)
        self.fields["live_bytes_in_wal"] = await self.figures(yard, "wal_bytes_live")
        self.fields["live_bytes_in_generations"] = await self.figures(yard, "generations_bytes_live")
        self.fields["disk_before"] = await self.generations_on_disk(yard)

    async def truncate(self, yard: Yard) -> list[int]:
        """Truncate half of every log, wait until disk use has fallen on all nodes. Returns the logs' new starts."""
        before = self.fields["disk_before"]
        assert isinstance(before, list)
        with self.steps.step("truncate half, give space back", self.logs) as advance:
            starts = [(max(offsets) + 1) // 2 if offsets else 0 for offsets in self.ledger.offsets]
            waiting = iter(range(self.logs))

            async def truncate_some() -> None:
                for log in waiting:
                    await yard.log(self.names[log]).truncate(starts[log])
                    advance(1)

            async with trio.open_nursery() as nursery:
                for _ in range(32):
                    nursery.start_soon(truncate_some)

            async def fallen() -> bool:
                await yard.compact()
                after = await self.generations_on_disk(yard)
                return all(now < then for now, then in zip(after, before, strict=True))

            with contextlib.suppress(DemoFailed):
                await self.reach("disk use falls on all nodes", fallen, COMPACT_S)
        self.fields["disk_after"] = await self.generations_on_disk(yard)
        self.fields["payload_bytes_kept"] = sum(
            self.ledger.records[number].file.size
            for log, offsets in enumerate(self.ledger.offsets)
            for offset, number in offsets.items()
            if offset >= starts[log]
        )
        return starts

    def check(self) -> None:
        """Run `logyard check` on each node's directory, now that the nodes are stopped."""
        from ..check.run import check_directory

        reports = {node_id: check_directory(node.data) for node_id, node in self.cluster.nodes.items()}
        self.fields["checked"] = {node_id: bool(report["ok"]) for node_id, report in reports.items()}
        for node_id, report in reports.items():
            for finding in [] if report["ok"] else report["findings"]:
                place = f"{finding['group']} {finding['path']}".strip()
                self.ledger.problem(f"check of node {node_id}: {place}: {finding['message']}")

    def finish(self) -> dict[str, object]:
        """Return the report. `ok` needs every goal reached, on every node."""
        fields, found = self.fields, self.found
        appended = sum(record.copy >= 0 for record in self.ledger.records)
        before, after = fields["disk_before"], fields["disk_after"]
        checked = fields["checked"]
        assert isinstance(before, list) and isinstance(after, list) and isinstance(checked, dict)
        goals = {
            "everything acknowledged": self.ledger.acknowledged == appended,
            "nothing lost": not found.lost,
            "nothing changed": not found.mismatched,
            "every member read": self.members_verified == len(NODES),
            "nothing is stored twice": not found.duplicates,
            "appends were in flight at the kill": bool(fields["in_flight_at_kill"]),
            "live payload bytes all in generations": fields["live_bytes_in_wal"] == [0] * len(NODES),
            "disk use fell on every node": all(now < then for now, then in zip(after, before, strict=True)),
            "directories pass the check": all(checked.values()),
        }
        return {
            "ok": all(goals.values()),
            "records": appended,
            "payload_bytes": self.ledger.payload_bytes,
            "acknowledged": self.ledger.acknowledged,
            "lost": len(found.lost),
            "mismatched": len(found.mismatched),
            "members_verified": self.members_verified,
            "duplicates": len(found.duplicates),
            "bytes_read_back": found.bytes_read,
            "fdatasyncs": sum(self.fdatasyncs.values()),
            "files_too_large": self.source.skipped,
            **fields,
            "goals": goals,
            "problems": self.ledger.problems,
        }
