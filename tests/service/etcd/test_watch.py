"""Watches of the JSON gateway: created at once, one message a chunk, in order, cancelled as etcd does."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from .server import EtcdServer, data, etcd_server, text
from .test_gateway import put


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    flags = ("--max-request-bytes", "30000", "--watch-progress-notify-interval=100ms")
    with etcd_server(tmp_path_factory.mktemp("etcd"), *flags) as found:
        yield found


def events(message: dict[str, Any]) -> list[tuple[str, bytes, bytes]]:
    return [
        (one.get("type", "PUT"), data(one["kv"]["key"]), data(one["kv"].get("value", "")))
        for one in message["result"]["events"]
    ]


def test_events_of_a_revision_come_together(server: EtcdServer) -> None:
    with server.watch(b"w/", range_end=b"w0", prev_kv=True) as answers:
        created = next(answers)["result"]
        assert created.keys() == {"header", "created"} and created["created"] is True
        start = put(server, b"w/a", b"1")
        puts = [{"request_put": {"key": key, "value": b"x"}} for key in (b"w/b", b"other", b"w/c")]
        server.call("/v3/kv/txn", success=puts)
        server.call("/v3/kv/deleterange", key=b"w/", range_end=b"w0")
        first, second, third = next(answers), next(answers), next(answers)
    assert events(first) == [("PUT", b"w/a", b"1")] and "type" not in first["result"]["events"][0]
    assert events(second) == [("PUT", b"w/b", b"x"), ("PUT", b"w/c", b"x")]
    assert second["result"]["header"]["revision"] == str(start + 1)
    assert events(third) == [("DELETE", key, b"") for key in (b"w/a", b"w/b", b"w/c")]
    deleted = third["result"]["events"][0]
    assert deleted["kv"] == {"key": text(b"w/a"), "mod_revision": str(start + 2)}
    assert data(deleted["prev_kv"]["value"]) == b"1"


def test_history_is_seen_again_and_filters_hold(server: EtcdServer) -> None:
    start = put(server, b"h/a", b"1")
    put(server, b"h/a", b"2")
    server.call("/v3/kv/deleterange", key=b"h/a")
    with server.watch(b"h/a", start_revision=str(start)) as answers:
        assert next(answers)["result"]["created"] is True
        found = [event for _ in range(3) for event in events(next(answers))]
    assert found == [("PUT", b"h/a", b"1"), ("PUT", b"h/a", b"2"), ("DELETE", b"h/a", b"")]
    for filters, expected in ((["NODELETE"], found[:2]), ([0], found[2:])):
        with server.watch(b"h/a", start_revision=start, filters=filters) as answers:
            next(answers)
            assert [event for _ in expected for event in events(next(answers))] == expected
    with server.watch(b"h/a", start_revision=start, prev_kv=False) as answers:
        next(answers)
        assert all("prev_kv" not in next(answers)["result"]["events"][0] for _ in range(3))


def test_a_watch_of_a_key_that_can_not_be_ends_no_other(server: EtcdServer) -> None:
    with server.watch(b"sound") as answers:
        assert next(answers)["result"]["created"] is True
        for key, end in ((b"k" * 17_000, b""), (b"k", b"l" * 17_000)):
            with server.watch(key, range_end=end) as others:
                said = next(others)["result"]
                assert said["created"] is said["canceled"] is True and "16384" in said["cancel_reason"]
        put(server, b"sound", b"1")
        assert events(next(answers)) == [("PUT", b"sound", b"1")]


def test_many_watches_on_one_stream(server: EtcdServer) -> None:
    wanted: list[dict[str, Any]] = [
        {"create_request": {"key": b"m/a", "prev_kv": True}},
        {"create_request": {"key": b"m/a", "watch_id": "70"}},
        {"create_request": {"key": b"m/a", "watch_id": 70}},
        {"create_request": {"key": b"m/b"}},
        {"cancel_request": {"watch_id": 70}},
        {"cancel_request": {"watch_id": 71}},
    ]
    with server.stream("/v3/watch", *wanted) as answers:
        said = [next(answers)["result"] for _ in range(5)]
        for one in said:
            one.pop("header")
        assert said[0] == {"created": True} and said[1] == {"watch_id": "70", "created": True}
        assert said[2].pop("cancel_reason").startswith("mvcc: duplicate watch ID")
        assert said[2] == {"watch_id": "-1", "created": True, "canceled": True}
        assert said[3] == {"watch_id": "1", "created": True} and said[4] == {"watch_id": "70", "canceled": True}
        # Events are in order on a watch, not between two of a stream.
        put(server, b"m/a", b"1")
        first = next(answers)["result"]
        put(server, b"m/b", b"2")
        second = next(answers)["result"]
    assert "watch_id" not in first and second["watch_id"] == "1"


def test_watches_of_one_key_get_what_each_asked_for(server: EtcdServer) -> None:
    put(server, b"s/a", b"1")
    with server.watch(b"s/a", prev_kv=True) as more, server.watch(b"s/a") as less:
        next(more), next(less)
        put(server, b"s/a", b"2")
        assert data(next(more)["result"]["events"][0]["prev_kv"]["value"]) == b"1"
        assert "prev_kv" not in next(less)["result"]["events"][0]


def test_what_is_compacted_ends_a_watch(server: EtcdServer) -> None:
    put(server, b"c/a", b"1")
    last = put(server, b"c/a", b"2")
    server.call("/v3/kv/compaction", revision=last)
    assert server.refusal("/v3/kv/compaction", revision=last)[:2] == (400, 11)
    assert server.refusal("/v3/kv/range", key=b"c/a", revision=last - 1) == (
        400, 11, "etcdserver: mvcc: required revision has been compacted")  # fmt: skip
    with server.watch(b"c/a", start_revision=1) as answers:
        assert next(answers)["result"]["created"] is True
        ended = next(answers)["result"]
    assert ended["canceled"] is True and ended["compact_revision"] == str(last)


def test_progress_is_told(server: EtcdServer) -> None:
    revision = put(server, b"p/other")
    with server.watch(b"p/a", progress_notify=True) as answers:
        next(answers)
        quiet = next(answers)["result"]
    assert quiet.keys() == {"header"} and int(quiet["header"]["revision"]) >= revision
    with server.stream("/v3/watch", {"create_request": {"key": b"p/a"}}, {"progress_request": {}}) as answers:
        assert next(answers)["result"]["created"] is True
        assert next(answers)["result"] == {"header": quiet["header"], "watch_id": "-1"}


def test_who_watches_from_a_revision_to_come_is_not_told_that_it_is_there(server: EtcdServer) -> None:
    revision = put(server, b"p/other")
    with server.watch(b"p/a", start_revision=str(revision + 1000), progress_notify=True) as answers:
        assert next(answers)["result"]["header"]["revision"] == str(revision)
        assert next(answers)["result"]["header"]["revision"] == str(revision)


def test_a_long_message_is_cut_where_that_is_asked_for(server: EtcdServer) -> None:
    puts = [{"request_put": {"key": b"f/%d" % number, "value": bytes(4000)}} for number in range(6)]
    for fragment, expected in ((False, [6]), (True, [5, 1])):
        with server.watch(b"f/", range_end=b"f0", fragment=fragment) as answers:
            next(answers)
            server.call("/v3/kv/txn", success=puts)
            found = [next(answers)["result"] for _ in expected]
        assert [len(one["events"]) for one in found] == expected
        assert [one.get("fragment", False) for one in found] == [True] * (len(expected) - 1) + [False]
        assert len({one["header"]["revision"] for one in found}) == 1


def test_messages_may_come_while_the_answer_runs(server: EtcdServer) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.putrequest("POST", "/v3/watch")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()

    def say(message: dict[str, Any], cut: int) -> None:
        body = json.dumps(message, default=text).encode()
        for part in (body[:cut], body[cut:]):
            connection.send(b"%x\r\n%s\r\n" % (len(part), part))

    say({"create_request": {"key": b"d/a"}}, 9)
    response = connection.getresponse()
    assert json.loads(response.readline())["result"]["created"] is True
    put(server, b"d/a", b"1")
    assert events(json.loads(response.readline())) == [("PUT", b"d/a", b"1")]
    say({"cancel_request": {"watch_id": 0}}, 20)
    assert json.loads(response.readline())["result"]["canceled"] is True
    # As with etcd, what is no message ends the request, and what was asked for goes on.
    say({"create_request": {"key": b"d/b"}}, 9)
    assert json.loads(response.readline())["result"]["created"] is True
    connection.send(b"5\r\nwrong\r\n")
    say({"create_request": {"key": b"d/c"}}, 9)
    put(server, b"d/b", b"1")
    assert events(json.loads(response.readline())) == [("PUT", b"d/b", b"1")]
    connection.close()
