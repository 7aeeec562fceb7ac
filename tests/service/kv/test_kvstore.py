"""One interface over three stores: the same story with each; watches that lose their connection, and what they need."""

from __future__ import annotations

import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from logyard.client.kvstore import KVStore
from logyard.protocol.errors import BadRequest
from logyard.service.local_cluster import free_ports
from tests.client.etcd_stand_in import Server

from .test_verbs import machine, served

WAIT_S = 20.0


def story(store: KVStore) -> None:
    """What every driver does the same way."""
    seen: queue.SimpleQueue[tuple[bytes, bytes | None]] = queue.SimpleQueue()
    one: queue.SimpleQueue[tuple[bytes, bytes | None]] = queue.SimpleQueue()
    assert store.read("story/a") is None and not store.exists("story/a")
    watch = store.watch("story/", lambda key, value: seen.put((key, value)), prefix=True)
    assert store.kvwatch(b"story/b", lambda key, value: one.put((key, value)))
    store.write("story/a", b"1")
    store.write("story/b", "")
    assert store.read("story/b") == b"" and store.exists("story/b"), "an empty value is there"
    store.write("other", b"x")
    store.write("story/a", None)
    store.write("story/c", bytes(range(256)))
    assert store.list("story/") == [b"story/b", b"story/c"] and store.list() == [b"other", b"story/b", b"story/c"]
    expected = [(b"story/a", b"1"), (b"story/b", b""), (b"story/a", None), (b"story/c", bytes(range(256)))]
    assert [seen.get(timeout=WAIT_S) for _ in expected] == expected
    assert one.get(timeout=WAIT_S) == (b"story/b", b"")
    called: list[tuple[bytes, bytes | None]] = []
    assert store.kvread("story/c", lambda key, value: called.append((key, value))) == bytes(range(256))
    assert store.kvread("story/none") is None and store.last_error is None
    assert store.kvwrite("story/c", None, lambda key, value: called.append((key, value)))
    assert called == [(b"story/c", bytes(range(256))), (b"story/c", None)]
    assert store.kvread("") is False and isinstance(store.last_error, BadRequest)
    assert store.kvwrite("", b"") is False and store.kvwatch("", print) is False
    assert seen.get(timeout=WAIT_S) == (b"story/c", None) and watch.alive
    watch.close()
    store.write("story/after", b"")
    assert seen.empty() and not watch.alive
    store.close()


def test_memory() -> None:
    store = KVStore()
    assert store.kvread("a") is False and isinstance(store.last_error, BadRequest)
    assert store.kvconnect("sea") is False and "there are: memory" in str(store.last_error)
    assert store.kvconnect("memory")
    story(store)


async def test_native(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, doors, _):

        def run() -> None:
            store = KVStore()
            assert store.kvconnect("native", servers=list(doors.addresses.values()), group="kv")
            story(store)

        await trio.to_thread.run_sync(run)


async def test_a_native_watch_goes_on_over_a_crash_and_over_what_was_compacted(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, doors, yard):
        kv = yard.kv("kv")
        seen: queue.SimpleQueue[tuple[bytes, bytes | None]] = queue.SimpleQueue()
        store = KVStore()
        servers = list(doors.addresses.values())
        assert await trio.to_thread.run_sync(lambda: store.kvconnect("native", servers=servers, group="kv"))
        await trio.to_thread.run_sync(lambda: store.watch("", lambda key, value: seen.put((key, value)), prefix=True))
        found = []
        for number in range(20):
            await kv.put(b"k%d" % number, b"")
            if number == 10:
                leader = await run.leader("kv")
                await doors.crash(leader)
                await doors.start(leader)
            found.append(await trio.to_thread.run_sync(lambda: seen.get(timeout=WAIT_S)))
        assert found == [(b"k%d" % number, b"") for number in range(20)], "none missing, none twice"
        assert machine(run, await run.leader("kv")).state.revision == 21
        await trio.to_thread.run_sync(store.close)


