"""The arguments of a CALL: they come from a stranger, so each is checked for its type and its bounds before use.

Used by the handlers of `rpc_calls`, `rpc_scans` and `pushes`; anything that does not fit is `BadRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logyard.client.scans import RANGES_MAX, Range
from logyard.engine.errors import BadRequest

NAMES_MAX = 4096
CHANGES_MAX = 128
"""Members of a group, leaving and coming."""
NUMBER_MAX = (1 << 63) - 1
WAIT_S_MAX = 60.0
UID_MAX = (1 << 64) - 1


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
