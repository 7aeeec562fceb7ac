"""The arguments of a CALL: they come from a stranger, so each is checked for its type and its bounds before use.

Invariant: bytes become objects, many times their size, only within `ELEMENTS_MAX` and `DEPTH_MAX`, and lists and maps
only where a verb has a use for them. Used by `rpc`, and by the handlers of `rpc_calls`, `rpc_scans` and `pushes`;
anything that does not fit is `BadRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from logyard.client.scans import RANGES_MAX, Range
from logyard.engine.types import Buffer
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest

DEPTH_MAX = 16
ELEMENTS_MAX = 1 << 17
"""Of all arguments of a call, nested ones too."""
KEYS_MAX = 64
KEY_BYTES_MAX = 32
SMALL_BYTES = 512
"""A call of so many bytes can't become much, whatever it is."""
CONTAINERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "create": frozenset({"specs"}), "locate": frozenset({"names"}), "snapshot": frozenset({"names"}),
        "members": frozenset({"changes"}), "key_metrics": frozenset({"names"}), "logs": frozenset({"names"}),
        "scan": frozenset({"ranges"}), "seek": frozenset({"times"}), "audit": frozenset({"range"}),
        "fetch": frozenset({"requests"}), "kv_change": frozenset({"add", "remove"}), "kv_watch": frozenset({"add"}),
    }
)  # fmt: skip
"""The arguments of a verb that are lists or maps; all others are plain values."""
_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Strings and bytes: bytes of their length."""
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
          0xD3: 8}  # fmt: skip
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
NAMES_MAX = 4096
CHANGES_MAX = 128
"""Members of a group, leaving and coming."""
NUMBER_MAX = (1 << 63) - 1
WAIT_S_MAX = 60.0
UID_MAX = (1 << 64) - 1


def decode_call(body: Buffer) -> tuple[str, dict[str, Any]]:
    """(method, arguments) of a CALL, without lists and maps that the method has no use for: of a large one those are
    not even built. Raises `ProtocolError`."""
    if len(body) <= SMALL_BYTES:
        method, arguments = wire.decode_call(body)
        used = CONTAINERS.get(method, frozenset())
        return method, {key: one for key, one in arguments.items() if key in used or not isinstance(one, list | dict)}
    data = bytes(body)
    if data[0] != 0x92:
        raise wire.ProtocolError("a CALL is a method and a map of arguments")
    at, left = skim(data, 1, ELEMENTS_MAX)
    method = wire.unpack(data[1:at], strict=True)
    count, at = _map_header(data, at)
    if not isinstance(method, str) or count < 0:
        raise wire.ProtocolError("a CALL is a method and a map of arguments")
    used = CONTAINERS.get(method, frozenset())
    arguments = {}
    for _ in range(count):
        value, left = skim(data, at, left)
        end, left = skim(data, value, left)
        # A longer key is none of ours.
        key = wire.unpack(data[at:value], strict=True) if value - at <= KEY_BYTES_MAX else None
        if isinstance(key, str) and (key in used or not _is_container(data[value])):
            arguments[key] = wire.unpack(data[value:end], strict=True)
            if len(arguments) > KEYS_MAX:
                raise wire.ProtocolError(f"a CALL has at most {KEYS_MAX} arguments")
        at = end
    if at != len(data):
        raise wire.ProtocolError("bytes behind the arguments of a CALL")
    return method, arguments


def skim(data: bytes, at: int, left: int) -> tuple[int, int]:
    """Where the value at `at` ends, and how many of `left` elements are left behind it. Builds nothing. Raises
    `ProtocolError` for what is deeper than `DEPTH_MAX`, cut, or more than `left`."""
    pending = [1]
    try:
        while pending:
            if not pending[-1]:
                pending.pop()
                continue
            pending[-1] -= 1
            left -= 1
            if left < 0:
                raise wire.ProtocolError(f"a CALL has at most {ELEMENTS_MAX} elements")
            tag = data[at]
            at += 1
            if tag <= 0x7F or tag >= 0xE0:
                continue
            inside = -1
            if tag <= 0x8F:
                inside = 2 * (tag & 15)
            elif tag <= 0x9F:
                inside = tag & 15
            elif tag <= 0xBF:
                at += tag & 31
            elif tag in _FIXED:
                at += _FIXED[tag]
            elif tag in _SIZES:
                at += _SIZES[tag] + int.from_bytes(data[at : at + _SIZES[tag]], "big")
            else:
                wide = _LISTS.get(tag) or _MAPS.get(tag)
                if wide is None:
                    raise wire.ProtocolError(f"a CALL has no values of type {tag:#x}")
                inside = int.from_bytes(data[at : at + wide], "big") * (2 if tag in _MAPS else 1)
                at += wide
            if inside >= 0:
                if len(pending) > DEPTH_MAX:
                    raise wire.ProtocolError(f"a CALL is nested at most {DEPTH_MAX} deep")
                pending.append(inside)
    except IndexError:
        at = len(data) + 1
    if at > len(data):
        raise wire.ProtocolError("a CALL is cut")
    return at, left


def _is_container(tag: int) -> bool:
    return 0x80 <= tag <= 0x9F or tag in _LISTS or tag in _MAPS


def _map_header(data: bytes, at: int) -> tuple[int, int]:
    """(pairs of the map at `at`, where they begin); -1 for what is no map."""
    tag = data[at] if at < len(data) else 0
    if 0x80 <= tag <= 0x8F:
        return tag & 15, at + 1
    wide = _MAPS.get(tag)
    if wide is None:
        return -1, at
    return int.from_bytes(data[at + 1 : at + 1 + wide], "big"), at + 1 + wide


class Asked:
    """A call's arguments, checked as they are taken."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(key, default)
        if isinstance(value, str) and value and len(value) <= 256:
            return value
        raise BadRequest(f"{key} is a text of 1 to 256 characters")

    def number(self, key: str, default: int | None = None, least: int = 0) -> int:
        """An integer from `least` up."""
        value = self._values.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= NUMBER_MAX:
            return value
        raise BadRequest(f"{key} is a whole number from {least} up")

    def optional_number(self, key: str) -> int | None:
        """An integer from 0 up, or None."""
        return None if self._values.get(key) is None else self.number(key)

    def uid(self, key: str) -> int:
        """A group's uid; 0: whichever."""
        value = self._values.get(key, 0)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= UID_MAX:
            return value
        raise BadRequest(f"{key} is a group's uid")

    def seconds(self, key: str) -> float:
        """A duration, bounded."""
        value = self._values.get(key, 0.0)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return min(float(value), WAIT_S_MAX)
        raise BadRequest(f"{key} is a number of seconds")

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self._values.get(key, default)
        if isinstance(value, bool):
            return value
        raise BadRequest(f"{key} is true or false")

    def any(self, key: str, default: object) -> object:
        """Whatever it is: its handler looks at it."""
        return self._values.get(key, default)

    def raw(self, key: str) -> bytes:
        """Bytes."""
        value = self._values.get(key)
        if isinstance(value, bytes):
            return value
        raise BadRequest(f"{key} is bytes")

    def names(self, key: str) -> list[str]:
        """A list of group names."""
        value = self._values.get(key)
        if isinstance(value, list) and len(value) <= NAMES_MAX and all(isinstance(name, str) for name in value):
            return value
        raise BadRequest(f"{key} is a list of at most {NAMES_MAX} names")

    def changes(self, key: str) -> list[tuple[str, int]] | None:
        """A list of (kind, node), or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) <= CHANGES_MAX and all(map(_is_change, value)):
            return [(kind, node) for kind, node in value]
        raise BadRequest(f"{key} is a list of at most {CHANGES_MAX} pairs of a kind and a node")

    def optional_names(self, key: str) -> list[str] | None:
        """A list of group names, or None for all."""
        return None if self._values.get(key) is None else self.names(key)

    def ranges(self, key: str, width: int = 4) -> list[Range]:
        """A list of (log, uid, number, number); of `width` 3 the last is 0."""
        value = self._values.get(key)
        if isinstance(value, list) and len(value) <= RANGES_MAX and all(_is_range(one, width) for one in value):
            return [(name, uid, first, rest[0] if rest else 0) for name, uid, first, *rest in value]
        raise BadRequest(f"{key} is a list of at most {RANGES_MAX} lists: a log, its uid and {width - 2} numbers")

    def specs(self, key: str) -> list[dict[str, Any]]:
        """What groups to create."""
        value = self._values.get(key)
        if not isinstance(value, list) or not 0 < len(value) <= NAMES_MAX:
            raise BadRequest(f"{key} is a list of 1 to {NAMES_MAX} groups")
        return [self._spec(spec) for spec in value]

    @staticmethod
    def _spec(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise BadRequest("a group is a map of name, members, machine and arguments")
        asked = Asked(value)
        members, arguments = value.get("members"), value.get("arguments", {})
        if not isinstance(members, list) or not members or not all(type(node) is int and node > 0 for node in members):
            raise BadRequest("a group's members are node numbers")
        if not isinstance(arguments, dict):
            raise BadRequest("a machine's arguments are a map")
        name, machine = asked.text("name"), asked.text("machine", "log")
        return {"name": name, "members": members, "machine": machine, "arguments": arguments}


def _is_change(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and type(pair[1]) is int
        and 0 < pair[1] <= NUMBER_MAX
    )


def _is_range(one: object, width: int) -> bool:
    return (
        isinstance(one, list)
        and len(one) == width
        and isinstance(one[0], str)
        and all(type(number) is int and number >= 0 for number in one[1:])
        and one[1] <= UID_MAX
        and max(one[2:]) <= NUMBER_MAX
    )
