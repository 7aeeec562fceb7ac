"""JSON as etcd's gateway reads and writes it: base64, numbers as text, names or numbers of enums, zeros left out.

What comes from a stranger is looked at here; every refusal is a `GatewayError` with a gRPC code, whose HTTP status and
body are those of etcd's own gateway. Used by all of `service.etcd`.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import Event, KeyValue

UNKNOWN, INVALID, NOT_FOUND, PERMISSION_DENIED, EXHAUSTED = 2, 3, 5, 7, 8
PRECONDITION, RANGE, UNIMPLEMENTED, UNAVAILABLE = 9, 11, 12, 14
STATUS_OF = {UNKNOWN: 500, INVALID: 400, NOT_FOUND: 404, PERMISSION_DENIED: 403, EXHAUSTED: 429, PRECONDITION: 400,
             RANGE: 400, UNIMPLEMENTED: 501, UNAVAILABLE: 503}  # fmt: skip
INT64_MAX = (1 << 63) - 1
INT64_MIN = -(1 << 63)

NO_KEY = "etcdserver: key is not provided"
TOO_LARGE = "etcdserver: request is too large"
TOO_MANY = "etcdserver: too many requests"
NO_LEADER = "etcdserver: no leader"
OVERHEAD_BYTES = 512 << 10
"""What a request may have beside keys and values."""
REFUSALS: Mapping[str, tuple[int, str]] = {
    "compacted": (RANGE, "etcdserver: mvcc: required revision has been compacted"),
    "future_revision": (RANGE, "etcdserver: mvcc: required revision is a future revision"),
    "lease_not_found": (NOT_FOUND, "etcdserver: requested lease not found"),
    "lease_exists": (PRECONDITION, "etcdserver: lease already exists"),
    "key_not_found": (INVALID, "etcdserver: key not found"),
    "duplicate_key": (INVALID, "etcdserver: duplicate key given in txn request"),
    "too_many_operations": (INVALID, "etcdserver: too many operations in txn request"),
    "no_space": (EXHAUSTED, "etcdserver: mvcc: database space exceeded"),
    "busy": (EXHAUSTED, TOO_MANY),
    "not_leader": (UNAVAILABLE, NO_LEADER),
    "unknown": (UNAVAILABLE, "etcdserver: request timed out"),
}
"""What the KV machine and its client say, as etcd says it."""
TEXTS: Mapping[str, int] = {
    "bad_request": INVALID,
    "value_is_payload": INVALID,
    "too_many_leases": EXHAUSTED,
    "too_large": EXHAUSTED,
    "unreachable": UNAVAILABLE,
    "unknown_group": UNAVAILABLE,
    "group_stopped": UNAVAILABLE,
    "session_expired": UNAVAILABLE,
}
"""Those that etcd has no word for keep their own."""


class GatewayError(Exception):
    """A refusal: `code` as gRPC numbers them, `status` of HTTP."""

    def __init__(self, code: int, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or STATUS_OF[code]

    @property
    def body(self) -> bytes:
        """As the gateway says it."""
        return packed({"error": self.message, "code": self.code, "message": self.message})


class NotJson(GatewayError):
    """What can't be parsed; with `begun`, perhaps it only goes on."""

    def __init__(self, message: str, begun: bool = False) -> None:
        super().__init__(INVALID, message)
        self.begun = begun


def translated(error: LogyardError) -> GatewayError:
    """Return what the KV group or its client said."""
    if error.code in REFUSALS:
        return GatewayError(*REFUSALS[error.code])
    return GatewayError(TEXTS.get(error.code, UNKNOWN), f"etcdserver: {error.message}")


def packed(value: Mapping[str, Any]) -> bytes:
    """Return a message as bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def too_long(size: int, limit: int) -> GatewayError:
    """Return a request that etcd would not take from its own gateway."""
    return GatewayError(EXHAUSTED, f"grpc: received message larger than max ({size} vs. {limit})")


def malformed(what: str) -> GatewayError:
    """Return what can't be read."""
    return GatewayError(INVALID, what)


