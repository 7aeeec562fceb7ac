"""Which row a JSON record becomes, or why it is rejected: a pure function of its bytes and the table's rules.

Nothing is lost on the way: a field that the schema does not name stays, as JSON, in the column `_rest`, and a record
that does not fit is a row of the table of rejects, with its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn

RECORD_BYTES_MAX = 1 << 20
DIMENSION_BYTES_MAX = 64
"""A dimension's value is in names of files, where each byte may take three; so longer ones are rejected."""
TYPES = ("string", "long", "double", "boolean", "timestamp", "json")
UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}
"""Units of times that are numbers, in microseconds."""
HOUR = "_hour"
REST = "_rest"
OWN = (REST, "_time", "_log", "_offset", HOUR)
NO_JSON, NO_TIME, WRONG_TYPE, TOO_LARGE = "no_json", "no_time", "wrong_type", "too_large"
REASONS = (NO_JSON, NO_TIME, WRONG_TYPE, TOO_LARGE)
LOST = "lost"
"""The reason of a row that is no record but stands for those that were truncated or deleted before they were read."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
FIRST_US = (datetime(1, 1, 2, tzinfo=UTC) - EPOCH) // MICROSECOND
LAST_US = (datetime(9999, 12, 31, tzinfo=UTC) - EPOCH) // MICROSECOND
HOUR_US = 3_600_000_000


class Bad(Exception):
    """A record that is no row. `reason` is one of `REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Dimension:
    """A field by whose value a table is partitioned. `path` leads to it through the record's objects; `default` stands
    for one that is not there."""

    column: str
    path: tuple[str, ...]
    default: str | None = None


class Row(NamedTuple):
    """`partition`: the dimensions' values and the hour. `values`: of the fields, then `_rest` and `_time`."""

    partition: tuple[str | None, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Rules:
    """How records become rows. `fields`: types by name. `unit` is of times that are numbers. `clashes`: what type the
    table has for fields that were declared with another one since: records with these are rejected."""

    fields: Mapping[str, str] = field(default_factory=dict)
    dimensions: tuple[Dimension, ...] = ()
    time: tuple[str, ...] = ("time",)
    unit: str = "s"
    clashes: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the rules as JSON has them: what a commit records."""
        return {
            "fields": dict(self.fields), "time": list(self.time), "unit": self.unit, "clashes": dict(self.clashes),
            "dimensions": [[one.column, list(one.path), one.default] for one in self.dimensions],
        }  # fmt: skip

    @property
    def partitioned_by(self) -> list[str]:
        """Return the columns that a table is partitioned by."""
        return [*(one.column for one in self.dimensions), HOUR]

    @cached_property
    def _converters(self) -> list[tuple[str, Callable[[str, Any, int], Any]]]:
        return [
            (name, _clashing(self.clashes[name], kind) if name in self.clashes else CONVERTERS[kind])
            for name, kind in self.fields.items()
        ]

    @cached_property
    def _told(self) -> frozenset[str]:
        """Return the fields of a record that columns hold, so that `_rest` need not."""
        paths = [self.time, *(one.path for one in self.dimensions)]
        return frozenset({*self.fields, *(path[0] for path in paths if len(path) == 1)})

    def row(self, data: bytes) -> Row:
        """Return the row of a record. Raises `Bad`."""
        found = parse(data)
        unit = UNITS[self.unit]
        time = instant(_at(found, self.time), unit)
        partition = tuple(_dimension(found, one) for one in self.dimensions)
        values = []
        for name, convert in self._converters:
            value = found.get(name)
            values.append(None if value is None else convert(name, value, unit))
        rest = {name: value for name, value in found.items() if name not in self._told}
        return Row((*partition, hour_of(time)), (*values, text_of(rest) if rest else None, time))


def rules_of(plain: Mapping[str, Any]) -> Rules:
    """Return rules as they were before `Rules.plain`."""
    dimensions = tuple(Dimension(column, tuple(path), default) for column, path, default in plain["dimensions"])
    return Rules(plain["fields"], dimensions, tuple(plain["time"]), plain["unit"], plain["clashes"])


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# Made once: `json.loads` and `json.dumps` make one for each record.
DECODER = json.JSONDecoder(parse_constant=_no_number)
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def parse(data: bytes) -> dict[str, Any]:
    """Return a record's object: JSON in UTF-8. Of a name that is there twice the last one counts. Raises `Bad`."""
    if len(data) > RECORD_BYTES_MAX:
        raise Bad(TOO_LARGE, f"{len(data)} bytes, {RECORD_BYTES_MAX} are allowed")
    try:
        text = data.decode()
        found = DECODER.decode(text)
        if "\\u" in text:
            # Half of a pair of surrogates can be written in JSON, and nowhere else.
            text_of(found).encode()
    except (ValueError, RecursionError) as error:
        raise Bad(NO_JSON, str(error)) from None
    if not isinstance(found, dict):
        raise Bad(NO_JSON, f"an object is expected, not {_kind(found)}")
    return found


def text_of(value: Any) -> str:
    """Return a value as JSON. Raises `Bad` for numbers that were too large for a double."""
    try:
        return ENCODER.encode(value)
    except (ValueError, RecursionError) as error:
        raise Bad(NO_JSON, str(error)) from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _at(found: Any, path: tuple[str, ...]) -> Any:
    """Return what a path leads to; None where it leads nowhere."""
    for name in path:
        if not isinstance(found, dict):
            return None
        found = found.get(name)
    return found


def instant(value: Any, unit: int) -> int:
    """Return microseconds since 1970 for a number in `unit`, or for ISO 8601 (UTC where no zone is given). Raises
    `Bad`."""
    try:
        if type(value) is str:
            found = datetime.fromisoformat(value)
            given = (found.replace(tzinfo=UTC) if found.tzinfo is None else found) - EPOCH
            us = given // MICROSECOND
        elif type(value) is int or type(value) is float:
            us = round(value * unit)
        else:
            raise Bad(NO_TIME, f"it is {_kind(value)}" if value is not None else "there is none")
    except (ValueError, OverflowError) as error:
        raise Bad(NO_TIME, str(error)) from None
    if not FIRST_US <= us < LAST_US:
        # Not the number: it may have more digits than Python writes.
        raise Bad(NO_TIME, "it is out of range: the years 1 to 9999 are expected")
    return us


@lru_cache(1024)
def _hour(number: int) -> str:
    return (EPOCH + timedelta(hours=number)).isoformat()[:13]


def hour_of(us: int) -> str:
    """Return the hour, as `2026-11-23T09`, of an instant."""
    return _hour(us // HOUR_US)


def _dimension(found: Mapping[str, Any], dimension: Dimension) -> str | None:
    value = _at(found, dimension.path)
    if value is None:
        value = dimension.default
    if value is None:
        return None
    if type(value) is int or type(value) is bool:
        value = text_of(value)
    if type(value) is not str:
        raise Bad(WRONG_TYPE, f"dimension {dimension.column}: a string is expected, not {_kind(value)}")
    # In Delta's log an empty value is none.
    if not 0 < len(value.encode()) <= DIMENSION_BYTES_MAX:
        raise Bad(WRONG_TYPE, f"dimension {dimension.column}: 1 to {DIMENSION_BYTES_MAX} bytes are expected")
    return value


def _string(name: str, value: Any, unit: int) -> str:
    if type(value) is str:
        return value
    raise _wrong(name, "string", value)


def _long(name: str, value: Any, unit: int) -> int:
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    raise _wrong(name, "long", value)


def _double(name: str, value: Any, unit: int) -> float:
    try:
        if (type(value) is float or type(value) is int) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise _wrong(name, "double", value)


def _boolean(name: str, value: Any, unit: int) -> bool:
    if type(value) is bool:
        return value
    raise _wrong(name, "boolean", value)


def _timestamp(name: str, value: Any, unit: int) -> int:
    try:
        return instant(value, unit)
    except Bad as error:
        raise Bad(WRONG_TYPE, f"{name}: a timestamp is expected: {error.detail}") from None


def _json(name: str, value: Any, unit: int) -> str:
    return text_of(value)


def _clashing(there: str, declared: str) -> Callable[[str, Any, int], NoReturn]:
    def refuse(name: str, value: Any, unit: int) -> NoReturn:
        raise Bad(WRONG_TYPE, f"{name}: the table has {there}, and the schema says {declared}")

    return refuse


def _wrong(name: str, kind: str, value: Any) -> Bad:
    return Bad(WRONG_TYPE, f"{name}: a {kind} is expected, not {_kind(value)}")


CONVERTERS: dict[str, Callable[[str, Any, int], Any]] = {
    "string": _string, "long": _long, "double": _double, "boolean": _boolean, "timestamp": _timestamp, "json": _json,
}  # fmt: skip
