"""The gateway through clients that are not ours: etcd3gw, curl, the Perl stack; and through our own KVStore driver.

LOGYARD_PERL_ETCD names a directory with Net::Etcd and AnyEvent::KVStore::Etcd (a lib/perl5 of a local install); without
it those are skipped. A real etcd is asked the same in `tests.etcd`.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import etcd3gw
import pytest

from logyard.client.kvstore import KVStore
from tests.source_tree import ROOT

from ..kv.test_kvstore import story
from .server import EtcdServer, data, etcd_server

WAIT_S = 60.0
PERL = os.environ.get("LOGYARD_PERL_ETCD", "")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.mark.long
def test_our_own_driver(server: EtcdServer) -> None:
    for key in (b"story/a", b"story/b", b"story/c", b"other", b"story/after"):
        server.call("/v3/kv/deleterange", key=key)
    store = KVStore()
    assert store.kvconnect("etcd", url=server.url), store.last_error
    present = server.call("/v3/kv/range", key=b"\0", range_end=b"\0", keys_only=True)
    for one in present.get("kvs", ()):
        server.call("/v3/kv/deleterange", key=one["key"])
    story(store)


def test_etcd3gw_keys(server: EtcdServer) -> None:
    client = etcd3gw.client(host=server.host, port=server.port)
    assert client.base_url == server.url and client.api_path == "/v3/", "it chooses its path by the version"
    assert client.put("gw/a", "one") and client.put("gw/b", "two")
    assert client.get("gw/a") == [b"one"] and client.get("gw/none") == []
    found = client.get_prefix("gw/", sort_order="descend", sort_target="key")
    assert [(value, meta["key"]) for value, meta in found] == [(b"two", b"gw/b"), (b"one", b"gw/a")]
    assert client.create("gw/new", "1") and not client.create("gw/new", "2")
    assert client.replace("gw/new", "1", "3") and not client.replace("gw/new", "1", "4")
    assert client.get("gw/new") == [b"3"]
    assert client.delete("gw/new") and not client.delete("gw/new")
    assert client.delete_prefix("gw/")
    status: Any = client.status()
    assert status["version"].startswith("3.5.")
    members: Any = client.members()
    assert members[0]["name"] == "default"


def test_etcd3gw_leases_and_locks(server: EtcdServer) -> None:
    client = etcd3gw.client(host=server.host, port=server.port)
    lease = client.lease(ttl=60)
    assert client.put("gl/a", "1", lease=lease) and lease.keys() == [b"gl/a"]
    assert 0 < lease.ttl() <= 60 and lease.refresh() == 60
    assert lease.revoke() and lease.ttl() == -1 and client.get("gl/a") == []
    first, second = client.lock("name", ttl=60), client.lock("name", ttl=60)
    assert first.acquire() and first.is_acquired() and not second.acquire()
    assert first.release() and second.acquire() and second.release()


def test_etcd3gw_watches(server: EtcdServer) -> None:
    client = etcd3gw.client(host=server.host, port=server.port)
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start = int(server.call("/v3/kv/put", key=b"gx/0")["header"]["revision"]) + 1
    watch = etcd3gw.watch.Watcher(client, "gx/", seen.put, range_end="gx0", start_revision=start)
    client.put("gx/a", "1")
    client.delete("gx/a")
    put, deleted = seen.get(timeout=WAIT_S), seen.get(timeout=WAIT_S)
    assert (put["kv"]["key"], put["kv"]["value"]) == (b"gx/a", b"1") and "type" not in put
    assert (deleted["kv"]["key"], deleted["type"]) == (b"gx/a", "DELETE")
    watch.stop()


def test_curl(server: EtcdServer) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")

    def run(path: str, body: str, *more: str) -> str:
        command = [curl or "", "-sS", "--max-time", str(WAIT_S), *more, server.url + path, "-d", "@-"]
        return subprocess.run(command, input=body, capture_output=True, text=True, check=True).stdout

    assert json.loads(run("/v3/kv/put", '{"key": "Y3VybA==", "value": "YmFy"}'))["header"]
    assert json.loads(run("/v3/kv/range", '{"key": "Y3VybA=="}'))["kvs"][0]["value"] == "YmFy"
    assert run("/v3/kv/range", "{}", "-o", os.devnull, "-w", "%{http_code} %{content_type}") == "400 application/json"
    large = json.dumps({"key": "Y3VybA==", "value": "A" * 400_000})
    assert json.loads(run("/v3/kv/put", large, "-H", "Expect: 100-continue"))["header"]
    command = [curl, "-sSN", server.url + "/v3/watch", "-d", '{"create_request": {"key": "Y3VybA=="}}']
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["result"]["created"] is True
        run("/v3/kv/deleterange", '{"key": "Y3VybA=="}')
        assert json.loads(process.stdout.readline())["result"]["events"][0]["type"] == "DELETE"
        process.terminate()


def test_the_guide(server: EtcdServer) -> None:
    """The curl lines of docs/guides/etcd.md, as they stand there but for the port."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    guide = (ROOT / "docs/guides/etcd.md").read_text()
    lines = [line for line in guide.splitlines() if line.startswith("curl ")]
    put, get, watch = (line.replace("http://127.0.0.1:2379", server.url) for line in lines)
    with subprocess.Popen(shlex.split(watch), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["result"]["created"] is True
        subprocess.run(shlex.split(put), capture_output=True, check=True)
        seen = json.loads(process.stdout.readline())["result"]["events"][0]["kv"]
        found = subprocess.run(shlex.split(get), capture_output=True, check=True).stdout
        assert json.loads(found)["kvs"] == [seen] and data(seen["value"]) == b"blue"
        process.terminate()


NET_ETCD = r"""
use strict; use warnings; use Net::Etcd; use AnyEvent;
my $etcd = Net::Etcd->new({ host => $ARGV[0], port => $ARGV[1], api_version => '3', auth => 0 });
die "put" unless $etcd->put({ key => 'perl/a', value => 'one' })->is_success;
die "get" unless $etcd->range({ key => 'perl/a' })->get_value eq 'one';
my ($done, @seen) = AE::cv;
my $watch = $etcd->watch({ key => 'perl/a' }, sub { push @seen, $_[0]; $done->send if @seen >= 2 })->create;
my $later = AE::timer 0, 0.2, sub { $etcd->put({ key => 'perl/a', value => 'two' }) };
my $limit = AE::timer 30, 0, sub { $done->croak('no event') };
$done->recv; undef $later;
my $lease = $etcd->lease({ ID => 7587821338341002662, TTL => 60 })->grant;
die "lease" unless $lease->is_success;
die "keepalive" unless $etcd->lease({ ID => 7587821338341002662 })->keepalive->is_success;
die "delete" unless $etcd->deleterange({ key => 'perl/a' })->is_success;
print "good\n";
"""
KVSTORE = r"""
use strict; use warnings; use AnyEvent; use AnyEvent::KVStore;
my $kv = AnyEvent::KVStore->new(module => 'etcd', config => { host => $ARGV[0], port => $ARGV[1] });
$kv->write('kvs/a', 'one');
die "read" unless $kv->read('kvs/a') eq 'one';
die "exists" unless $kv->exists('kvs/a') and not $kv->exists('kvs/none');
die "list" unless join(',', $kv->list('kvs/')) eq 'kvs/a';
my $done = AE::cv;
$kv->watch('kvs/', sub { my ($key, $value) = @_; $done->send($value) if $value eq 'two' });
my $later = AE::timer 0, 0.2, sub { $kv->write('kvs/b', 'two') };
my $limit = AE::timer 30, 0, sub { $done->croak('no event') };
die "watch" unless $done->recv eq 'two';
print "good\n";
"""


@pytest.mark.parametrize("script", [NET_ETCD, KVSTORE], ids=["Net::Etcd", "AnyEvent::KVStore::Etcd"])
def test_the_perl_stack(server: EtcdServer, script: str, tmp_path: Path) -> None:
    if not PERL:
        pytest.skip("not run: LOGYARD_PERL_ETCD names no directory with the Perl modules")
    path = tmp_path / "client.pl"
    path.write_text(script)
    command = ["perl", "-I", PERL, str(path), server.host, str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
