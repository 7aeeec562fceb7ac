"""The table of verbs: it is whole, its checks are the only ones, and what is printed of it is in the docs."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

from logyard.client import admin, log, scans
from logyard.client.admin import Call
from logyard.engine.host.groups import check_name
from logyard.protocol.errors import BadRequest
from logyard.protocol.frame import Epoch
from logyard.protocol.verbs import (
    ADMIN,
    CLUSTER,
    CONTAINERS,
    CREATE,
    LEADER,
    MEMBER,
    NODE,
    NUMBER_MAX,
    READ,
    READERS,
    VERBS,
    WAIT_S_MAX,
    WRITE,
    reference,
    required,
)
from logyard.service.door.dispatch import HANDLERS, PLAIN, SystemPort
from logyard.service.door.pushes import LISTENING
from tests.source_tree import ROOT, product_sources

GIVEN: dict[str, object] = {
    "name": "a", "specs": [{"name": "a", "members": [1]}], "names": ["a"], "members": [1], "offset": 0,
    "max_records": 1, "max_bytes": 1, "before": 0, "producer": 1, "incarnation": 1, "epoch": 0, "session": 1,
    "client": 1, "ttl_ms": 1, "sequence": 1, "index": 1,
    "request": b"", "command": b"\x0c", "stream": 1, "key": b"", "end": b"", "ordinal": 0, "lost": 1, "to": 1,
    "section": "nodes", "question": "list", "change": "drain", "token": b"t", "directory": 1, "peer_address": "a:1",
    "client_address": "a:2",
    "ranges": [["a", 0, 0, 1]], "times": [["a", 0, 0]], "range": [["a", 0, 0, 0]],
}  # fmt: skip
"""A value of each argument that some verb can't do without."""
LISTS = {
    "create": {"specs"}, "create_batch": {"names", "members", "arguments"},
    "locate": {"names"}, "snapshot": {"names"}, "members": {"changes"}, "key_metrics": {"names"},
    "logs": {"names"}, "scan": {"ranges"}, "seek": {"times"}, "audit": {"range"}, "fetch": {"requests"},
    "kv_change": {"add", "remove"}, "kv_watch": {"add"}, "catalog": {"values"}, "catalog_change": {"values"},
}  # fmt: skip


def test_every_verb_is_served_and_no_other() -> None:
    assert set(VERBS) == {"cluster", *HANDLERS, *LISTENING} and not set(HANDLERS) & set(LISTENING)
    for verb in VERBS.values():
        assert verb.right in (READ, WRITE, CREATE, ADMIN, CLUSTER) and verb.served in (LEADER, READERS, MEMBER, NODE)
        assert len({field.name for field in verb.fields}) == len(verb.fields)


