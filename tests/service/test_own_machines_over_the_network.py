"""Commands and queries of a machine of one's own, in every face of the client: exactly once, refusals as errors."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from click.testing import CliRunner

from logyard.client.aio import connect
from logyard.client.sync import connect_sync
from logyard.engine.machine import Applied, Context, Machine, PayloadRef
from logyard.machines.registry import BUILT_IN, create_machine
from logyard.protocol.errors import LogyardError
from logyard.service.cli.machine import FACES
from logyard.service.cli.root import cli
from tests.chaos.register import CAS, DIFFERENT, OK, WRITE, Registers, encode
from tests.engine.host.cluster import Cluster, cluster, until

from .test_exactly_once import Doors

ODD = (b"", b"\x01", b"\x10\x00\x01")
"""Commands that mean something else to machines of ours."""


class Echo(Registers):
    """Answers with the command."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        return Applied(bytes(command), [])


def machine_of(name: str, arguments: dict[str, Any]) -> Machine:
    if name in BUILT_IN:
        return create_machine(name, arguments)
    return (Echo if name == "echo" else Registers)()


async def by_tasks(servers: list[str], key: str) -> None:
    async with connect(servers) as yard:
        group = yard.machine("registers")
        assert await group.command(encode(WRITE, key, 1), b"payload") == OK
        assert await group.command(encode(CAS, key, 1, 2), metadata=b"m") == OK
        assert await group.command(encode(CAS, key, 1, 3)) == DIFFERENT
        assert await group.query(key.encode()) == msgpack.packb(2)
        with pytest.raises(LogyardError) as found:
            await group.command(b"", b"body")
        assert found.value.code == "bad_request"
        assert [await yard.machine("echo").command(odd) for odd in ODD] == list(ODD)
        session = await group.open_session()
        assert await session.command(encode(CAS, key, 2, 4)) == OK
        await session.close()


def by_threads(servers: list[str], key: str) -> None:
    with connect_sync(servers) as yard:
        group = yard.machine("registers")
        assert group.command(encode(WRITE, key, 1), b"payload") == OK
        assert group.command(encode(CAS, key, 1, 2), metadata=b"m") == OK
        assert group.command(encode(CAS, key, 1, 3)) == DIFFERENT
        assert group.query(key.encode()) == msgpack.packb(2)
        with pytest.raises(LogyardError) as found:
            group.command(b"", b"body")
        assert found.value.code == "bad_request"
        assert [yard.machine("echo").command(odd) for odd in ODD] == list(ODD)


def by_command_line(servers: list[str]) -> None:
    def ask(*words: str, code: int = 0) -> dict[str, Any]:
        done = CliRunner().invoke(cli, [*words, "--servers", ",".join(servers), "--json"])
        assert done.exit_code == code, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    ask("create", "typed", "--machine", "echo", "--arg", "limit=3", "--arg", "name=three")
    assert ask("describe", "typed")["machine"] == "echo"
    assert ask("command", "typed", "hello", "--payload", __file__)["reply"] == "hello"
    assert ask("command", "typed", "fffe", "--hex")["reply_hex"] == "fffe"
    assert ask("command", "typed", "no", "--hex", code=2)["error"]["code"] == "bad_request"
    assert ask("query", "registers", "a")["reply_hex"] == msgpack.packb(4).hex()
    for kind, verbs in FACES.items():
        ask("create", f"a-{kind}", "--machine", kind)
        for words in (["query"], ["query", "--node", "1"], ["command"]):
            refused = ask(*words, f"a-{kind}", "x", code=1)["error"]
            assert refused["code"] == "wrong_kind" and refused["message"].endswith(verbs)
    assert ask("query", "none", code=1)["error"]["code"] == "unknown_group"
    assert ask("create", "other", "--machine", "echo", "--compact", "key", code=2)["error"]["code"] == "bad_request"
    assert ask("create", "other", "--machine", "echo", "--arg", "limit", code=2)["error"]["code"] == "bad_request"


async def counted(run: Cluster, doors: Doors, servers: list[str], count: int) -> None:
    """Compare and set, one after the other, through connections that are cut: twice would be seen."""
    async with connect(servers) as yard, trio.open_nursery() as nursery:
        group = yard.machine("registers")
        assert await group.command(encode(WRITE, "counted", 0)) == OK
        done = 0

        def more(before: int) -> bool:
            return done >= before + 5

        async def cut() -> None:
            while True:
                await until(partial(more, done), "some more are done")
                for number in run.ids:
                    await doors.cut(number)

        nursery.start_soon(cut)
        for number in range(count):
            assert await group.command(encode(CAS, "counted", number, number + 1)) == OK
            done += 1
        nursery.cancel_scope.cancel()


def test_the_command_line_knows_every_machine_that_is_not_ones_own() -> None:
    assert set(FACES) == set(BUILT_IN)


async def test_every_face_has_commands_and_queries(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, 3, group="", machines=machine_of) as run,
        trio.open_nursery() as nursery,
    ):
        await until(lambda: all(len(one.system.live) == 3 for one in run.nodes.values()), "all are live")
        for name in ("registers", "echo"):
            await run.create(name, machine=name)
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        servers = list(doors.addresses.values())
        await by_tasks(servers, "a")
        await trio.to_thread.run_sync(asyncio.run, by_tasks(servers, "b"))
        await trio.to_thread.run_sync(by_threads, servers, "c")
        await trio.to_thread.run_sync(by_command_line, servers)
        await counted(run, doors, servers, 30)
        nursery.cancel_scope.cancel()
