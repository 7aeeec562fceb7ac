"""The verbs about what the reconciler does by itself: the plan, pause, resume, cancel. Registered by
`service.cli.root`."""

from __future__ import annotations

from typing import Any

import click

from .logs import opened, servers_option
from .output import Output, json_option

SHOWN = 40


class Plan(click.Group):
    """`plan` means `plan show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take no verb, or options alone, for show."""
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "-h")):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Plan)
def plan() -> None:
    """Show what a cluster's reconciler does and would do, and hold it.

    \b
    Examples:
      logyard plan
      logyard plan pause --why "a disk is being replaced"
    """


def _line(move: dict[str, Any]) -> tuple[object, ...]:
    return move["kind"], move["source"] or "-", move["target"] or "-", move["why"]


@plan.command("show")
@servers_option
@json_option
def show(servers: list[str], output: Output) -> None:
    """Show the moves under way, those that would come next, and what can't be helped, with what to type.

    \b
    Example:
      logyard plan show
    """
    with opened(servers) as yard:
        doing = yard.catalog("plan", "list")
        # What would be done is known where the catalogue is led: it hears who leads which log.
        wanted = yard.catalog("plan", "wanted", node=doing["leader"] or None)
    rows, fields = doing["result"], wanted["result"]
    output.table(
        "under way", ("move", "log", "kind", "from", "to", "why", "step"),
        [(row["number"], f"{row['uid']:016x}", *_line(row), row["step"]) for row in rows["moves"]],
    )  # fmt: skip
    output.table(
        f"to be done: {fields['count']}", ("log", "kind", "from", "to", "why"),
        [(row["name"], *_line(row)) for row in fields["moves"][:SHOWN]],
    )  # fmt: skip
    output.table(
        f"stuck: {fields['stuck_count']}", ("log", "why", "what to do"),
        [(row["name"], row["why"], row["hint"]) for row in fields["stuck"][:SHOWN]],
    )  # fmt: skip
    held = f"paused: {rows['paused']}" if rows["paused"] else f"held: {fields['held']}" if fields["held"] else ""
    output.result(
        {
            "ok": True, "paused": rows["paused"], "held": fields["held"], "under_way": rows["moves"],
            "ended": rows["ended"], "count": fields["count"], "moves": fields["moves"], "stuck": fields["stuck"],
        },
        held or None,
    )  # fmt: skip


@plan.command()
@click.option("--why", default="by hand", show_default=True, help="Shown to who looks.")
@servers_option
@json_option
def pause(why: str, servers: list[str], output: Output) -> None:
    """Begin no move, and go on with none, until "plan resume".

    \b
    Example:
      logyard plan pause --why "a disk is being replaced"
    """
    with opened(servers) as yard:
        paused = yard.change_catalog("plan", "pause", {"why": why or "by hand"})
    output.result({"ok": True, "paused": paused}, f"paused: {paused}")


@plan.command()
@servers_option
@json_option
def resume(servers: list[str], output: Output) -> None:
    """Go on after "plan pause".

    \b
    Example:
      logyard plan resume
    """
    with opened(servers) as yard:
        yard.change_catalog("plan", "resume", {})
    output.result({"ok": True, "paused": ""}, "goes on")


@plan.command()
@click.argument("number", type=click.IntRange(min=1))
@servers_option
@json_option
def cancel(number: int, servers: list[str], output: Output) -> None:
    """Give a move up: what it added and has no vote yet leaves again. It comes back if its reason is still there.

    \b
    Example:
      logyard plan cancel 7
    """
    with opened(servers) as yard:
        yard.change_catalog("plan", "step", {"number": number, "step": "undo"})
    output.result({"ok": True, "move": number}, f"move {number} is given up")


def commands() -> list[click.Command]:
    """Return what the command line registers."""
    return [plan]
