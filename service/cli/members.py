"""The verbs that change who holds and leads what, for one log or for all of a node's: members, drain.

Each carries a goal of `admin.plan` out by `admin.run`: a bounded number of logs at a time, at a bounded rate, with a
progress bar. What was stopped goes on when it is run again, for a plan is what the logs' present members lack.
Registered by `service.cli.root`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from .logs import TIMEOUT, opened, servers_option, tls_config
from .output import Output, json_option

if TYPE_CHECKING:
    from logyard.client.aio import Yard
    from logyard.client.board import Standing

    from ..admin.plan import Goal, Targets
    from ..admin.run import Pace, Report

F = TypeVar("F", bound=Callable[..., Any])
FAILURES_LISTED = 20
NODE = click.IntRange(min=1)


class Members(click.Group):
    """`members NAME` means `members show NAME`, as long as NAME is no verb of the group."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb, or show for a log's name."""
        return super().get_command(ctx, cmd_name) or self.commands.get("show")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Put the missing show before a log's name."""
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take options before the name for those of show."""
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Members)
def members() -> None:
    """Show the members of a log, or change those of one, of several, or of all of a node's logs.

    A log that is named like one of the verbs is shown by "logyard members show add".

    \b
    Examples:
      logyard members orders
      logyard members replace --node 3 --with 4
    """


@members.command("show")
@click.argument("name")
@click.option("--add", type=NODE, help="Add this node as a member.")
@click.option("--remove", type=NODE, help="Remove this member.")
@servers_option
@json_option
def show(name: str, add: int | None, remove: int | None, servers: list[str], output: Output) -> None:
    """Show the members of a log, or add or remove one at once.

    --add makes the node a voter before it holds anything: "members add" waits until it has caught up.

    \b
    Examples:
      logyard members show orders
      logyard members orders --add 4
    """
    if add is not None and remove is not None:
        raise click.UsageError("one change at a time: --add or --remove")
    with opened(servers) as yard:
        if add is not None:
            yard.add_member(name, add)
        elif remove is not None:
            yard.remove_member(name, remove)
        found = yard.members(name)
        if add is not None or remove is not None:
            # A member that was removed may never hear of it: what counts is the leader's view.
            described = yard.describe(name)
            found["members"] = [*described["voters"], *described["learners"]]
            found["leader"] = described["leader"]
    text = f"{name}: members {', '.join(map(str, found['members']))}; leader {found['leader'] or 'unknown'}"
    output.result({"ok": True, "name": name, **found}, text)


def work_options(command: F) -> F:
    """Add --parallel, --rate, --patience, --servers and --json; the command gets `pace`, `servers` and `output`."""

    @wraps(command)
    def paced(*arguments: Any, parallel: int, rate: float, patience: float, **others: Any) -> Any:
        from ..admin.run import Pace

        return command(*arguments, pace=Pace(parallel, rate, patience), **others)

    options = (
        click.option("--parallel", type=click.IntRange(1, 256), default=8, show_default=True, help="Logs at a time."),
        click.option(
            "--rate", type=click.FloatRange(min=0), default=100.0, show_default=True,
            help="Logs begun a second; 0: no limit.",
        ),
        click.option(
            "--patience", type=click.FloatRange(min=0.1), default=60.0, show_default=True,
            help="Seconds without progress after which a log is given up.",
        ),
        servers_option,
        json_option,
    )  # fmt: skip
    found: Any = paced
    if hasattr(command, "__click_params__"):
        found.__click_params__ = command.__click_params__
    for option in reversed(options):
        found = option(found)
    wrapped: F = found
    return wrapped


class Work(NamedTuple):
    """What a verb asked for: which logs (all that the goal concerns when `everything`), and how."""

    names: Sequence[str]
    everything: bool
    pace: Pace
    servers: Sequence[str]
    output: Output


class Cluster(NamedTuple):
    """The cluster as its nodes' tables have it, and who may be given leaderships. `nodes` have an address."""

    yard: Yard
    nodes: Sequence[int]
    board: Sequence[Standing]
    missing: Sequence[int]
    targets: Targets


