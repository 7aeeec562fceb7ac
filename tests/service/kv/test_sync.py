"""The blocking KV client and the command line, against real engines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from logyard.client import errors
from logyard.client.sync import connect_sync
from logyard.protocol.errors import UnknownGroup
from logyard.protocol.kv import Changes, Compacted, Compare, Event, Get, Put
from logyard.service.cli.kv import printable
from logyard.service.cli.root import cli
from logyard.service.kv import tracks as kv_tracks
from logyard.service.kv import watch as kv_watch

from .test_verbs import served


async def test_the_blocking_client_has_the_same_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watch, "PAYLOAD_BYTES_MAX", 10_000)

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            kv = yard.kv("kv")
            large = b"L" * 70_000
            lease = kv.grant(60)
            assert kv.put(b"a", b"1", lease=lease.id).revision == 2
            done = kv.put(b"a", large, previous=True, keep_lease=True)
            assert done.previous is not None and done.previous.value == b"1"
            found = kv.get(b"a")
            assert found is not None and found.value == large and found.lease == lease.id and found.version == 2
            older = kv.get(b"a", revision=2)
            assert older is not None and older.value == b"1" and kv.get(b"none") is None
            both = kv.txn([Compare(b"a", "value", "=", large)], [Put(b"b", large), Put(b"c", large), Get(b"a", b"c")])
            assert both.succeeded and [one.value for one in both.results[2].kvs] == [large, large]  # type: ignore[union-attr]
            assert kv.count(prefix=True) == 3 and [one.key for one in kv.range(b"b", b"\0").kvs] == [b"b", b"c"]
            assert kv.keep_alive(lease.id) == 60 and kv.leases() == (lease.id,)
            assert kv.time_to_live(lease.id, keys=True).keys == (b"a",)
            changes = kv.watch(prefix=True, start=2)
            assert next(changes).events[0].key == b"a"
            assert next(changes).revision == 3
            whole = next(changes)
            assert [event.kv.value for event in whole.events if event.kv] == [large, large], "too much for one answer"
            now = kv.watch(b"a")
            assert kv.revoke(lease.id) == 1
            assert next(now) == Changes(5, (Event(b"a", None),))
            assert kv.delete(b"", prefix=True, previous=True).deleted == 2
            kv.compact(5)
            with pytest.raises(Compacted) as gone:
                next(kv.watch(b"a", start=5))
            assert gone.value.revision == 5 == kv.status()["compacted"]
            with pytest.raises(errors.LogyardError) as refused:
                kv.put(b"x", b"", lease=lease.id)
            assert refused.value.code == "lease_not_found"

    async with served(tmp_path) as (_, doors, _):
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))


async def test_a_revision_that_comes_in_parts_is_one_for_the_blocking_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tracks, "PART_BYTES", 1000)

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            kv = yard.kv("kv")
            kv.txn([], [Put(b"k%02d" % number, b"v" * (60 if number % 3 else 2000)) for number in range(40)])
            kv.put(b"k", b"next")
            changes = kv.watch(b"k", prefix=True, start=2)
            whole, after = next(changes), next(changes)
            assert (whole.revision, after.revision, len(after.events)) == (2, 3, 1)
            assert [len(event.kv.value) for event in whole.events if event.kv] == [2000, 60, 60] * 13 + [2000]

    async with served(tmp_path) as (_, doors, _):
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))


async def test_a_follower_has_what_is_too_much_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watch, "PAYLOAD_BYTES_MAX", 10_000)

    def blocking(servers: list[str], follower: int) -> None:
        with connect_sync(servers) as yard:
            kv = yard.kv("kv")
            kv.txn([], [Put(b"k%d" % number, b"%d" % number * 6000) for number in range(4)])
            whole = next(kv.watch(b"k", prefix=True, start=2, node=follower))
            assert [event.kv.value for event in whole.events if event.kv] == [b"%d" % one * 6000 for one in range(4)]

    async with served(tmp_path, 3) as (run, doors, _):
        follower = 1 + (await run.leader("kv")) % 3
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()), follower)


async def test_a_blocking_watch_does_not_go_on_in_a_group_made_anew_under_its_name(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors, _):

        async def anew() -> None:
            await run.nodes[1].delete_group("kv")
            await run.create("kv", machine="kv")

        def blocking() -> None:
            with connect_sync(list(doors.addresses.values())) as yard:
                kv = yard.kv("kv")
                changes = kv.watch(b"k", start=2)
                kv.put(b"k", b"of the group before")
                assert next(changes).revision == 2
                trio.from_thread.run(anew)
                for number in range(3):
                    kv.put(b"k", b"%d" % number)
                with pytest.raises(UnknownGroup, match="made anew"):
                    next(changes)

        await trio.to_thread.run_sync(blocking)


async def test_the_verbs_of_the_command_line(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, doors, _):
        servers = ",".join(doors.addresses.values())

        def run(*words: str, text: str | bytes | None = None, code: int = 0) -> str:
            done = CliRunner().invoke(cli, ["kv", *words, "--servers", servers], input=text)
            assert done.exit_code == code, done.output
            return done.stdout

        async def ask(*words: str, text: str | None = None, code: int = 0) -> str:
            return await trio.to_thread.run_sync(partial(run, *words, text=text, code=code))

        async def ask_json(*words: str, text: str | None = None, code: int = 0) -> Any:
            return json.loads(await ask(*words, "--json", text=text, code=code))

        assert (await ask("create", "settings", "--history", "50")).strip() == "created settings"
        assert (await ask("put", "settings", "color", "blue\tand\nred")).strip() == "2"
        assert await ask("get", "settings", "color") == "color\t2\tblue\\tand\\nred\n"
        assert await ask("get", "settings", "color", "--raw") == "blue\tand\nred"
        missing = await ask_json("get", "settings", "none", code=1)
        assert missing["error"] == {"code": "key_not_found", "message": "no key 'none'"} and missing["ok"] is False
        assert (missing["kv"], missing["revision"], missing["count"], missing["keys"]) == ("settings", 2, 0, [])
        logo = tmp_path / "logo"
        logo.write_bytes(bytes(range(256)) * 20)
        shown = await ask_json("put", "settings", "color", "--file", str(logo), "--previous")
        assert shown["previous"]["value"] == "blue\tand\nred"
        assert "value_base64" in (await ask_json("get", "settings", "", "--prefix"))["keys"][0]
        assert (await ask("put", "settings", "empty", text="")).strip() == "4"
        assert await ask("get", "settings", "empty") == "empty\t4\t\n"
        asked = {"compare": [["empty", "value", "=", ""]], "then": [["put", "a", "1"], ["get", "a"], ["delete", "b"]]}
        assert await ask("txn", "settings", text=json.dumps(asked)) == "then\t5\na\t5\t1\n"
        done = await ask_json("txn", "settings", text=json.dumps({"compare": [["a", "version", ">", 5]], "then": []}))
        assert done["succeeded"] is False and done["results"] == []
        await ask("txn", "settings", text='{"then": [["jump"]]}', code=2)
        assert (await ask("del", "settings", "a")).strip() == "1"
        lines = (await ask("watch", "settings", "", "--prefix", "--from", "4", "--count", "3")).splitlines()
        assert lines == ["4\tput\tempty\t", "5\tput\ta\t1", "6\tdelete\ta\t"]
        events = (await ask_json("watch", "settings", "a", "--from", "5", "--count", "2"))["events"]
        assert [event["type"] for event in events] == ["put", "delete"] and events[0]["value"] == "1"
        await ask("watch", "settings", "a", "--json", code=2)
        await ask("compact", "settings", "6")
        assert (await ask_json("status", "settings"))["compacted"] == 6
        assert (await ask_json("get", "settings", "a", "--revision", "2", code=1))["error"]["code"] == "compacted"


async def test_the_verbs_of_leases(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, doors, yard):
        servers = ",".join(doors.addresses.values())

        async def ask(*words: str, code: int = 0) -> str:
            def run() -> str:
                done = CliRunner().invoke(cli, ["kv", *words, "--servers", servers])
                assert done.exit_code == code, done.output
                return done.stdout

            return await trio.to_thread.run_sync(run)

        assert await ask("lease", "grant", "kv", "600") == "1\t600\n"
        assert await ask("lease", "grant", "kv", "1.5", "--id", "7") == "7\t1.5\n"
        await ask("lease", "grant", "kv", "9", "--id", "7", code=1)
        await ask("lease", "grant", "kv", "0", code=2)
        for key in ("a\tb", "c"):
            await ask("put", "kv", key, "1", "--lease", "1")
        number, granted, left = (await ask("lease", "ttl", "kv", "1")).split()
        assert (number, granted) == ("1", "600") and 0 < float(left) <= 600
        assert (await ask("lease", "ttl", "kv", "1", "--keys")).splitlines()[1:] == ["a\\tb", "c"]
        shown = json.loads(await ask("lease", "ttl", "kv", "1", "--keys", "--json"))
        assert shown["ttl"] == 600 and shown["keys"] == [{"key": "a\tb"}, {"key": "c"}]
        assert await ask("lease", "keepalive", "kv", "1") == "1\t600\n"
        assert "1" in (await ask("lease", "list", "kv")).split()
        assert json.loads(await ask("lease", "revoke", "kv", "1", "--json"))["deleted"] == 2
        assert "no lease" in json.loads(await ask("lease", "ttl", "kv", "1", "--json", code=1))["error"]["message"]
        await ask("lease", "keepalive", "kv", "7", "--follow", "--json", code=2)
        await ask("lease", "grant", "kv", "3", "--id", "8")
        async with trio.open_nursery() as nursery:
            # It ends with the lease, whichever of the two comes first.
            nursery.start_soon(partial(ask, "lease", "keepalive", "kv", "8", "--follow", code=1))
            await yard.kv("kv").revoke(8)


def test_bytes_as_one_field_of_a_line() -> None:
    assert printable(b"a\tb\nc") == "a\\tb\\nc" and printable(b"") == "" and printable(b"a\\b") == "a\\\\b"
    assert printable(b"\xff\x00\t") == "\\xff\\x00\\t"
