"""The JSON gateway of etcd v3, asked over HTTP: what etcd's documentation promises, and how refusals look."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .server import EtcdServer, data, etcd_server, text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    flags = ("--max-request-bytes=100000", "--max-txn-ops=8", "--watch-progress-notify-interval=100ms")
    with etcd_server(tmp_path_factory.mktemp("etcd"), *flags) as found:
        yield found


def put(server: EtcdServer, key: bytes, value: bytes = b"", **fields: Any) -> int:
    return int(server.call("/v3/kv/put", key=key, value=value, **fields)["header"]["revision"])


def prefix(key: bytes) -> dict[str, bytes]:
    return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}


def keys(found: dict[str, Any]) -> list[bytes]:
    return [data(one["key"]) for one in found.get("kvs", ())]


def test_a_put_is_read_with_all_its_numbers(server: EtcdServer) -> None:
    first = put(server, b"put/a", b"one")
    second = put(server, b"put/a", b"two")
    assert second == first + 1
    found = server.call("/v3/kv/range", key=b"put/a")
    assert found["kvs"] == [
        {"key": text(b"put/a"), "create_revision": str(first), "mod_revision": str(second), "version": "2",
         "value": text(b"two")}
    ]  # fmt: skip
    assert found["count"] == "1" and int(found["header"]["cluster_id"]) > 0 and found["header"]["raft_term"] == "1"
    old = server.call("/v3/kv/range", key=b"put/a", revision=str(first))
    assert data(old["kvs"][0]["value"]) == b"one"
    before = server.call("/v3/kv/put", key=b"put/a", prev_kv=True)
    assert data(before["prev_kv"]["value"]) == b"two"
    assert "value" not in server.call("/v3/kv/range", key=b"put/a")["kvs"][0], "what is empty is left out"
    assert server.call("/v3/kv/range", key=b"put/none").keys() == {"header"}


@pytest.mark.parametrize("path", ["/v3", "/v3beta", "/v3alpha"])
def test_all_three_paths_are_one(server: EtcdServer, path: str) -> None:
    server.call(path + "/kv/put", key=b"path", value=path.encode())
    assert data(server.call("/v3/kv/range", key=b"path")["kvs"][0]["value"]) == path.encode()


def test_ranges(server: EtcdServer) -> None:
    for name, value in ((b"r/b", b"2"), (b"r/a", b"3"), (b"r/c", b"1" * 2000)):
        put(server, name, value)
    all_of = prefix(b"r/")
    assert keys(server.call("/v3/kv/range", **all_of)) == [b"r/a", b"r/b", b"r/c"]
    page = server.call("/v3/kv/range", **all_of, limit=2)
    assert keys(page) == [b"r/a", b"r/b"] and page["more"] is True and page["count"] == "3"
    assert server.call("/v3/kv/range", **all_of, count_only=True).keys() == {"header", "count"}
    only = server.call("/v3/kv/range", **all_of, keysOnly=True)["kvs"]
    assert all("value" not in one for one in only) and len(only) == 3
    down = server.call("/v3/kv/range", **all_of, sort_order="DESCEND", sort_target="KEY", serializable=True)
    assert keys(down) == [b"r/c", b"r/b", b"r/a"]
    by_value = server.call("/v3/kv/range", **all_of, sort_order=1, sort_target="VALUE", limit="2", keys_only=True)
    assert keys(by_value) == [b"r/c", b"r/b"] and by_value["more"] is True
    by_mod = server.call("/v3/kv/range", **all_of, sort_target="MOD", sort_order="ASCEND")
    assert keys(by_mod) == [b"r/b", b"r/a", b"r/c"]
    newest = by_mod["kvs"][-1]["mod_revision"]
    assert keys(server.call("/v3/kv/range", **all_of, min_mod_revision=newest)) == [b"r/c"]
    everything = server.call("/v3/kv/range", key=b"\0", range_end=b"\0", keys_only=True)
    assert {b"r/a", b"r/b", b"r/c"} <= set(keys(everything))
    gone = server.call("/v3/kv/deleterange", **all_of, prev_kv=True)
    assert gone["deleted"] == "3" and [data(one["value"]) for one in gone["prev_kvs"][:2]] == [b"3", b"2"]
    assert "deleted" not in server.call("/v3/kv/deleterange", **all_of)


def test_transactions(server: EtcdServer) -> None:
    put(server, b"t/a", b"1")
    asked = {
        "compare": [
            {"key": b"t/a", "target": "VALUE", "result": "EQUAL", "value": b"1"},
            {"key": b"t/new", "target": 0, "version": "0"},
            {"key": b"t/a", "target": "MOD", "result": "GREATER", "mod_revision": 1},
        ],
        "success": [
            {"request_put": {"key": b"t/new", "value": b"n"}},
            {"request_range": {"key": b"t/new"}},
            {"requestTxn": {"success": [{"request_delete_range": {"key": b"t/a"}}]}},
        ],
        "failure": [{"request_range": {"key": b"t/a"}}],
    }
    done = server.call("/v3/kv/txn", **asked)
    revision = {"revision": done["header"]["revision"]}
    assert done["succeeded"] is True and done["responses"] == [
        {"response_put": {"header": revision}},
        {"response_range": {"header": revision, "count": "1", "kvs": [
            {"key": text(b"t/new"), "create_revision": revision["revision"], "mod_revision": revision["revision"],
             "version": "1", "value": text(b"n")}]}},
        {"response_txn": {"header": {}, "succeeded": True, "responses": [
            {"response_delete_range": {"header": revision, "deleted": "1"}}]}},
    ]  # fmt: skip
    again = server.call("/v3/kv/txn", **asked)
    assert "succeeded" not in again and again["responses"] == [{"response_range": {"header": revision}}]


def test_refusals_look_like_etcds(server: EtcdServer) -> None:
    assert server.refusal("/v3/kv/range") == (400, 3, "etcdserver: key is not provided")
    assert server.refusal("/v3/kv/range", key=b"a", revision=1 << 40)[:2] == (400, 11)
    assert server.refusal("/v3/kv/put", key=b"a", lease=12345) == (404, 5, "etcdserver: requested lease not found")
    assert server.refusal("/v3/kv/put", key=b"none", ignore_value=True) == (400, 3, "etcdserver: key not found")
    assert server.refusal("/v3/kv/put", key=b"a", value=b"v", ignore_value=True)[2] == "etcdserver: value is provided"
    assert server.refusal("/v3/lease/revoke", ID=12345)[:2] == (404, 5)
    assert server.refusal("/v3/lease/grant", TTL=9_000_000_001)[:2] == (400, 11)
    twice = [{"request_put": {"key": b"a"}}] * 2
    assert server.refusal("/v3/kv/txn", success=twice)[2] == "etcdserver: duplicate key given in txn request"
    many = [{"request_range": {"key": b"a"}}] * 9
    assert server.refusal("/v3/kv/txn", failure=many)[2] == "etcdserver: too many operations in txn request"
    assert server.refusal("/v3/kv/put", key=b"a", value=bytes(100_001))[2] == "etcdserver: request is too large"
    assert server.refusal("/v3/kv/range", key="a*b")[:2] == (400, 3)
    assert server.refusal("/v3/kv/range", key=b"a", limit="many")[:2] == (400, 3)
    assert server.refusal("/v3/kv/range", key=b"a", limit=1 << 63)[:2] == (400, 3)
    assert server.refusal("/v3/kv/range", key=b"a", sort_order="UP")[:2] == (400, 3)
    assert server.refusal("/v3/kv/range", key=b"a", keys_only="yes")[:2] == (400, 3)
    assert server.refusal("/v3/maintenance/hash")[:2] == (501, 12)
    assert server.refusal("/v3/auth/authenticate", name="root")[:2] == (400, 9)
    assert server.refusal("/v3/kv/none") == (404, 5, "Not Found")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"3", b'{"key":', b"\xff\xfe", b"[" * 100_000, b'{"limit":' + b"9" * 5000]
)
def test_what_is_no_message_is_refused(server: EtcdServer, body: bytes) -> None:
    for path in ("/v3/kv/range", "/v3/watch", "/v3/lease/keepalive"):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        connection.request("POST", path, body)
        response = connection.getresponse()
        # As with etcd, a stream that can't even begin is an unknown error.
        wanted = (400, 3) if path == "/v3/kv/range" else (500, 2)
        assert (response.status, json.loads(response.read())["code"]) == wanted, path
        connection.close()
    assert server.call("/v3/auth/status")["header"]


def test_a_body_is_refused_before_it_is_there(server: EtcdServer) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.putrequest("POST", "/v3/kv/put")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 429 and json.loads(response.read())["message"].startswith("grpc: received message larger")
    connection.close()


def test_leases(server: EtcdServer) -> None:
    granted = server.call("/v3/lease/grant", TTL="60")
    lease = granted["ID"]
    assert granted["TTL"] == "60"
    assert server.refusal("/v3/lease/grant", TTL=60, ID=lease) == (400, 9, "etcdserver: lease already exists")
    put(server, b"l/a", b"1", lease=lease)
    put(server, b"l/b", b"1", lease=lease)
    put(server, b"l/a", b"2", ignore_lease=True)
    assert server.call("/v3/kv/range", key=b"l/a")["kvs"][0]["lease"] == lease
    for path in ("/v3/lease/timetolive", "/v3/kv/lease/timetolive"):
        left = server.call(path, ID=lease, keys=True)
        assert left["grantedTTL"] == "60" and 0 < int(left["TTL"]) <= 60
        assert [data(key) for key in left["keys"]] == [b"l/a", b"l/b"]
    with server.stream("/v3/lease/keepalive", {"ID": lease}, {"ID": "987654"}) as answers:
        kept, lost = list(answers)
    assert (kept["result"]["ID"], kept["result"]["TTL"]) == (lease, "60")
    assert lost["result"]["ID"] == "987654" and "TTL" not in lost["result"]
    for path in ("/v3/lease/leases", "/v3/kv/lease/leases"):
        assert {"ID": lease} in server.call(path)["leases"]
    assert server.call("/v3/kv/lease/revoke", ID=lease).keys() == {"header"}
    assert server.call("/v3/lease/timetolive", ID=lease)["TTL"] == "-1"
    assert "kvs" not in server.call("/v3/kv/range", **prefix(b"l/"))


def test_a_lock_is_waited_for_and_given_back(server: EtcdServer) -> None:
    leases = [server.call("/v3/lease/grant", TTL=60)["ID"] for _ in range(3)]
    first = server.call("/v3/lock/lock", name=b"door", lease=leases[0])
    assert data(first["key"]) == b"door/%x" % int(leases[0])
    assert server.call("/v3/lock/lock", name=b"door", lease=leases[0]) == first, "it has it already"
    # One that goes away while it waits is none that others wait for.
    gone = http.client.HTTPConnection(server.host, server.port, timeout=30)
    gone.request("POST", "/v3/lock/lock", json.dumps({"name": text(b"door"), "lease": leases[1]}))
    while server.call("/v3/kv/range", **prefix(b"door/"))["count"] != "2":
        pass
    gone.close()
    while server.call("/v3/kv/range", **prefix(b"door/"))["count"] != "1":
        pass
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.call, "/v3/lock/lock", name=b"door", lease=leases[2])
        while server.call("/v3/kv/range", **prefix(b"door/"))["count"] != "2":
            pass
        assert not waiting.done()
        server.call("/v3/lock/unlock", key=first["key"])
        assert data(waiting.result(60)["key"]) == b"door/%x" % int(leases[2])
    nobody = server.refusal("/v3/lock/lock", name=b"door", lease="12345")
    assert nobody[1:] == (2, "etcdserver: requested lease not found")
    mine = server.call("/v3/lock/lock", name=b"other")
    lease = server.call("/v3/kv/range", key=data(mine["key"]))["kvs"][0]["lease"]
    assert server.call("/v3/lease/timetolive", ID=lease)["grantedTTL"] == "60", "of its own"


def test_an_election_has_one_leader_at_a_time(server: EtcdServer) -> None:
    leases = [server.call("/v3/lease/grant", TTL=60)["ID"] for _ in range(2)]
    assert server.refusal("/v3/election/leader", name=b"e")[1:] == (2, "election: no leader")
    won = server.call("/v3/election/campaign", name=b"e", lease=leases[0], value=b"one")["leader"]
    assert (data(won["name"]), won["lease"]) == (b"e", leases[0])
    with ThreadPoolExecutor() as threads:
        second = threads.submit(server.call, "/v3/election/campaign", name=b"e", lease=leases[1], value=b"two")
        while server.call("/v3/kv/range", **prefix(b"e/"))["count"] != "2":
            pass
        assert data(server.call("/v3/election/leader", name=b"e")["kv"]["value"]) == b"one"
        server.call("/v3/election/proclaim", leader=won, value=b"more")
        assert data(server.call("/v3/election/leader", name=b"e")["kv"]["value"]) == b"more" and not second.done()
        server.call("/v3/election/resign", leader=won)
        assert second.result(60)["leader"]["lease"] == leases[1]
    assert data(server.call("/v3/election/leader", name=b"e")["kv"]["value"]) == b"two"
    assert server.refusal("/v3/election/proclaim", leader=won, value=b"no")[1:] == (2, "election: not leader")


def test_leases_expire_in_the_order_of_their_times(server: EtcdServer) -> None:
    with server.watch(b"x/", range_end=b"x0", filters=["NOPUT"]) as answers:
        assert next(answers)["result"]["created"] is True
        for name, ttl in ((b"x/short", 1), (b"x/long", 4)):
            put(server, name, lease=server.call("/v3/lease/grant", TTL=ttl)["ID"])
        events = [event for _ in range(2) for event in next(answers)["result"]["events"]]
    assert [(one["type"], data(one["kv"]["key"])) for one in events] == [("DELETE", b"x/short"), ("DELETE", b"x/long")]


def test_who_serves(server: EtcdServer) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.request("GET", "/version")
    said = json.loads(connection.getresponse().read())
    assert said["etcdserver"].startswith("3.5.") and said["etcdcluster"] == "3.5.0"
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read()) == {"health": "true", "reason": ""}
    connection.request("GET", "/v3/kv/range")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["code"]) == (405, 12)
    connection.close()
    members = server.call("/v3/cluster/member/list")["members"]
    assert [(one["name"], one["clientURLs"]) for one in members] == [("default", [server.url])]
    status = server.call("/v3/maintenance/status")
    assert status["version"] == said["etcdserver"] and status["leader"] == members[0]["ID"]
    assert int(status["raftIndex"]) >= int(status["raftAppliedIndex"]) > 0 and status["raftTerm"] == "1"
    assert server.call("/v3/maintenance/alarm", action="GET").keys() == {"header"}
    assert server.call("/v3/maintenance/defragment").keys() == {"header"}
    assert server.refusal("/v3/maintenance/alarm", action="ACTIVATE")[:2] == (501, 12)