_NUMBER = re.compile(r" *(-?(?:0|[1-9][0-9]{0,19})|null) *")
_SPACE = re.compile(r"[ \t\r\n]*")
_LINE_ENDS = {ord("\r"): None, ord("\n"): None}


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def first_value(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON object (or null) that begins at `at`, and where it ends. Raises `NotJson`."""
    # Whatever else it is has not to be read to be refused.
    if text[at : at + 1] not in ("{", "n"):
        raise NotJson(f"invalid character {text[at : at + 1]!r} looking for a message")
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise NotJson(f"invalid JSON at character {error.pos}", True) from None
    except (ValueError, RecursionError):
        raise NotJson("invalid JSON") from None


def behind_space(text: str, at: int = 0) -> int:
    """Return where the next value begins, or the end."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches


def decoded(data: bytes, schema: Schema) -> Message:
    """Return the message of a request's body: its first value, whatever comes behind; an empty one has no fields."""
    text = data.decode("utf-8", "replace")
    at = behind_space(text)
    return schema.read(first_value(text, at)[0] if at < len(text) else None)


class Message:
    """The fields of a request, by the name that etcd's protocol gives them; they were checked (`Schema`)."""

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def data(self, name: str) -> bytes:
        """Return a field of bytes."""
        found: bytes = self.fields.get(name, b"")
        return found

    def key(self, name: str = "key") -> bytes:
        """Return a key, which is not empty."""
        found = self.data(name)
        if not found:
            raise GatewayError(INVALID, NO_KEY)
        return found

    def number(self, name: str) -> int:
        """Return a number; also that of an enum, which may be one that nobody knows."""
        found: int = self.fields.get(name, 0)
        return found

    def flag(self, name: str) -> bool:
        """Return a field that is true or false."""
        found: bool = self.fields.get(name, False)
        return found

    def rows(self, name: str) -> list[Any]:
        """Return a list, perhaps an empty one."""
        found: list[Any] = self.fields.get(name, [])
        return found

    def message(self, name: str) -> Message | None:
        """Return a message, if it is there."""
        return self.fields.get(name)

    def which(self, names: Sequence[str]) -> str:
        """Return the one that counts of fields that exclude each other, the last one; "" for none."""
        return next((name for name in reversed(names) if name in self.fields), "")


Kind: TypeAlias = Callable[[str, Any], Any]
"""Reads one value of a field of that name. Raises `GatewayError`."""


class Schema:
    """The fields of a message and their kinds. Each may also be written as lowerCamelCase, which counts more; unknown
    fields are ignored, as etcd's gateway does."""

    __slots__ = ("_spelled",)

    def __init__(self, **kinds: Kind) -> None:
        self._spelled: dict[str, tuple[str, Kind, str]] = {}
        for name, kind in kinds.items():
            self.add(name, kind)

    def add(self, name: str, kind: Kind) -> None:
        """Add one more field."""
        first, *rest = name.split("_")
        camel = first + "".join([part.capitalize() for part in rest])
        self._spelled[camel] = (name, kind, "")
        if camel != name:
            self._spelled[name] = (name, kind, camel)

    def read(self, found: Any) -> Message:
        """Return a parsed JSON value as a message. Raises `GatewayError`."""
        if found is None:
            return Message({})
        if type(found) is not dict:
            raise malformed(f"json: cannot unmarshal {_kind(found)} into a message")
        fields = {}
        spelled = self._spelled
        for spelling, value in found.items():
            known = spelled.get(spelling)
            if known is not None and value is not None and known[2] not in found:
                fields[known[0]] = known[1](spelling, value)
        return Message(fields)


def data(name: str, found: Any) -> bytes:
    """Return bytes: base64, also in lines, or a list of numbers."""
    if type(found) is str:
        if "\n" in found or "\r" in found:
            found = found.translate(_LINE_ENDS)
        try:
            if not len(found) % 4 and not found.endswith("==="):
                return b64decode(found, validate=True)
        except (binascii.Error, ValueError):
            pass
        raise malformed(f"{name}: illegal base64 data")
    if type(found) is list:
        numbers = [0 if one is None else one for one in found]
        if all([type(one) is int and 0 <= one < 256 for one in numbers]):
            return bytes(numbers)
    raise _mismatch(name, found, "base64")


def number(name: str, found: Any) -> int:
    """Return a 64-bit number, as text or as a number."""
    if type(found) is str:
        matched = _NUMBER.fullmatch(found)
        if matched is None:
            raise _mismatch(name, found, "int64")
        found = 0 if matched[1] == "null" else int(matched[1])
    if type(found) is not int:
        raise _mismatch(name, found, "int64")
    if not INT64_MIN <= found <= INT64_MAX:
        raise malformed(f"{name}: {found} is no int64")
    return found


def flag(name: str, found: Any) -> bool:
    """Return true or false."""
    if type(found) is not bool:
        raise _mismatch(name, found, "bool")
    return found


def string(name: str, found: Any) -> str:
    """Return words."""
    if type(found) is not str:
        raise _mismatch(name, found, "string")
    return found


def choice(*names: str) -> Kind:
    """Return the kind of an enum: by name the place of it, or any number."""

    def read(name: str, found: Any) -> int:
        if type(found) is str:
            if found not in names:
                raise malformed(f"unknown value {json.dumps(found)[:80]} for enum {name}")
            return names.index(found)
        if found is None:
            return 0
        if type(found) is not int or not -(1 << 31) <= found < 1 << 31:
            raise _mismatch(name, found, "an enum")
        return found

    return read


def many(kind: Kind) -> Kind:
    """Return a list."""

    def read(name: str, found: Any) -> list[Any]:
        if type(found) is not list:
            raise _mismatch(name, found, "list")
        return [kind(name, one) for one in found]

    return read


def one(schema: Schema) -> Kind:
    """Return a message."""
    return lambda name, found: schema.read(found)


def _mismatch(name: str, found: Any, wanted: str) -> GatewayError:
    return malformed(f"json: cannot unmarshal {_kind(found)} into {wanted} of field {name}")


def _kind(found: Any) -> str:
    names = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(found), "value")


class Header(NamedTuple):
    """What every answer begins with."""

    cluster: int
    member: int
    term: int

    def at(self, revision: int) -> dict[str, str]:
        """Return the field of an answer as of a revision."""
        found = {"cluster_id": str(self.cluster), "member_id": str(self.member)}
        if revision:
            found["revision"] = str(revision)
        return found | ({"raft_term": str(self.term)} if self.term else {})


def text(data: bytes) -> str:
    """Return bytes as JSON has them."""
    return b64encode(data).decode()


def key_value(one: KeyValue) -> dict[str, str]:
    """Return a key, its value and its revisions."""
    found = {
        "key": text(one.key), "create_revision": str(one.create_revision), "mod_revision": str(one.mod_revision),
        "version": str(one.version),
    }  # fmt: skip
    if one.value:
        found["value"] = text(one.value)
    if one.lease:
        found["lease"] = str(one.lease)
    return found


def event(one: Event, revision: int) -> dict[str, Any]:
    """Return a change: a put has no type."""
    if one.kv is not None:
        found: dict[str, Any] = {"kv": key_value(one.kv)}
    else:
        found = {"type": "DELETE", "kv": {"key": text(one.key), "mod_revision": str(revision)}}
    if one.previous is not None:
        found["prev_kv"] = key_value(one.previous)
    return found
