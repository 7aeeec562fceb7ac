"""`python -m tests.everyday.page > docs/faces.md`: which face has which verb, found by introspection.

A verb that a face has not, or takes otherwise than the others, has a reason here, or a test fails.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from .faces import EMBEDDED, SYNC, TRIO, verbs
from .table import ROWS

FACES: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {"embedded": EMBEDDED, "trio": TRIO, "asyncio": TRIO, "blocking": SYNC}
)
"""The asynchronous client is one set of classes under both libraries."""
MADE_BY: Mapping[str, str] = MappingProxyType(
    {
        "Log": "`yard.log(name)`", "Producer": "`await log.producer(name)`",
        "EpochWriter": "`await log.epoch(producer, incarnation, epoch)`", "KV": "`yard.kv(name)`",
        "Watch": "`async with kv.watch(...)`", "Queue": "`yard.queue(name)`",
        "Consumer": "`async with queue.consume(...)`", "Session": "`await yard.open_session(name)`",
        "Machine": "`yard.machine(name)`",
        "Topic": "`yard.topic(name)`", "TopicProducer": "`await topic.producer(name)`",
        "GroupConsumer": "`async with yard.consume(topic, group=...)`", "ConsumerGroup": "`yard.consumer_group(name)`",
        "Yard": "`async with logyard.connect(servers)`, `with logyard.connect_sync(servers)`, "
        "`async with logyard.open_system(path)`",
    }
)  # fmt: skip
MEANWHILE = "needs something that runs meanwhile, and a thread that waits has nothing"
OLD_NAME = "the name from before the faces were one; see `{}`"
AT_ONCE = "what is told without waiting, inside the process"
NO_BATCH = "a command goes straight to the engine, which gathers what waits"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "Consumer.ack_nowait": "`ack` is gathered there",
        "KV.watch": "an iterator that asks again, every `wait` seconds",
        "Log.append_nowait": f"blocking: {MEANWHILE}; embedded: {NO_BATCH}",
        "Queue.publish_nowait": "as `append_nowait`",
        "Yard.drain": "there is nothing that was not waited for",
        "Log.bounds": AT_ONCE,
        "Log.command": OLD_NAME.format("Machine.command"),
        "Machine.open_session": MEANWHILE,
        "Session.close": MEANWHILE,
        "Session.command": MEANWHILE,
        "Session.messages": MEANWHILE,
        "Yard.open_session": MEANWHILE,
        "Watch.created": "a watch is an iterator there",
        "Yard.close": "the end of the ``async with`` closes it",
        "Yard.delete_group": OLD_NAME.format("Yard.delete"),
        "Yard.groups": AT_ONCE,
        "Yard.leaderboard": AT_ONCE,
        "Yard.start_group": "`create` and a handle in one, by an object of the machine's class",
    }
)
"""Verbs that are not in every face, or not the same."""
COMMANDS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Log.append": ("append",), "Log.records": ("read",), "Log.retain": ("retain",), "Log.truncate": ("truncate",),
        "KV.put": ("kv put",), "KV.get": ("kv get",), "KV.range": ("kv get",), "KV.delete": ("kv del",),
        "KV.txn": ("kv txn",), "KV.watch": ("kv watch",), "KV.compact": ("kv compact",), "KV.status": ("kv status",),
        "KV.grant": ("kv lease grant",), "KV.keep_alive": ("kv lease keepalive",), "KV.leases": ("kv lease list",),
        "KV.time_to_live": ("kv lease ttl",), "KV.revoke": ("kv lease revoke",),
        "Queue.publish": ("queue publish",), "Queue.consume": ("queue consume",), "Queue.stats": ("queue stats",),
        "Queue.purge": ("queue purge",), "Machine.command": ("command",), "Machine.query": ("query",),
        "Topic.send": ("topic send",), "Topic.send_many": ("topic send",), "Topic.create": ("topic create",),
        "Topic.describe": ("topic describe",), "Topic.grow": ("topic alter",), "Topic.shrink": ("topic alter",),
        "Topic.alter": ("topic alter",), "Topic.finish": ("topic alter",), "Topic.retire": ("topic alter",),
        "Topic.retain": ("topic alter",),
        "Topic.purge": ("topic purge",), "Topic.delete": ("topic delete",), "Yard.topics": ("topic list",),
        "Yard.consume": ("consume",), "Yard.consumer_groups": ("groups list",),
        "ConsumerGroup.describe": ("groups describe",), "ConsumerGroup.reset": ("groups reset",),
        "ConsumerGroup.delete": ("groups delete",),
        "Yard.create": ("create", "kv create", "queue create"), "Yard.create_batch": ("create",),
        "Yard.list": ("list",), "Yard.delete": ("delete",),
        "Yard.describe": ("describe",), "Yard.leaders": ("leaders",), "Yard.members": ("members show",),
        "Yard.status": ("status",), "Yard.statuses": ("status",), "Yard.scrub": ("scrub",),
        "Yard.snapshot": ("snapshot",), "Yard.compact": ("compact",), "Yard.transfer": ("transfer", "drain"),
        "Yard.campaign": ("campaign",), "Yard.add_member": ("members add",), "Yard.remove_member": ("members remove",),
        "Yard.change_members": ("members promote", "members replace"), "Yard.skip": ("skip",),
        "Yard.force_shrink": ("force-shrink",), "Yard.forget_node": ("forget",),
        "Yard.catalog": ("nodes list", "plan show"),
        "Yard.change_catalog": (
            "nodes invite", "nodes drain", "nodes admit", "nodes declare-dead", "nodes remove", "nodes replace",
            "cluster finalise", "cluster recover", "plan pause", "plan resume", "plan cancel",
        ),
    }
)  # fmt: skip
"""The commands that do what a verb does."""


def faces_of(verb: str) -> list[str]:
    """Return which faces have a verb."""
    return [face for face, classes in FACES.items() if verb in verbs(classes)]


def taken(face: str, verb: str) -> list[tuple[str, str, str]]:
    """Return name, kind and default of what a verb takes in a face."""
    kind, _, name = verb.partition(".")
    given = list(inspect.signature(getattr(FACES[face][kind], name)).parameters.values())[1:]
    return [(one.name, one.kind.name, repr(one.default)) for one in given]


def told() -> list[str]:
    """Return the verbs of any face, by class, in the order of the matrix."""
    every = {verb for classes in FACES.values() for verb in verbs(classes)}
    return sorted(every, key=lambda verb: (list(MADE_BY).index(verb.partition(".")[0]), list(ROWS).index(verb)))


def differing() -> list[str]:
    """Return the verbs that some face has not, or takes otherwise."""
    return [
        verb
        for verb in told()
        if (found := faces_of(verb)) != list(FACES) or any(taken(one, verb) != taken(found[0], verb) for one in found)
    ]


def page() -> Iterator[str]:
    """Yield the lines of docs/faces.md."""
    yield from (
        "# Verbs by face",
        "",
        "<!-- Printed by `python -m tests.everyday.page`; a test compares. -->",
        "",
        "One table for all ways in: a system inside your own process (`logyard.open_system`, under trio), the network",
        "from tasks (`logyard.connect`, under trio or asyncio) or from threads (`logyard.connect_sync`), and the",
        "command line. A verb has the same name and takes the same arguments wherever it is; what is not so has its",
        "reason beside it. How the faces differ in what they do (connections, gathering, order, sessions) is in",
        "[decision 0028](decisions/0028-one-source-for-the-faces.md), for embedding in",
        "[0029](decisions/0029-embedding-is-one-more-caller.md); what each verb answers in every everyday situation",
        "is the table of `tests/everyday`. A client belongs to the process that opened it: in the child of a fork its",
        "verbs raise `BadRequest`, and closing it closes nothing of the parent's; open one in each process, after the",
        "fork.",
    )
    kind = ""
    for verb in told():
        if not verb.startswith(f"{kind}."):
            kind = verb.partition(".")[0]
            yield from (
                "",
                f"## {kind}: {MADE_BY[kind]}",
                "| verb | embedded | trio | asyncio | blocking | command line | where it is not the same |",
                "| --- | --- | --- | --- | --- | --- | --- |",
            )
        have = faces_of(verb)
        cells = ["yes" if face in have else "-" for face in FACES]
        commands = ", ".join(f"`logyard {one}`" for one in COMMANDS_OF.get(verb, ()))
        row = (f"`{verb.partition('.')[2]}`", *cells, commands, WHY_NOT.get(verb, ""))
        yield f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
