"""Which row a record becomes, and why one is none; what a KV group may say of a table. Without Spark or Delta."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.pipeline.tables.kv_schema import BadTable, describe, described
from logyard.pipeline.tables.rules import (
    LAST_US,
    REASONS,
    RECORD_BYTES_MAX,
    Bad,
    Dimension,
    Rules,
    hour_of,
    rules_of,
)
from logyard.protocol.kv import GetResult, KeyValue

from .wrong_json import wrong

NOW = datetime(2026, 11, 23, 9, 30, tzinfo=UTC)
HALF_PAST = 1_795_426_200_000_000
RULES = Rules(
    {"user": "string", "n": "long", "x": "double", "ok": "boolean", "at": "timestamp", "more": "json"},
    (Dimension("shop", ("shop",), "none"), Dimension("client_name", ("client", "name"))),
)


def record(**fields: Any) -> bytes:
    return json.dumps({"time": "2026-11-23T09:30:00Z", **fields}).encode()


def reason(data: bytes, rules: Rules = RULES) -> str:
    with pytest.raises(Bad) as refused:
        rules.row(data)
    return f"{refused.value.reason}: {refused.value.detail}"


def test_a_record_becomes_a_row_and_loses_nothing() -> None:
    row = RULES.row(
        record(user="ann", n=-5, x=2, ok=False, at=12, more=[1, {"a": None}], client={"name": 7, "v": 1}, other="é")
    )
    assert row.partition == ("none", "7", "2026-11-23T09")
    rest = '{"client":{"name":7,"v":1},"other":"é"}'
    assert row.values == ("ann", -5, 2.0, False, 12_000_000, '[1,{"a":null}]', rest, HALF_PAST)
    assert RULES.row(record(shop="a/b c=%")).values == (None,) * 7 + (HALF_PAST,)


@pytest.mark.parametrize(
    ("time", "unit", "us"),
    [("2026-11-23T11:30+02:00", "s", HALF_PAST), ("2026-11-23 09:30", "s", HALF_PAST), (1_795_426_200, "s", HALF_PAST),
     (1_795_426_200_000, "ms", HALF_PAST), (HALF_PAST, "us", HALF_PAST), (0.25, "s", 250_000), (-1, "us", -1)],
)  # fmt: skip
def test_times(time: Any, unit: str, us: int) -> None:
    row = Rules(unit=unit).row(json.dumps({"time": time}).encode())
    assert row.values == (None, us) and row.partition == (hour_of(us),)


def test_an_hour_before_1970_is_its_own() -> None:
    assert [hour_of(us) for us in (-1, 0, 3_600_000_000)] == ["1969-12-31T23", "1970-01-01T00", "1970-01-01T01"]
    assert hour_of(LAST_US - 1) == "9999-12-30T23"


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "no_json: "), (b"7", "no_json: an object is expected, not a number"), (b"[" * 100_000, "no_json: "),
     (b'{"time": NaN}', "no_json: NaN"), (b'\xff\xfe{\x00}\x00', "no_json: "), (record()[:-1], "no_json: "),
     (record(other=0).replace(b": 0", b": 1e999"), "no_json: "), (record(other="\ud800"), "no_json: "),
     (b'{"time": 0, "n": ' + b"1" * 5000 + b"}", "no_json: "),
     (b"{}", "no_time: there is none"), (b'{"time": null}', "no_time: there is none"),
     (b'{"time": "soon"}', "no_time: "), (b'{"time": ' + b"9" * 4300 + b"}", "no_time: "),
     (b'{"time": 0, "at": ' + b"9" * 4300 + b"}", "wrong_type: at: "),
     (b'{"time": true}', "no_time: it is a boolean"), (b'{"time": 1e300}', "no_time: "), (b'{"time": []}', "no_time: "),
     (record(n=1.5), "wrong_type: n: a long is expected, not a number"), (record(n=True), "wrong_type: n: "),
     (record(n=1 << 63), "wrong_type: n: "), (record(x="1"), "wrong_type: x: a double is expected, not a string"),
     (record(x=10**400), "wrong_type: x: "), (record(user=1), "wrong_type: user: "), (record(ok=0), "wrong_type: ok: "),
     (record(at="never"), "wrong_type: at: a timestamp is expected: "), (record(shop=[]), "wrong_type: dimension "),
     (record(shop=""), "wrong_type: dimension shop: "), (record(shop="é" * 33), "wrong_type: dimension shop: "),
     (record(other="x" * RECORD_BYTES_MAX), "too_large: ")],
)  # fmt: skip
def test_what_is_no_row(data: bytes, why: str) -> None:
    assert reason(data).startswith(why)


def test_a_field_that_was_declared_anew_with_another_type_is_rejected_where_it_is_given() -> None:
    rules = Rules({"n": "string"}, clashes={"n": "long"})
    assert reason(record(n="x"), rules) == "wrong_type: n: the table has long, and the schema says string"
    assert reason(record(n=1), rules).startswith("wrong_type")
    assert rules.row(record(n=None)).values == (None, None, HALF_PAST)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["time", "user", "n", "x", "ok", "at", "more", "shop", "client", "other"])


@given(st.dictionaries(FIELDS, JSON) | JSON | st.binary())
def test_a_record_is_a_row_or_has_a_reason(value: Any) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        row = RULES.row(data)
    except Bad as error:
        assert error.reason in REASONS and error.detail
    else:
        found = json.loads(data)
        rest = json.loads(row.values[-2] or "{}")
        assert rest == {name: found[name] for name in found if name in ("client", "other")}
        assert len(row.partition) == 3 and len(row.values) == 8


def test_a_thousand_kinds_of_wrong() -> None:
    reasons = [reason(data).partition(":")[0] for data in wrong(seed=8, count=1000, field="n", dimension="shop")]
    assert set(reasons) == set(REASONS)


@given(st.sampled_from([RULES, Rules(), Rules({"a": "json"}, clashes={"a": "long"}, unit="ms", time=("a", "b"))]))
def test_rules_come_back_from_a_commit(rules: Rules) -> None:
    assert rules_of(json.loads(json.dumps(rules.plain()))) == rules


def say(**keys: Any) -> Rules:
    return described({name.replace("__", "/"): json.dumps(one).encode() for name, one in keys.items()}, "t/", NOW)


def test_what_a_kv_group_says_of_a_table() -> None:
    found = say(
        schema={"user": "string", "n": "long"}, time={"field": "/meta/at", "unit": "ms"},
        dimensions=["shop", {"field": ["client", "name"], "default": "none"}, "/a~1b/c"],
        unknown=5,
    )  # fmt: skip
    assert found.fields == {"user": "string", "n": "long"} and (found.time, found.unit) == (("meta", "at"), "ms")
    assert found.dimensions[:2] == (Dimension("shop", ("shop",)), Dimension("client_name", ("client", "name"), "none"))
    assert found.dimensions[2] == Dimension("a_b_c", ("a/b", "c"))
    assert say(time="when") == Rules(time=("when",))


def test_baggers_layout_of_keys() -> None:
    """Its agents write each row of its configuration as JSON: fields are names, pointers or lists of names."""
    found = say(
        Dimension__7={"id": 7, "fieldname": ["bar", "baz"], "ordinality": 1, "valid_from": "-infinity",
                      "valid_until": "infinity"},
        Dimension__9={"id": 9, "fieldname": "service", "ordinality": 0, "default_val": "none"},
        Dimension__10={"id": 10, "fieldname": "/old", "ordinality": 2, "valid_until": "2026-11-23 09:00:00+00"},
        Dimension__11={"id": 11, "fieldname": "/new", "ordinality": 3, "valid_from": "2026-11-24 00:00:00+00"},
        Servermap={"version": 1},
    )  # fmt: skip
    assert found.dimensions == (Dimension("service", ("service",), "none"), Dimension("bar_baz", ("bar", "baz")))
    assert not found.fields and found.time == ("time",)


@pytest.mark.parametrize(
    ("keys", "what"),
    [({"schema": []}, "t/schema: an object"), ({"schema": {"n": "int"}}, "t/schema: n: 'int' is no type"),
     ({"schema": {"_log": "string"}}, "t/schema: '_log'"), ({"schema": {"a b": "string"}}, "t/schema: 'a b'"),
     ({"schema": {"shop": "string"}, "dimensions": ["shop"]}, "t/schema: 'shop': a column of that name"),
     ({"schema": {"n": "long", "N": "long"}}, "differ in upper and lower case"),
     ({"dimensions": "shop"}, "t/dimensions: a list"),
     ({"dimensions": ["a", "a"]}, "t/dimensions: 'a': a column"), ({"dimensions": [3]}, "t/dimensions: 3 is no field"),
     ({"dimensions": [{"field": "a", "default": ""}]}, "t/dimensions: a field is expected"),
     ({"time": {"field": "a", "unit": "years"}}, "t/time: "), ({"time": 5}, "t/time: 5 is no field"),
     ({"Dimension__1": 5}, "t/Dimension/1: an object"),
     ({"Dimension__1": {"fieldname": "a", "valid_from": "?"}}, "is no time")],
)  # fmt: skip
def test_what_a_kv_group_may_not_say(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(BadTable) as refused:
        say(**keys)
    assert what in str(refused.value)


def test_a_value_that_is_no_json_is_refused_by_its_key() -> None:
    with pytest.raises(BadTable, match="t/schema: this is no JSON"):
        described({"schema": b"{"}, "t/", NOW)


@pytest.mark.parametrize(
    ("key", "value"), [("time", b'{"field": "t", "unit": ["s"]}'), ("schema", b"[" * 100_000), ("schema", b"\xff")]
)
def test_rules_of_the_wrong_shape_are_told(key: str, value: bytes) -> None:
    with pytest.raises(BadTable, match=f"^tables/t/{key}: "):
        described({key: value}, "tables/t/", NOW)


def test_a_key_that_is_no_text_is_passed_over() -> None:
    class Keys:
        def range(self, key: bytes, *, prefix: bool) -> GetResult:
            found = (KeyValue(b"/time", b'"at"', 1, 1, 1, 0), KeyValue(b"/\xff", b"{", 1, 1, 1, 0))
            return GetResult(7, found, False, len(found))

    assert describe(Keys(), "kv", "/") == (7, Rules(time=("at",)))