def test_what_serves_a_verb_takes_what_the_table_has() -> None:
    for name, verb in VERBS.items():
        if name == "cluster" or name in LISTENING:
            continue
        taker: Any = getattr(SystemPort, PLAIN[name]) if name in PLAIN else HANDLERS[name]
        parameters = list(inspect.signature(taker).parameters.values())[1:]
        plain = [one for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert len(plain) == len(verb.fields), name


def test_only_lists_that_a_verb_takes_are_built() -> None:
    assert {verb: set(keys) for verb, keys in CONTAINERS.items() if keys} == LISTS


@pytest.mark.parametrize("name", VERBS)
def test_each_argument_is_checked(name: str) -> None:
    verb = VERBS[name]
    given = {field.name: GIVEN[field.name] for field in verb.fields if required(field)}
    values = verb.take(given)
    assert len(values) == len(verb.fields) and verb.take({**given, "unknown": object()}) == values
    for field in verb.fields:
        # A default is used as it is, so it must be what the check would make of it.
        assert field.default in (None, ()) or field.check(field.default) == field.default
    for field in verb.fields:
        with pytest.raises(BadRequest, match=f"^{field.name} is "):
            verb.take({**given, field.name: object()})
        if required(field):
            with pytest.raises(BadRequest, match=f"^{field.name} is "):
                verb.take({key: value for key, value in given.items() if key != field.name})


def test_a_batch_is_bounded_before_anything_is_made_of_it() -> None:
    batch: dict[str, Any] = {"names": ["a"] * 4096, "members": [1, 2, 3], "arguments": {"a": "x" * 1000}}
    assert VERBS["create_batch"].take(batch) == [batch["names"], [1, 2, 3], "log", batch["arguments"]]
    wrongs: list[dict[str, Any]] = [
        {"names": []}, {"names": ["a"] * 4097}, {"names": [1]}, {"members": []}, {"members": [0]}, {"members": [True]},
        {"members": [1] * 65}, {"arguments": {"a": "x" * 1024}}, {"arguments": {1: 2}}, {"machine": ""},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(BadRequest):
            VERBS["create_batch"].take({**batch, **wrong})


def test_a_list_that_was_left_out_is_the_calls_own() -> None:
    one, other = (VERBS["fetch"].take({"name": "a"})[1] for _ in range(2))
    assert one == other == [] and one is not other


def test_bounds() -> None:
    poll: dict[str, Any] = {"name": "a", "offset": -1, "max_records": 0, "max_bytes": NUMBER_MAX}
    assert VERBS["poll"].take({**poll, "wait_s": 1e9})[4] == WAIT_S_MAX
    assert VERBS["board"].take({"limit": NUMBER_MAX}) == [" ", 2000]
    for wrong in ({"offset": -2}, {"offset": True}, {"max_bytes": NUMBER_MAX + 1}, {"wait_s": -1}, {"uid": 1 << 64}):
        with pytest.raises(BadRequest):
            VERBS["poll"].take({**poll, **wrong})
    for ranges in ([], [["a", 0, 0, 0]] * 2):
        with pytest.raises(BadRequest, match=r"^range is one list"):
            VERBS["audit"].take({"range": ranges, "max_bytes": 1})


def test_a_name_has_the_length_that_the_engine_takes() -> None:
    check_name("a" * 128)
    specs = [{"name": "a" * 128, "members": [1]}]
    assert VERBS["create"].take({"specs": specs})[0][0]["name"] == "a" * 128
    for name in ("", "a" * 129):
        with pytest.raises(BadRequest, match="1 to 128 "):
            check_name(name)
        with pytest.raises(BadRequest, match="name is a text of 1 to 128 characters"):
            VERBS["create"].take({"specs": [{"name": name, "members": [1]}]})
        with pytest.raises(BadRequest, match="name is a text of 1 to 128 characters"):
            VERBS["describe"].take({"name": name})


CALLS: list[Call[Any]] = [
    *admin.create_calls([admin.group_spec("a", [1], "log", {})]),
    admin.batch_call(["a"], [1], "log", {}),
    admin.members_call("a", [("add", 2)]),
    admin.members_call("a", [("add", 2), ("remove", 1)]),
    admin.call_leader("transfer", "a", to=2),
    admin.call_leader("delete", "a"),
    admin.call_leader("skip", "a", index=1, ordinal=0),
    admin.call_node("compact", 1),
    log.poll_call("a", 0, 1, 1, 0.0, None, True, None, None, None),
    log.latest_call("a", None, None, None),
    log.truncate_call("a", 1),
    log.retain_call("a", 1.0, 1, 1),
    log.producer_call("a", 1),
    log.epoch_call("a", Epoch(1, 1, 0)),
    log.close_epoch_call("a", Epoch(1, 1, 0)),
    log.epoch_state_call("a", 1),
    log.partition_call("a", b"\x0c"),
    log.query_call("a", b"", None, None, 0, None),
    log.close_call("a", 1),
    scans.logs_call(1),
    scans.changed_call(1, 0),
    scans.scan_call((1,), [("a", 0, 0, 1)], max_bytes=1, max_records=1, body_bytes=None),
    scans.seek_call((1,), [("a", 0, 0)]),
    scans.audit_call(1, "a", 0, 0, 0, 1),
]


def test_a_client_asks_by_the_table_and_sends_nothing_that_would_be_refused() -> None:
    call = admin.ask("latest", admin.plain, at=2, kind="log", name="a", staleness_s=None)
    assert (call.arguments, call.nodes, call.pinned, call.group, call.kind) == ({"name": "a"}, (2,), True, "a", "log")
    assert admin.ask("query", bytes, kind="own", name="a", request=b"").arguments["kind"] == "own"
    with pytest.raises(BadRequest, match=r"^offset is a whole number from -1 up"):
        log.poll_call("a", -2, 1, 1, 0.0, None, True, None)
    with pytest.raises(BadRequest, match=r"^before is "):
        log.truncate_call("a", -1)
    with pytest.raises(KeyError):
        admin.ask("status", admin.plain, at=1, unknown=1)
    with pytest.raises(AssertionError, match="before"):
        admin.ask("truncate", int, name="a")


def test_every_call_of_a_client_is_built_from_the_table() -> None:
    made = {
        source.path
        for source in product_sources()
        for node in source.nodes
        if source.path.startswith("client/")
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Call"
    }
    assert made == {"client/admin.py"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.method)
def test_what_clients_ask_is_in_the_table(call: Call[Any]) -> None:
    verb = VERBS[call.method]
    verb.take(call.arguments)
    assert set(call.arguments) <= {"kind", *(field.name for field in verb.fields)}
    assert call.idempotent is verb.idempotent and (verb.served != LEADER or call.group == "a")


def test_the_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "verbs.md").read_text() == reference(), (
        "run: python -m logyard.protocol.verbs > docs/verbs.md"
    )


def test_the_protocols_page_has_every_verb_and_argument() -> None:
    text = (ROOT / "docs" / "wire-client.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z_]+) \|([^|]*)\|", text.partition("## Calls")[2], flags=re.M))
    assert set(VERBS) <= set(rows)
    for verb in VERBS.values():
        said = set(re.findall(r"\w+", rows[verb.name]))
        assert {field.name for field in verb.fields} <= said, verb.name