def on_cluster(servers: Sequence[str], act: Callable[[Cluster], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Open a client, read the boards, act; return the result's fields with the nodes that did not answer."""
    import trio

    from logyard.client.aio import connect

    from ..admin.plan import Targets

    timeout, tls = click.get_current_context().meta[TIMEOUT], tls_config()

    async def run() -> dict[str, Any]:
        async with connect(servers, timeout=timeout, tls=tls) as yard:
            board, missing = await yard.leaders()
            nodes = await yard.nodes()
            live = [node for node in nodes if node not in missing]
            fields = await act(Cluster(yard, nodes, board, missing, Targets((row.leader for row in board), live)))
            return {**fields, "missing": list(missing)}

    return trio.run(run)


@contextlib.contextmanager
def progress(output: Output, what: str, total: int) -> Iterator[Callable[[Report], object]]:
    """Show a bar on the terminal that a `Report` moves."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[failed]}"), console=output.console) as bar:
        task = bar.add_task(what, total=total, failed="")

        def tell(report: Report) -> None:
            failed = f"{len(report.failures)} failed" if report.failures else ""
            bar.update(task, completed=report.finished, failed=failed)

        yield tell


async def pursue(cluster: Cluster, work: Work, goal: Goal, what: str) -> dict[str, Any]:
    """Bring the chosen logs to the goal; return the report's fields."""
    from ..admin.plan import affected
    from ..admin.run import carry_out

    names = list(dict.fromkeys(work.names)) or affected(goal, cluster.board)
    with progress(work.output, what, len(names)) as tell:
        report = await carry_out(cluster.yard, goal, names, cluster.targets, work.pace, tell)
    return report.fields()


def conclude(work: Work, action: str, fields: dict[str, Any]) -> None:
    """Show failures in words, then the result."""
    for name, why in list(fields["failures"].items())[:FAILURES_LISTED]:
        work.output.say(f"{name}: {why}")
    if fields["failed"] > FAILURES_LISTED:
        work.output.say(f"... and {fields['failed'] - FAILURES_LISTED} more failed")
    text = (
        f"{action}: {fields['done']} done, {fields['skipped']} needed nothing, {fields['failed']} failed "
        f"in {fields['seconds']:g} s"
    )
    failures = {**fields["failures"], **fields.get("members", {}).get("failures", {})}
    why = [f"{name}: {why}" for name, why in failures.items()]
    if fields.get("still_led"):
        why.append(f"{fields['still_led']} logs are still led there")
    work.output.result({"action": action, **fields}, text, "; ".join(why[:FAILURES_LISTED]))


def check_node(node: int, nodes: Iterable[int], board: Iterable[Standing]) -> None:
    """Refuse a number that no node has. One that is gone for good, also from the addresses, is known by its logs."""
    from logyard.protocol.errors import Refused

    known = {*nodes, *(each for row in board for each in (row.leader, *row.members) if each)}
    if node not in known:
        raise Refused(f"node {node} is not known: there are nodes {', '.join(map(str, sorted(known)))}")


def check_member(node: int, names: Collection[str], board: Iterable[Standing]) -> None:
    """Refuse a node that none of the named logs has. Where one of them has it the others need nothing: the same command
    goes on where it was stopped."""
    from logyard.protocol.errors import Refused

    found = {row.name: row.members for row in board if row.name in names}
    if found.keys() == {*names} and not any(node in members for members in found.values()):
        raise Refused(f"node {node} is no member of {', '.join(sorted(found))}")


def change_members(
    work: Work, action: str, goal: Goal, check: Callable[[Cluster], object] = lambda _cluster: None
) -> None:
    """Run one verb of the group, whole; nothing is done where `check` raises."""
    if bool(work.names) == work.everything:
        raise click.UsageError("name the logs, or give --all for all that it concerns")

    async def act(cluster: Cluster) -> dict[str, Any]:
        check(cluster)
        return await pursue(cluster, work, goal, action)

    conclude(work, action, on_cluster(work.servers, act))


NAMES = click.argument("names", metavar="[NAME...]", nargs=-1)
ALL = click.option("--all", "everything", is_flag=True, help="All logs that it concerns.")


@members.command("add")
@NAMES
@ALL
@click.option("--node", type=NODE, required=True, help="The node that becomes a member.")
@click.option("--learner", is_flag=True, help="Without a vote: it receives everything and counts for nothing.")
@work_options
def add(
    names: tuple[str, ...],
    everything: bool,
    node: int,
    learner: bool,
    pace: Pace,
    servers: list[str],
    output: Output,
) -> None:
    """Add a node as a learner, wait until it has caught up, make it a voter.

    \b
    Example:
      logyard members add orders --node 4
    """
    from ..admin.plan import Add

    change_members(Work(names, everything, pace, servers, output), f"add node {node}", Add(node, learner))


@members.command("promote")
@NAMES
@ALL
@click.option("--node", type=NODE, required=True, help="The learner that becomes a voter.")
@work_options
def promote(
    names: tuple[str, ...], everything: bool, node: int, pace: Pace, servers: list[str], output: Output
) -> None:
    """Make a learner a voter when it has caught up.

    \b
    Example:
      logyard members promote orders --node 4
    """
    from ..admin.plan import Promote

    def check(cluster: Cluster) -> None:
        check_node(node, cluster.nodes, cluster.board)

    change_members(Work(names, everything, pace, servers, output), f"promote node {node}", Promote(node), check)


@members.command("remove")
@NAMES
@ALL
@click.option("--node", type=NODE, required=True, help="The member that leaves; it may be dead.")
@work_options
def remove(names: tuple[str, ...], everything: bool, node: int, pace: Pace, servers: list[str], output: Output) -> None:
    """Remove a member; a leader hands over first.

    \b
    Example:
      logyard members remove orders --node 1
    """
    from ..admin.plan import Remove

    def check(cluster: Cluster) -> None:
        if names:
            check_member(node, names, cluster.board)
        else:
            check_node(node, cluster.nodes, cluster.board)

    change_members(Work(names, everything, pace, servers, output), f"remove node {node}", Remove(node), check)


@members.command("replace")
@NAMES
@ALL
@click.option("--node", "old", type=NODE, required=True, help="The member that leaves; it may be dead.")
@click.option("--with", "new", type=NODE, required=True, help="The node that takes its place.")
@work_options
def replace(
    names: tuple[str, ...], everything: bool, old: int, new: int, pace: Pace, servers: list[str], output: Output
) -> None:
    """Put one node in the place of another: in the named logs, or in all that it is a member of.

    Each log gets the new node as a learner; when that has caught up it becomes a voter, and the old one leaves.
    Stopped anywhere, the same command goes on.

    \b
    Example:
      logyard members replace --node 3 --with 4
    """
    from ..admin.plan import Replace

    if old == new:
        raise click.UsageError("--node and --with are the same node")

    def check(cluster: Cluster) -> None:
        check_node(old, cluster.nodes, cluster.board)

    work = Work(names, everything or not names, pace, servers, output)
    change_members(work, f"replace node {old} with {new}", Replace(old, new, joint=True), check)


@click.command()
@click.option("--node", type=NODE, required=True, help="The node to empty.")
@click.option("--members", "memberships", is_flag=True, help="Move its memberships too, to the node --with.")
@click.option("--with", "new", type=NODE, help="The node that takes its memberships.")
@work_options
def drain(node: int, memberships: bool, new: int | None, pace: Pace, servers: list[str], output: Output) -> None:
    """Move every leadership off a node, to those that lead least: before it is stopped.

    With --members the node's memberships move to another node as well. Stopped anywhere, the same command goes on.
    Exit 1 if something could not be moved; it is listed with the reason.

    \b
    Examples:
      logyard drain --node 3
      logyard drain --node 3 --members --with 4
    """
    from logyard.client.admin import CATALOG

    from ..admin.plan import Leave, Replace, affected

    if memberships != (new is not None) or node == new:
        raise click.UsageError("--members needs --with, another node; --with needs --members")
    work = Work((), True, pace, servers, output)

    async def act(cluster: Cluster) -> dict[str, Any]:
        check_node(node, cluster.nodes, cluster.board)
        # The node that is emptied gets nothing new.
        cluster.targets.counts.pop(node, None)
        fields = await pursue(cluster, work, Leave(node), f"leaderships off node {node}")
        if new is not None:
            moved = await pursue(cluster, work, Replace(node, new, joint=True), f"memberships to node {new}")
            fields |= {"members": moved, "ok": fields["ok"] and moved["ok"]}
        board, _ = await cluster.yard.leaders()
        led = affected(Leave(node), board)
        if any(row.name == CATALOG and row.leader == node and row.name not in led for row in board):
            output.say(f"{CATALOG}: node {node} is its only voter: nothing is created or moved while it is down")
        fields |= {"still_led": len(led), "ok": fields["ok"] and not led}
        return fields

    fields = on_cluster(servers, act)
    for name, why in list(fields.get("members", {}).get("failures", {}).items())[:FAILURES_LISTED]:
        output.say(f"{name}: {why}")
    conclude(work, f"drain node {node}", fields)


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [members, drain]
