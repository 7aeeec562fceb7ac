"""The arguments of a CALL as bytes, which come from a stranger: what they may become before the verb looks at them.

Invariant: bytes become objects, many times their size, only within `ELEMENTS_MAX` and `DEPTH_MAX`, and lists and maps
only where a verb has a use for them (`protocol.verbs`, which checks the values). Used by `server`.
"""

from __future__ import annotations

from typing import Any

from logyard.engine.types import Buffer
from logyard.protocol import wire
from logyard.protocol.verbs import CONTAINERS

DEPTH_MAX = 16
ELEMENTS_MAX = 1 << 17
"""Of all arguments of a call, nested ones too."""
KEYS_MAX = 64
KEY_BYTES_MAX = 32
SMALL_BYTES = 512
"""A call of so many bytes can't become much, whatever it is."""
_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Strings and bytes: bytes of their length."""
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
          0xD3: 8}  # fmt: skip
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def decode_call(body: Buffer) -> tuple[str, dict[str, Any]]:
    """Return (method, arguments) of a CALL, without lists and maps that the method has no use for: of a large one those
    are not even built. Raises `ProtocolError`."""
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
    """Return where the value at `at` ends, and how many of `left` elements are left behind it. Builds nothing. Raises
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
    """Return (pairs of the map at `at`, where they begin); -1 for what is no map."""
    tag = data[at] if at < len(data) else 0
    if 0x80 <= tag <= 0x8F:
        return tag & 15, at + 1
    wide = _MAPS.get(tag)
    if wide is None:
        return -1, at
    return int.from_bytes(data[at + 1 : at + 1 + wide], "big"), at + 1 + wide
