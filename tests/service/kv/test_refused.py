"""A KV entry all of whose frames the session rule refuses: its machine is called with none, and the group goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from logyard.client.sync import connect_sync
from logyard.engine.replica.member import HALTED, RUNNING
from logyard.machines.kv import machine as kv_module
from logyard.machines.kv.keeping import spans_of
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame
from tests.engine.host.cluster import Cluster, until

from .test_verbs import live, machine, served


async def refused(run: Cluster) -> None:
    """Propose a frame of a session that nobody knows, as a client does that was idle for too long."""
    leader = await run.leader("kv")
    (frame,) = encode_frame([(b"", b"payload")], command=b"\0", session=99, sequence=1)
    with pytest.raises(LogyardError) as caught:
        await run.nodes[leader].commit(run.member(leader, "kv"), [frame])
    assert caught.value.code in ("session_expired", "unknown")


async def test_a_blocking_client_that_was_idle_past_its_time_to_live_writes_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors, _):

        def ended() -> bool:
            return all(not run.member(number, "kv").sessions for number in run.ids)

        def blocking() -> None:
            with connect_sync(list(doors.addresses.values()), session_ttl=2) as yard:
                kv = yard.kv("kv")
                first = kv.put(b"a", b"1").revision
                trio.from_thread.run(until, ended, "the session has ended")
                assert kv.put(b"a", b"2").revision == first + 1
                found = kv.get(b"a")
                assert found is not None and found.value == b"2"

        await trio.to_thread.run_sync(blocking)
        assert all(run.member(number, "kv").state == RUNNING for number in run.ids)


async def test_a_group_that_an_older_program_halted_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, 3) as (run, doors, yard):
        kv = yard.kv("kv")
        await kv.put(b"a", b"1")
        with monkeypatch.context() as older:
            older.setattr(kv_module, "spans_of", lambda frames: spans_of(frames) if frames[0] else [])
            await refused(run)
            await until(lambda: all(run.member(number, "kv").state == HALTED for number in run.ids))
            index = run.member(1, "kv").raft.applied + 1
            for number in run.ids:
                await doors.crash(number)
        for number in run.ids:
            await doors.start(number)
        await kv.put(b"b", b"2")
        await until(lambda: all(len(machine(run, number).state.live) == 2 for number in run.ids))
        assert all(run.member(number, "kv").state == RUNNING for number in run.ids)
        assert [one.value for one in (await kv.range(b"a", b"c")).kvs] == [b"1", b"2"]
        for number in run.ids:
            assert not any(one.first < (index + 1, 0) and (index, 0) < one.end for one in live(run, number))


async def test_a_refused_entry_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, 1) as (run, _, yard):
        kv = yard.kv("kv")
        await kv.put(b"a", b"L" * 70_000)
        before = machine(run, 1).snapshot()
        await refused(run)
        assert machine(run, 1).snapshot() == before
        assert (await kv.get(b"a")) is not None
