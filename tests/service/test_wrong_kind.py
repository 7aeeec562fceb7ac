"""A handle of one kind and a group of another: refused by name before anything is proposed, by every face."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from logyard.client import errors, sync
from logyard.client.aio import Yard, connect
from logyard.client.kvstore import KVStore, NativeDriver
from logyard.client.sync import connect_sync
from logyard.machines.registry import create_machine
from logyard.protocol.errors import WrongKind
from logyard.protocol.pending import OK
from logyard.service.cli.root import cli
from logyard.service.embedded import open_system
from tests.chaos.register import Registers
from tests.client.test_lane import lane
from tests.engine.host.cluster import Cluster, cluster

from .test_embedded import SMALL
from .test_exactly_once import Doors

KINDS = {"l": "log", "k": "kv", "q": "queue", "own": "registers"}
LARGE = b"L" * (2 << 20)


def made(name: str, arguments: dict[str, Any]) -> Any:
    return Registers() if name == "registers" else create_machine(name, arguments)


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Cluster, list[str]]]:
    async with cluster(path, 1, group="", machines=made) as run, trio.open_nursery() as nursery:
        specs = [{"name": name, "members": [1], "machine": kind, "arguments": {}} for name, kind in KINDS.items()]
        await run.nodes[1].create_groups(specs)
        for name in KINDS:
            await run.leader(name)
        doors = Doors(run, nursery)
        await doors.open(1)
        yield run, list(doors.addresses.values())
        nursery.cancel_scope.cancel()


def proposed(run: Cluster) -> dict[str, int]:
    return {name: run.member(1, name).raft.log.last_index for name in KINDS}


async def consumed(yard: Yard, name: str) -> None:
    async with yard.queue(name).consume() as messages:
        await messages.get(5)


async def watched(yard: Yard, name: str) -> None:
    async with yard.kv(name).watch(prefix=True) as changes:
        await changes.__anext__()


async def tailed(yard: Yard, name: str) -> None:
    async for _ in yard.log(name).tail(follow=False):
        pass


async def sent(yard: Yard, name: str, kind: str) -> None:
    session = await yard.open_session(name, kind=kind)
    await session.close()


TRIO: list[tuple[str, Callable[[Yard, str], Any]]] = [
    ("log", lambda yard, name: yard.log(name).append(b"x")),
    ("log", lambda yard, name: yard.log(name).append(b"x", LARGE)),
    ("log", lambda yard, name: yard.log(name).append(b"x", b"y", reply="append")),
    ("log", lambda yard, name: yard.log(name).append_many([(b"x", None)])),
    ("log", lambda yard, name: yard.log(name).poll(0)),
    ("log", lambda yard, name: yard.log(name).read(0)),
    ("log", lambda yard, name: yard.log(name).latest()),
    ("log", lambda yard, name: yard.log(name).truncate(0)),
    ("log", lambda yard, name: yard.log(name).retain(records=1)),
    ("log", lambda yard, name: yard.log(name).seek(0)),
    ("log", lambda yard, name: yard.log(name).producer("p")),
    ("log", lambda yard, name: yard.log(name).epoch("p", 1, 0)),
    ("log", lambda yard, name: yard.log(name).close_epoch("p", 1, 0)),
    ("log", lambda yard, name: yard.log(name).epoch_state("p")),
    ("log", tailed),
    ("kv", lambda yard, name: yard.kv(name).put(b"a", b"b")),
    ("kv", lambda yard, name: yard.kv(name).get(b"a")),
    ("kv", lambda yard, name: yard.kv(name).grant(5)),
    ("kv", watched),
    ("queue", lambda yard, name: yard.queue(name).publish(b"x")),
    ("queue", lambda yard, name: yard.queue(name).purge()),
    ("queue", lambda yard, name: yard.queue(name).stats()),
    ("queue", consumed),
    ("registers", lambda yard, name: sent(yard, name, "registers")),
]


async def test_every_verb_of_the_trio_client_names_both_kinds(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, servers), connect(servers, timeout=10) as yard:
        for kind, verb in TRIO:
            for name, other in KINDS.items():
                if other == kind:
                    continue
                before = proposed(run)
                with pytest.raises(errors.WrongKind) as refused, trio.fail_after(10):
                    await verb(yard, name)
                assert refused.value.code == "wrong_kind" and refused.value.retry == "never"
                assert (refused.value.details["kind"], refused.value.details["wanted"]) == (other, kind)
                assert name in refused.value.message and other in refused.value.message
                assert proposed(run) == before, "nothing of it is in the log"
        with pytest.raises(errors.WrongKind):
            await (await yard.log("l").producer("p")).append(b"x") and await yard.kv("l").put(b"a", b"b")
        # Each name still serves who asks for what it is.
        assert await yard.log("l").append(b"x") == 1
        assert (await yard.kv("k").put(b"a", b"b")).revision == 2
        assert await yard.queue("q").publish(b"x") == 1
        await sent(yard, "own", "registers")


SYNC: list[tuple[str, Callable[[sync.Yard, str], Any]]] = [
    ("log", lambda yard, name: yard.log(name).append(b"x")),
    ("log", lambda yard, name: yard.log(name).append(b"x", LARGE)),
    ("log", lambda yard, name: yard.log(name).append(b"x", reply="none")),
    ("log", lambda yard, name: yard.log(name).poll(0)),
    ("log", lambda yard, name: yard.log(name).seek(0)),
    ("log", lambda yard, name: list(yard.log(name).tail(follow=False))),
    ("kv", lambda yard, name: yard.kv(name).put(b"a", b"b")),
    ("kv", lambda yard, name: yard.kv(name).get(b"a")),
    ("kv", lambda yard, name: next(yard.kv(name).watch(prefix=True))),
    ("queue", lambda yard, name: yard.queue(name).publish(b"x")),
    ("queue", lambda yard, name: yard.queue(name).stats()),
    ("queue", lambda yard, name: yard.queue(name).consume().__enter__()),
]


async def test_every_verb_of_the_blocking_client_names_both_kinds(tmp_path: Path) -> None:
    def ask(servers: list[str], run: Cluster) -> None:
        with connect_sync(servers, timeout=10) as yard:
            for kind, verb in SYNC:
                for name, other in KINDS.items():
                    if other == kind:
                        continue
                    with pytest.raises(errors.WrongKind) as refused:
                        verb(yard, name)
                    assert (refused.value.details["kind"], refused.value.details["wanted"]) == (other, kind)
            assert yard.log("l").append(b"x") == 0

    async with served(tmp_path) as (run, servers):
        before = proposed(run)
        await trio.to_thread.run_sync(ask, servers, run)
        after = proposed(run)
        assert {name for name in KINDS if after[name] != before[name]} == {"l"}


async def test_the_command_line_and_the_small_store_say_it_in_one_line(tmp_path: Path) -> None:
    def ask(servers: list[str]) -> None:
        words = ["append", "k", "--servers", servers[0], "--json"]
        done = CliRunner().invoke(cli, words, input="one\n")
        found = json.loads(done.stdout.splitlines()[-1])
        assert done.exit_code == 1 and found["error"]["code"] == "wrong_kind", done.output
        done = CliRunner().invoke(cli, ["kv", "put", "l", "a", "b", "--servers", servers[0]])
        assert done.exit_code == 1 and "'l' is a log" in done.output and "Traceback" not in done.output
        store = KVStore(NativeDriver(servers, "l"))
        with pytest.raises(errors.WrongKind):
            store.write("a", b"b")
        store.close()

    async with served(tmp_path) as (_, servers):
        await trio.to_thread.run_sync(ask, servers)


async def test_a_name_that_became_another_kind_is_looked_up_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, servers), connect(servers, timeout=10) as yard:
        assert (await yard.kv("k").put(b"a", b"b")).revision == 2
        with pytest.raises(errors.WrongKind):
            await yard.log("k").append(b"x")
        await yard.delete("k")
        await yard.create("k")
        assert await yard.log("k").append(b"x") == 0
        with pytest.raises(errors.WrongKind):
            await yard.kv("k").put(b"a", b"b")

        def again() -> None:
            with connect_sync(servers, timeout=10) as blocking:
                assert blocking.log("k").append(b"y") == 1
                blocking.delete("k")
                blocking.create("k", machine="kv")
                assert blocking.kv("k").put(b"a", b"b").revision == 2

        await trio.to_thread.run_sync(again)


async def test_a_server_refuses_what_is_for_another_kind_before_it_is_proposed(tmp_path: Path) -> None:
    """What a client that compared before the name changed hands still sends."""
    async with served(tmp_path) as (run, servers), connect(servers, timeout=10) as yard:
        await yard.log("l").append(b"x")
        lane = yard.log("l").lane
        lane.uid = run.member(1, "k").uid
        before = proposed(run)
        with pytest.raises(errors.WrongKind):
            await yard.log("l").append(b"y")
        assert proposed(run) == before
        with pytest.raises(WrongKind):
            run.nodes[1].require_kind("k", "log")


def test_an_answer_of_another_form_is_no_offset() -> None:
    for length in (11, 13, 20):
        one = lane()
        batch, _ = one.add(b"x", None, 5.0)
        (taken,) = one.take(0.0)
        taken.reply(0, OK, b"r" * length)
        assert isinstance(batch.pending.error, errors.LogyardError) and "append log" in batch.pending.error.message


async def test_an_embedded_group_of_ones_own_takes_no_records(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL, machines={"registers": Registers}) as system:
        group = await system.start_group("own", Registers())
        for verb in (
            partial(group.append, b"x"),
            partial(group.append_many, [(b"x", None)]),
            partial(group.poll, 0),
            partial(group.truncate, 0),
        ):
            with pytest.raises(WrongKind, match="own"):
                await verb()
        assert (await group.describe())["state"] == "running"


async def test_offsets_are_printed_as_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many an answer names: no list is made of them."""
    monkeypatch.setattr("logyard.client.sync_log.Log.append_many", lambda *_, **__: range(5, 1 << 40))

    def ask(servers: list[str]) -> None:
        done = CliRunner().invoke(cli, ["append", "l", "--servers", servers[0], "--json"], input="one\n")
        found = json.loads(done.stdout)
        assert (found["first"], found["last"], found["records"]) == (5, (1 << 40) - 1, (1 << 40) - 5)

    async with served(tmp_path) as (_, servers):
        await trio.to_thread.run_sync(ask, servers)
