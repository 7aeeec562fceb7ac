"""The rules of a table from keys of a KV group, all as of one revision.

Below a prefix (`tables/NAME/` by default): `schema` is an object of types by field, `dimensions` a list of fields,
`time` a field, or an object with `field` and `unit`; all JSON, and each may be left out. Bagger's layout is understood
as well: `Dimension/ID` with `fieldname`, `default_val`, `ordinality`, `valid_from` and `valid_until`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import GetResult

from .rules import OWN, TYPES, UNITS, Dimension, Rules

BAGGERS = "Dimension/"
COLUMN = re.compile(r"[\w@$-]{1,64}")
"""What a column may be called. Delta takes somewhat more; what is in no column is in `_rest`."""


class BadTable(LogyardError):
    """What a KV group says of a table can't be read, or does not fit the table that is there."""

    code = "bad_table"


class Described(NamedTuple):
    """The rules, and the KV group's revision that they are of."""

    revision: int
    rules: Rules


class Reads(Protocol):
    """What is needed of a KV group, as `client.kv_sync` has it."""

    def range(self, key: bytes, *, prefix: bool) -> GetResult:
        """Return the keys that begin with `key`, as of one revision."""


def describe(kv: Reads, group: str, prefix: str) -> Described:
    """Return what the KV group says now. Raises `BadTable`."""
    found = kv.range(prefix.encode(), prefix=True)
    # A key that is no text is nobody's of these.
    values = {one.key.decode(errors="replace").removeprefix(prefix): one.value for one in found.kvs}
    if not any(name in ("schema", "dimensions", "time") or name.startswith(BAGGERS) for name in values):
        raise BadTable(
            f"KV group {group!r} describes no table under {prefix!r}: there is no key {prefix}schema, "
            f"{prefix}dimensions, {prefix}time or {prefix}{BAGGERS}..."
        )
    return Described(found.revision, described(values, prefix, datetime.now(UTC)))


def described(values: Mapping[str, bytes], prefix: str, now: datetime) -> Rules:
    """Return the rules that keys, without their prefix, say. Raises `BadTable`."""
    documents = {name: _document(prefix + name, value) for name, value in values.items() if _is_ours(name)}
    fields = documents.get("schema", {})
    if not isinstance(fields, dict):
        raise BadTable(f'{prefix}schema: an object is expected, like {{"user": "string"}}')
    dimensions = _dimensions(documents, prefix, now)
    taken = [*OWN, *(one.column for one in dimensions)]
    for name, kind in fields.items():
        if kind not in TYPES:
            raise BadTable(f"{prefix}schema: {name}: {kind!r} is no type; there are {', '.join(TYPES)}")
        _check_column(f"{prefix}schema", name, taken)
    # Names of columns are told apart in any case by Delta, and by Spark in one only.
    if len({name.lower() for name in fields}) < len(fields):
        raise BadTable(f"{prefix}schema: two fields differ in upper and lower case alone")
    path, unit = _time(documents.get("time", "time"), prefix)
    return Rules(fields, dimensions, path, unit)


def _is_ours(name: str) -> bool:
    return name in ("schema", "dimensions", "time") or name.startswith(BAGGERS)


def _document(key: str, value: bytes) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadTable(f"{key}: this is no JSON: {error}") from None


def _check_column(key: str, name: str, taken: list[str]) -> None:
    if not COLUMN.fullmatch(name):
        raise BadTable(f"{key}: {name!r}: a column's name has letters, digits, _, @, $ and -, 64 at most")
    if name.lower() in (one.lower() for one in taken):
        raise BadTable(f"{key}: {name!r}: a column of that name is there already ({', '.join(taken)})")


def _time(document: Any, prefix: str) -> tuple[tuple[str, ...], str]:
    given = document if isinstance(document, dict) else {"field": document}
    unit = given.get("unit", "s")
    if not isinstance(unit, str) or unit not in UNITS or given.keys() - {"field", "unit"}:
        raise BadTable(f"{prefix}time: a field is expected, or field and unit ({', '.join(UNITS)})")
    return _path(f"{prefix}time", given.get("field")), unit


def _path(key: str, given: Any) -> tuple[str, ...]:
    """Return the path that a name, a JSON pointer or a list of names says."""
    names = given
    if isinstance(given, str):
        pointer = [one.replace("~1", "/").replace("~0", "~") for one in given.split("/")[1:]]
        names = pointer if given.startswith("/") else [given]
    if not isinstance(names, list) or not names or not all(isinstance(one, str) and one for one in names):
        raise BadTable(f"{key}: {given!r} is no field: a name is expected, or a path like /client/name")
    return tuple(names)


def _dimensions(documents: Mapping[str, Any], prefix: str, now: datetime) -> tuple[Dimension, ...]:
    rows = documents.get("dimensions")
    key = f"{prefix}dimensions"
    if rows is None:
        key = f"{prefix}{BAGGERS}..."
        rows = _baggers({name: one for name, one in documents.items() if name.startswith(BAGGERS)}, prefix, now)
    if not isinstance(rows, list):
        raise BadTable(f"{key}: a list of fields is expected")
    found: list[Dimension] = []
    for row in rows:
        given = row if isinstance(row, dict) else {"field": row}
        default = given.get("default")
        if given.keys() - {"field", "default"} or not isinstance(default, str | None) or default == "":
            raise BadTable(f"{key}: a field is expected, or field and default, not {row!r}")
        path = _path(key, given.get("field"))
        column = re.sub(r"[^\w@$-]", "_", "_".join(path))
        _check_column(key, column, [*OWN, *(one.column for one in found)])
        found.append(Dimension(column, path, default))
    return tuple(found)


def _baggers(documents: Mapping[str, Any], prefix: str, now: datetime) -> list[dict[str, Any]]:
    """Return Bagger's dimensions that are valid now, in their order."""
    rows: list[tuple[int, str, dict[str, Any]]] = []
    for name, one in documents.items():
        key = prefix + name
        if not isinstance(one, dict) or not isinstance(one.get("ordinality", 0), int):
            raise BadTable(f"{key}: an object with fieldname and ordinality is expected")
        since, until = _bound(key, one.get("valid_from"), -1), _bound(key, one.get("valid_until"), 1)
        if since <= now < until:
            default = one.get("default_val") or None
            rows.append((one.get("ordinality", 0), name, {"field": one.get("fieldname"), "default": default}))
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])]


def _bound(key: str, given: Any, side: int) -> datetime:
    """Return a bound in time; of an open one what lies before or behind everything."""
    if given in (None, "infinity", "-infinity"):
        forever = side if given is None else 1 if given == "infinity" else -1
        return (datetime.max if forever > 0 else datetime.min).replace(tzinfo=UTC)
    try:
        found = datetime.fromisoformat(given)
    except (TypeError, ValueError):
        raise BadTable(f"{key}: {given!r} is no time") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