async def test_a_native_watch_tells_what_there_is_in_a_group_made_anew_under_its_name(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors, yard):
        seen: queue.SimpleQueue[tuple[bytes, bytes | None]] = queue.SimpleQueue()
        store = KVStore()
        servers = list(doors.addresses.values())
        assert await trio.to_thread.run_sync(lambda: store.kvconnect("native", servers=servers, group="kv"))
        await trio.to_thread.run_sync(lambda: store.watch("", lambda key, value: seen.put((key, value)), prefix=True))
        for number in range(3):
            await yard.kv("kv").put(b"old", b"%d" % number)
            found = await trio.to_thread.run_sync(lambda: seen.get(timeout=WAIT_S))
            assert found == (b"old", b"%d" % number)
        # Nobody sees it go: there is no connection meanwhile.
        await doors.close(1)
        await run.nodes[1].delete_group("kv")
        await run.create("kv", machine="kv")
        await doors.open(1)
        await yard.kv("kv").put(b"new", b"1")
        for expected in ((b"old", None), (b"new", b"1")):
            assert await trio.to_thread.run_sync(lambda: seen.get(timeout=WAIT_S)) == expected
        await trio.to_thread.run_sync(store.close)


@pytest.fixture
def stand_in() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.cut()
        server.shutdown()


def connected(server: Server) -> KVStore:
    store = KVStore()
    assert store.kvconnect("etcd", url=f"http://127.0.0.1:{server.server_address[1]}"), store.last_error
    return store


def test_etcd_over_its_json_gateway(stand_in: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.client.kvstore_etcd.WATCH_S", 0.5)
    store = connected(stand_in)
    stand_in.write(b"elsewhere", b"")
    stand_in.write(b"elsewhere", None)
    story(store)


def test_an_etcd_watch_survives_cuts_and_compaction(stand_in: Server) -> None:
    store = connected(stand_in)
    seen: queue.SimpleQueue[tuple[bytes, bytes | None]] = queue.SimpleQueue()

    def watching(count: int) -> None:
        with stand_in.changed:
            assert stand_in.changed.wait_for(lambda: stand_in.watches >= count, WAIT_S)

    store.watch("k", lambda key, value: seen.put((key, value)), prefix=True)
    watching(1)
    store.write("k1", b"one")
    assert seen.get(timeout=WAIT_S) == (b"k1", b"one")
    stand_in.cut()
    store.write("k1", None)
    store.write("k2", b"two")
    assert [seen.get(timeout=WAIT_S) for _ in range(2)] == [(b"k1", None), (b"k2", b"two")]
    store.write("k0", b"stays")
    assert seen.get(timeout=WAIT_S) == (b"k0", b"stays")
    watching(2)
    with stand_in.changed:
        # All of it happens while nobody is connected, and is compacted before anybody is again.
        stand_in.generation += 1
        stand_in.revision += 5
        stand_in.values = {b"k0": stand_in.values[b"k0"], b"k3": (stand_in.revision, b"three")}
        stand_in.compacted = stand_in.revision
        stand_in.changed.notify_all()
    assert [seen.get(timeout=WAIT_S) for _ in range(2)] == [(b"k2", None), (b"k3", b"three")]
    store.close()


def test_failures_are_said_not_raised(stand_in: Server) -> None:
    store = connected(stand_in)
    stand_in.shutdown()
    stand_in.server_close()
    assert store.kvread("a") is False and store.last_error is not None
    assert store.kvwrite("a", b"") is False and store.kvwatch("a", print) is False
    with pytest.raises(Exception, match="etcd at 127"):
        store.read("a")
    assert KVStore().kvconnect("etcd", url="ftp://x") is False


@pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd is installed (Debian: etcd-server)")
def test_a_real_etcd(tmp_path: Path) -> None:
    client, peer = free_ports(2)
    url = f"http://127.0.0.1:{client}"
    flags = {
        "--data-dir": str(tmp_path / "etcd"), "--listen-client-urls": url, "--advertise-client-urls": url,
        "--listen-peer-urls": f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
        "--initial-cluster": f"default=http://127.0.0.1:{peer}",
    }  # fmt: skip
    with subprocess.Popen(
        ["etcd", *[part for pair in flags.items() for part in pair]], stderr=subprocess.DEVNULL
    ) as run:
        try:
            store = KVStore()
            for _ in range(100):
                if store.kvconnect("etcd", url=url):
                    break
                threading.Event().wait(0.1)
            story(store)
        finally:
            run.terminate()
