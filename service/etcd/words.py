"""JSON as etcd's gateway reads and writes it: base64, numbers as text, names or numbers of enums, zeros left out.

What comes from a stranger is looked at here; every refusal is a `GatewayError` with a gRPC code, whose HTTP status and
body are those of etcd's own gateway. Used by all of `service.etcd`.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from logyard.client.errors import LogyardError
from logyard.client.kv_wire import Event, KeyValue

UNKNOWN, INVALID, NOT_FOUND, EXHAUSTED, PRECONDITION, RANGE, UNIMPLEMENTED, UNAVAILABLE = 2, 3, 5, 8, 9, 11, 12, 14
STATUS_OF = {UNKNOWN: 500, INVALID: 400, NOT_FOUND: 404, EXHAUSTED: 429, PRECONDITION: 400, RANGE: 400,
             UNIMPLEMENTED: 501, UNAVAILABLE: 503}  # fmt: skip
INT64_MAX = (1 << 63) - 1
INT64_MIN = -(1 << 63)

NO_KEY = "etcdserver: key is not provided"
TOO_LARGE = "etcdserver: request is too large"
TOO_MANY = "etcdserver: too many requests"
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
    "not_leader": (UNAVAILABLE, "etcdserver: no leader"),
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


def translated(error: LogyardError) -> GatewayError:
    """What the KV group or its client said."""
    if error.code in REFUSALS:
        return GatewayError(*REFUSALS[error.code])
    return GatewayError(TEXTS.get(error.code, UNKNOWN), f"etcdserver: {error.message}")


def packed(value: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def malformed(what: str) -> GatewayError:
    """What can't be read."""
    return GatewayError(INVALID, what)


def not_json(error: Exception) -> GatewayError:
    """What the parser could not read."""
    return malformed(
        f"invalid JSON at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "invalid JSON"
    )


def decoded(data: bytes) -> Message:
    """The message of a request's body; an empty one has no fields."""
    if not data.strip():
        return Message({})
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise not_json(error) from None
    return message(found)


def message(found: Any) -> Message:
    """A parsed JSON value that has to be an object."""
    if not isinstance(found, dict):
        raise malformed(f"json: cannot unmarshal {_kind(found)} into a message")
    return Message(found)


class Message:
    """The fields of a request, each checked when it is asked for; unknown ones are ignored, as etcd's gateway does.
    Names may also be written as lowerCamelCase."""

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def _get(self, name: str) -> Any:
        found = self.fields.get(name)
        if found is None and "_" in name:
            first, *rest = name.split("_")
            found = self.fields.get(first + "".join([part.capitalize() for part in rest]))
        return found

    def has(self, name: str) -> bool:
        """Whether a field is there."""
        return self._get(name) is not None

    def data(self, name: str) -> bytes:
        """Bytes, as base64."""
        found = self._get(name)
        if found is None:
            return b""
        if not isinstance(found, str):
            raise _mismatch(name, found, "base64")
        try:
            return b64decode(found, validate=True)
        except (binascii.Error, ValueError):
            raise malformed(f"{name}: illegal base64 data") from None

    def key(self, name: str = "key") -> bytes:
        """A key, which is not empty."""
        found = self.data(name)
        if not found:
            raise GatewayError(INVALID, NO_KEY)
        return found

    def number(self, name: str) -> int:
        """A 64-bit number, as text or as a number."""
        found = self._get(name)
        if found is None:
            return 0
        if isinstance(found, str):
            try:
                found = int(found) if found.isascii() and len(found) <= 20 and "_" not in found else found
            except ValueError:
                pass
        if type(found) is not int:
            raise _mismatch(name, found, "int64")
        if not INT64_MIN <= found <= INT64_MAX:
            raise malformed(f"{name}: {found} is no int64")
        return found

    def flag(self, name: str) -> bool:
        """True or false."""
        found = self._get(name)
        if found is None:
            return False
        if type(found) is not bool:
            raise _mismatch(name, found, "bool")
        return found

    def choice(self, name: str, names: Sequence[str]) -> int:
        """An enum: the place of its name."""
        return choice_of(name, self._get(name), names)

    def rows(self, name: str) -> list[Any]:
        """A list, perhaps an empty one."""
        found = self._get(name)
        if found is None:
            return []
        if not isinstance(found, list):
            raise _mismatch(name, found, "list")
        return found

    def messages(self, name: str) -> list[Message]:
        """A list of messages."""
        return [message(one) for one in self.rows(name)]

    def message(self, name: str) -> Message | None:
        """A message, if it is there."""
        found = self._get(name)
        return None if found is None else message(found)


def choice_of(name: str, found: Any, names: Sequence[str]) -> int:
    """The place of an enum's value, given by name or by number."""
    if found is None:
        return 0
    if isinstance(found, str) and found in names:
        return names.index(found)
    if type(found) is int and 0 <= found < len(names):
        return found
    raise malformed(f"unknown value {json.dumps(found)[:80]} for enum {name}")


def _mismatch(name: str, found: Any, wanted: str) -> GatewayError:
    return malformed(f"json: cannot unmarshal {_kind(found)} into {wanted} of field {name}")


def _kind(found: Any) -> str:
    if found is None:
        return "null"
    names = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(found), "value")


class Header(NamedTuple):
    """What every answer begins with."""

    cluster: int
    member: int
    term: int

    def at(self, revision: int) -> dict[str, str]:
        """The field of an answer as of a revision."""
        found = {"cluster_id": str(self.cluster), "member_id": str(self.member)}
        if revision:
            found["revision"] = str(revision)
        return found | ({"raft_term": str(self.term)} if self.term else {})


def text(data: bytes) -> str:
    """Bytes as JSON has them."""
    return b64encode(data).decode()


def key_value(one: KeyValue) -> dict[str, str]:
    """A key, its value and its revisions."""
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
    """A change: a put has no type."""
    if one.kv is not None:
        found: dict[str, Any] = {"kv": key_value(one.kv)}
    else:
        found = {"type": "DELETE", "kv": {"key": text(one.key), "mod_revision": str(revision)}}
    if one.previous is not None:
        found["prev_kv"] = key_value(one.previous)
    return found
