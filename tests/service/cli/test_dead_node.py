"""Verbs for every node, when one of them is dead: the others do it, and it is named."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from logyard.service.cli.root import cli
from tests.client.fake_system import fake_cluster

SCRUBBED: dict[str, Any] = {
    "passes": 1, "wanted": 1, "epoch": 1, "last": {}, "findings": [], "error": "", "left": 0,
}  # fmt: skip


@pytest.mark.parametrize("words", [["snapshot"], ["snapshot", "orders"], ["compact"], ["scrub"]], ids=" ".join)
async def test_every_live_node_does_it_and_the_dead_one_is_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logyard.client._sync.admin.STATUS_PATIENCE_S", 1.0)
    async with fake_cluster() as cluster:
        for node in cluster.nodes.values():
            monkeypatch.setattr(node, "scrub", lambda start: SCRUBBED, raising=False)
        servers = ["--servers", cluster.addresses[1]]
        invoke = partial(CliRunner().invoke, cli)
        with trio.fail_after(20):
            await trio.to_thread.run_sync(invoke, ["create", "orders", "--members", "1,2,3", *servers])
            # Nobody listens there.
            cluster.addresses[2] = "127.0.0.1:1"
            found = await trio.to_thread.run_sync(invoke, [*words, *servers, "--json"])
    fields = json.loads(found.stdout.splitlines()[-1])
    assert found.exit_code == 1 and not fields["ok"] and fields["missing"] == [2]
    assert list(fields["nodes"]) == ["1", "3"]
    assert "node 2 did not do it: cannot reach 127.0.0.1:1" in fields["error"]["message"]
    assert found.stderr == f"error: {fields['error']['message']}\n"


async def test_a_node_that_works_for_longer_than_one_is_silent_for_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logyard.client.sync_link.STALL_S", 0.3)
    begun: list[int] = []

    async def compact(number: int) -> dict[str, int]:
        begun.append(number)
        await trio.sleep(1.0)
        return {"files": number}

    async with fake_cluster() as cluster:
        for number, node in cluster.nodes.items():
            monkeypatch.setattr(node, "compact", partial(compact, number))
        words = ["compact", "--servers", cluster.addresses[1], "--timeout", "15", "--json"]
        with trio.fail_after(20):
            found = await trio.to_thread.run_sync(partial(CliRunner().invoke, cli), words)
    fields = json.loads(found.stdout.splitlines()[-1])
    assert found.exit_code == 0 and begun == [1, 2, 3]
    assert fields["nodes"] == {"1": {"files": 1}, "2": {"files": 2}, "3": {"files": 3}}


async def test_a_member_is_read_without_a_leader() -> None:
    async with fake_cluster() as cluster:
        cluster.create("orders", [1, 2, 3], leader=0).records.append((b"head", b"body"))
        words = ["read", "orders", "--node", "2", "--servers", cluster.addresses[1], "--timeout", "3", "--json"]
        with trio.fail_after(20):
            found = await trio.to_thread.run_sync(partial(CliRunner().invoke, cli), words)
    fields = json.loads(found.stdout.splitlines()[-1])
    assert found.exit_code == 0, fields
    assert [(one["metadata"], one["payload"]) for one in fields["records"]] == [("head", "body")]
