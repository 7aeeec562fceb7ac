"""The verbs of a CALL, one table: what each takes, who answers it, whether it may be asked twice, which right it needs.

Arguments come from a stranger: each is checked for its type and its bounds before use, and what does not fit is
`BadRequest`. `client.admin.ask` builds calls by this table, `service.door.dispatch` checks and dispatches by it,
`service.door.arguments` builds lists and maps only where it has one, and `python -m logyard.protocol.verbs` prints
docs/verbs.md of it. A verb without a right, or one that nobody handles, is an error of the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgpack

from .errors import BadRequest

TEXT_MAX = 256
NAME_MAX = 128
"""Of a group; the engine also says of which characters."""
NUMBER_MAX = (1 << 63) - 1
UID_MAX = (1 << 64) - 1
WAIT_S_MAX = 60.0
NAMES_MAX = 4096
CHANGES_MAX = 128
"""Members of a group, leaving and coming."""
RANGES_MAX = 1024
"""Ranges of one scan or seek."""
BATCH_NAMES = 4096
"""Groups that one call creates asleep."""
MEMBERS_MAX = 64
"""Nodes of a group at its creation."""
ARGUMENTS_BYTES = 1024
"""A machine's arguments of a batch, which each of its groups keeps: as msgpack."""
REQUESTS_MAX = 4096
WATCHES_MAX = 65_536
LIST_ROWS = 2000
"""Rows of one page of `list`: about 250 bytes each."""
LIST_WHOLE = 100_000
"""Rows of a `list` without pages, as clients ask for it that know none."""
BOARD_ROWS = 2000
"""Rows of one board answer: about 200 bytes each."""
LOG_ROWS = 100_000
"""Rows of one `logs` answer: about 100 bytes each."""
LATEST = -1
"""As a poll's offset: behind the last record."""

Range: TypeAlias = tuple[str, int, int, int]
"""log, uid (0: whichever), first offset, end: one range of a scan."""

READ, WRITE, CREATE, ADMIN, CLUSTER = "read", "write", "create", "admin", "cluster"
"""Classes of rights: to read what groups hold, to change it, to make groups, to administer those of a prefix, and to
administer the cluster."""
LEADER, READERS, MEMBER, NODE = "leader", "readers", "member", "node"
"""Who answers: the group's leader, the others refuse with `not_leader`; the leader or any member, as `consistency` (of
watches: `local`) says; the member of the node that is asked, as far as it is; the node that is asked."""


_ALWAYS = object()


class Field(NamedTuple):
    """An argument. `check` returns the value to use, or raises `BadRequest`; `takes` says the same in words. What is
    left out is `default`: None for what must be there, unless `optional`. `sound`: a value of exactly this type, from
    the one up to the other, is what `check` would return."""

    name: str
    takes: str
    check: Callable[[Any], Any]
    default: object = None
    optional: bool = False
    container: bool = False
    sound: tuple[type, Any, Any] = (object, 0, 0)


def required(field: Field) -> bool:
    """Return whether a call must name it."""
    return field.default is None and not field.optional


class Verb:
    """One verb. `idempotent`: asked twice, it does no more than once, so a cut connection is not an unknown outcome.
    `long`: a node's work may take minutes, in which it says nothing, so silence does not say that it hangs."""

    __slots__ = ("name", "fields", "served", "idempotent", "right", "long", "_steps", "_checks", "_required")

    def __init__(
        self, name: str, fields: tuple[Field, ...], served: str, idempotent: bool, right: str, *, long: bool = False
    ) -> None:
        self.name = name
        self.fields = fields
        self.served = served
        self.idempotent = idempotent
        self.right = right
        self.long = long
        # With what needs no check: a default, which is most of what a call leaves out. A list is made anew each time.
        self._steps = tuple(
            (one.name, one.check, one.default, _ALWAYS if required(one) or one.default == () else one.default)
            for one in fields
        )
        self._checks = {one.name: (*one.sound, one.check) for one in fields}
        self._required = frozenset(one.name for one in fields if required(one))

    def given(self, arguments: Mapping[str, Any]) -> dict[str, object]:
        """Return what a caller sends: what is not None, as it was given. Raises `BadRequest` for what a node would
        refuse, before anything is sent."""
        checks = self._checks
        found: dict[str, object] = {}
        for name, value in arguments.items():
            sound, least, most, check = checks[name]
            if value is not None:
                if type(value) is not sound or not least <= value <= most:
                    check(value)
                found[name] = value
        assert self._required <= found.keys(), f"{self.name} has to be told {self._required - found.keys()}"
        return found

    def take(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return the checked values, in the order of the fields. Raises `BadRequest`."""
        found = []
        for name, check, default, sound in self._steps:
            value = arguments.get(name, default)
            found.append(value if value is sound else check(value))
        return found


def text(name: str, default: str | None = None, *, most: int = TEXT_MAX) -> Field:
    """Take a text."""
    takes = f"a text of 1 to {most} characters"

    def check(value: Any) -> str:
        if isinstance(value, str) and value and len(value) <= most and (value.isascii() or _is_utf8(value)):
            return value
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, default)


def _is_utf8(value: str) -> bool:
    """Return whether a text can be sent: one with half a surrogate pair can't."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def number(name: str, default: int | None = None, *, least: int = 0, cap: int = NUMBER_MAX) -> Field:
    """Take a whole number from `least` up; one above `cap` counts as that."""

    def check(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= NUMBER_MAX:
            return value if value <= cap else cap
        raise BadRequest(f"{name} is a whole number from {least} up")

    takes = f"a whole number from {least} up" + (f", at most {cap:,}" if cap < NUMBER_MAX else "")
    return Field(name, takes, check, default, sound=(int, least, cap))


def uid(name: str) -> Field:
    """Take a group's uid; 0: whichever."""

    def check(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= UID_MAX:
            return value
        raise BadRequest(f"{name} is a group's uid")

    return Field(name, "a group's uid, 0: whichever", check, 0, sound=(int, 0, UID_MAX))


def seconds(name: str) -> Field:
    """Take a duration, bounded."""

    def check(value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return min(float(value), WAIT_S_MAX)
        raise BadRequest(f"{name} is a number of seconds")

    return Field(name, f"seconds, at most {WAIT_S_MAX:g}", check, 0.0, sound=(float, 0.0, WAIT_S_MAX))


def flag(name: str, default: bool) -> Field:
    """Take true or false."""

    def check(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise BadRequest(f"{name} is true or false")

    return Field(name, "true or false", check, default, sound=(bool, False, True))


def raw(name: str) -> Field:
    """Take bytes."""

    def check(value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        raise BadRequest(f"{name} is bytes")

    return Field(name, "bytes", check)


def names(name: str) -> Field:
    """Take a list of group names."""
    takes = f"a list of at most {NAMES_MAX} names"

    def check(value: Any) -> list[str]:
        if isinstance(value, list) and len(value) <= NAMES_MAX and all(isinstance(one, str) for one in value):
            return value
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, container=True)


def fresh_names(name: str) -> Field:
    """Take the names of groups to create."""
    takes = f"a list of 1 to {BATCH_NAMES} names"

    def check(value: Any) -> list[str]:
        if isinstance(value, list) and 0 < len(value) <= BATCH_NAMES and all(isinstance(one, str) for one in value):
            return value
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, container=True)


def nodes(name: str) -> Field:
    """Take the nodes of a group."""
    takes = f"a list of 1 to {MEMBERS_MAX} node numbers"

    def check(value: Any) -> list[int]:
        if isinstance(value, list) and 0 < len(value) <= MEMBERS_MAX and all(type(n) is int and n > 0 for n in value):
            return value
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, container=True)


def small_map(name: str) -> Field:
    """Take a map that is kept once for each group of a batch; empty unless said."""
    takes = f"a map of at most {ARGUMENTS_BYTES} bytes as msgpack"

    def check(value: Any) -> dict[str, Any]:
        if value == ():
            return {}
        sound = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if sound and len(msgpack.packb(value)) <= ARGUMENTS_BYTES:
            found: dict[str, Any] = value
            return found
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, (), container=True)


def changes(name: str) -> Field:
    """Take a list of (kind, node)."""
    takes = f"a list of at most {CHANGES_MAX} pairs of a kind and a node"

    def check(value: Any) -> list[tuple[str, int]]:
        if isinstance(value, list) and len(value) <= CHANGES_MAX and all(map(_is_change, value)):
            return [(kind, node) for kind, node in value]
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, container=True)


def ranges(name: str, width: int = 4, *, most: int = RANGES_MAX) -> Field:
    """Take a list of (log, uid, number, number); of `width` 3 the last is 0. `most` 1: exactly one."""
    count = "one list" if most == 1 else f"a list of at most {most} lists"
    takes = f"{count}: a log, its uid and {'a number' if width == 3 else '2 numbers'}"

    def check(value: Any) -> list[Range]:
        enough = isinstance(value, list) and len(value) <= most and (value or most > 1)
        if enough and all(_is_range(one, width) for one in value):
            return [(log, owner, first, rest[0] if rest else 0) for log, owner, first, *rest in value]
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, container=True)


def specs(name: str) -> Field:
    """Take what groups to create."""
    takes = f"a list of 1 to {NAMES_MAX} groups"

    def check(value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not 0 < len(value) <= NAMES_MAX:
            raise BadRequest(f"{name} is {takes}")
        return [_spec(spec) for spec in value]

    return Field(name, takes, check, container=True)


def listed(name: str, kind: type, most: int) -> Field:
    """Take a list of one type; empty unless said. Its handler looks into it."""
    takes = f"a list of at most {most} of type {kind.__name__}"
    only = {kind}

    def check(value: Any) -> list[Any]:
        if type(value) is tuple:
            return []
        if type(value) is not list or len(value) > most or not {*map(type, value)} <= only:
            raise BadRequest(f"{name} is {takes}")
        return value

    return Field(name, takes, check, (), container=True)


def mapping(name: str) -> Field:
    """Take a map with texts for keys; empty unless said. Its handler looks into it."""
    takes = f"a map of at most {TEXT_MAX} texts to values"

    def check(value: Any) -> dict[str, Any]:
        if type(value) is tuple:
            return {}
        if isinstance(value, dict) and len(value) <= TEXT_MAX and all(isinstance(key, str) for key in value):
            return value
        raise BadRequest(f"{name} is {takes}")

    return Field(name, takes, check, (), container=True)


def optional(field: Field) -> Field:
    """Take the field, or None."""
    return field._replace(optional=True)


NAME = text("name", most=NAME_MAX)
SESSION = number("session", least=1)
EPOCH = number("producer", least=1), number("incarnation", least=1), number("epoch")
AS_LEADER = text("consistency", "leader")
STALENESS = seconds("staleness_s")
WAIT = seconds("wait_s")
_SPEC = (NAME, text("machine", "log"))


def _spec(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest("a group is a map of name, members, machine and arguments")
    members, arguments = value.get("members"), value.get("arguments", {})
    if not isinstance(members, list) or not members or not all(type(node) is int and node > 0 for node in members):
        raise BadRequest("a group's members are node numbers")
    if not isinstance(arguments, dict):
        raise BadRequest("a machine's arguments are a map")
    name, machine = (field.check(value.get(field.name, field.default)) for field in _SPEC)
    return {"name": name, "members": members, "machine": machine, "arguments": arguments}


def _is_change(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and type(pair[1]) is int
        and 0 < pair[1] <= NUMBER_MAX
    )


def _is_range(one: Any, width: int) -> bool:
    return (
        isinstance(one, list)
        and len(one) == width
        and isinstance(one[0], str)
        and all(type(part) is int and part >= 0 for part in one[1:])
        and one[1] <= UID_MAX
        and max(one[2:]) <= NUMBER_MAX
    )


_TABLE = (
    Verb("cluster", (), NODE, True, READ),
    Verb("create", (specs("specs"),), NODE, False, CREATE),
    Verb(
        "create_batch",
        (fresh_names("names"), nodes("members"), text("machine", "log"), small_map("arguments")),
        NODE, True, CREATE,
    ),
    Verb("delete", (NAME, flag("force", False), number("topic", 0), uid("uid")), LEADER, False, ADMIN),
    Verb(
        "list", (text("after", " "), optional(number("limit", least=1, cap=LIST_ROWS))), NODE, True, READ,
    ),
    Verb("describe", (NAME,), MEMBER, True, READ),
    Verb("locate", (names("names"),), NODE, True, READ),
    Verb(
        "poll",
        (
            NAME, number("offset", least=LATEST), number("max_records"), number("max_bytes"), WAIT,
            flag("bodies", True), AS_LEADER, STALENESS, optional(number("since")), uid("uid"),
        ),
        READERS, True, READ,
    ),
    Verb(
        "read_body",
        (NAME, number("offset"), number("start", 0), optional(number("stop")), flag("stored", False), uid("uid")),
        MEMBER, True, READ,
    ),
    Verb("latest", (NAME, text("consistency", "linearizable"), STALENESS, uid("uid")), READERS, True, READ),
    Verb("truncate", (NAME, number("before")), LEADER, True, ADMIN),
    Verb("retain", (NAME, number("ms", 0), number("bytes", 0), number("records", 0)), LEADER, True, ADMIN),
    Verb("producer", (NAME, number("producer", least=1)), LEADER, True, WRITE),
    Verb("epoch", (NAME, *EPOCH), LEADER, True, WRITE),
    Verb("epoch_done", (NAME, *EPOCH), LEADER, True, WRITE),
    Verb("partition", (NAME, raw("command")), LEADER, True, ADMIN),
    Verb("epoch_state", (NAME, number("producer", least=1)), LEADER, True, READ),
    Verb(
        "session_open", (NAME, SESSION, number("client", least=1), number("ttl_ms", least=1)), LEADER, True, WRITE
    ),
    Verb("session_close", (NAME, SESSION), LEADER, True, WRITE),
    Verb("heartbeat", (number("client", least=1),), NODE, True, WRITE),
    Verb("session_listen", (NAME, SESSION), LEADER, True, WRITE),
    Verb("session_reply", (NAME, SESSION, number("sequence", least=1), WAIT), MEMBER, True, WRITE),
    Verb("wait_applied", (NAME, number("index"), number("term", 0), WAIT), MEMBER, True, READ),
    Verb("query", (NAME, raw("request"), AS_LEADER, number("index", 0), STALENESS), READERS, True, READ),
    Verb(
        "fetch",
        (NAME, listed("requests", bytes, REQUESTS_MAX), text("consistency", "linearizable")),
        READERS, True, READ,
    ),
    Verb(
        "kv_watch",
        (NAME, number("stream", least=1), listed("add", list, WATCHES_MAX), flag("local", False)),
        READERS, True, READ,
    ),
    Verb(
        "kv_change",
        (
            number("stream", least=1), listed("add", list, WATCHES_MAX), listed("remove", int, WATCHES_MAX),
            flag("close", False),
        ),
        NODE, True, READ,
    ),
    Verb(
        "kv_events",
        (NAME, raw("key"), raw("end"), number("flags", 0), number("start", 0), WAIT, AS_LEADER, number("skip", 0)),
        READERS, True, READ,
    ),
    Verb("snapshot", (optional(names("names")),), NODE, True, ADMIN, long=True),
    Verb("compact", (), NODE, True, CLUSTER, long=True),
    Verb("scrub", (flag("start", False),), NODE, True, CLUSTER),
    Verb(
        "members",
        (NAME, optional(changes("changes")), optional(text("change")), optional(number("node", least=1))),
        LEADER, False, ADMIN,
    ),
    Verb("campaign", (NAME,), MEMBER, True, ADMIN),
    Verb("force_shrink", (NAME,), MEMBER, True, CLUSTER),
    Verb("skip", (NAME, number("index", least=1), number("ordinal")), LEADER, False, ADMIN),
    Verb("forget_node", (number("lost", least=1), flag("force", False)), NODE, True, CLUSTER),
    Verb("transfer", (NAME, number("to", least=1)), LEADER, False, ADMIN),
    Verb("status", (), NODE, True, READ),
    Verb("board", (text("after", " "), number("limit", BOARD_ROWS, least=1, cap=BOARD_ROWS)), NODE, True, READ),
    Verb(
        "logs",
        (text("after", " "), optional(names("names")), number("limit", LOG_ROWS, least=1, cap=LOG_ROWS)),
        NODE, True, READ,
    ),
    Verb("changed_logs", (number("since", 0),), NODE, True, READ),
    Verb(
        "scan",
        (
            ranges("ranges"), number("max_bytes", least=1), number("max_records", least=1),
            optional(number("body_bytes")),
        ),
        NODE, True, READ,
    ),
    Verb("seek", (ranges("times", 3),), NODE, True, READ),
    Verb("audit", (ranges("range", most=1), number("max_bytes", least=1)), NODE, True, READ),
    Verb("key_metrics", (names("names"),), NODE, True, READ),
    Verb(
        "catalog",
        (text("section"), text("question"), mapping("values"), text("consistency", "local")),
        NODE, True, READ,
    ),
    Verb("catalog_change", (text("section"), text("change"), mapping("values")), NODE, False, CLUSTER),
    Verb(
        "join",
        (
            raw("token"), number("directory", least=1), text("peer_address"), text("client_address"),
            text("zone", "-"),
            number("replaces", 0),
        ),
        NODE, True, CLUSTER,
    ),
)  # fmt: skip

VERBS: Mapping[str, Verb] = MappingProxyType({verb.name: verb for verb in _TABLE})
ADMINISTRATIVE = frozenset(verb.name for verb in _TABLE if verb.right in (CREATE, ADMIN, CLUSTER))
"""Verbs that change what a cluster is: who called each, and what came of it, stands in the node's log."""
CONTAINERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {verb.name: frozenset(field.name for field in verb.fields if field.container) for verb in _TABLE}
)
"""The arguments of a verb that are lists or maps; all others are plain values."""


def reference() -> str:
    """Return docs/verbs.md."""
    lines = [
        "# Verbs",
        "",
        "<!-- Printed by `python -m logyard.protocol.verbs`; a test compares. Edit the table there. -->",
        "",
        "What a [CALL](wire-client.md#calls) may name, and what it must say: an argument that is not of its type or",
        "beyond its bounds is refused with `bad_request`, one that the verb does not know is left alone. Any verb of a",
        "group also takes `kind`, a text: `wrong_kind` unless the group is of that kind. `name` is the group's,",
        f"{NAME.takes}.",
        "",
        "*Answered by*: `leader`: the group's, others refuse with `not_leader`; `readers`: the leader or any",
        "member, as `consistency` (of `kv_watch`: `local`) says; `member`: that of the node asked, as far as it",
        "is; `node`: the node asked. *Twice*: whether a client may ask again when it lost the answer, and no more",
        "comes of it. *Right*: the class that rights are given by; `create`, `admin` (of a group) and `cluster`",
        "leave a line in the node's log.",
        "",
        "| verb | arguments | answered by | twice | right |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verb in _TABLE:
        said = "; ".join(_argument(field) for field in verb.fields)
        lines.append(
            f"| `{verb.name}` | {said} | {verb.served} | {'yes' if verb.idempotent else 'no'} | {verb.right} |"
        )
    return "\n".join(lines) + "\n"


def _argument(field: Field) -> str:
    if field is NAME:
        return f"`{field.name}`"
    known = field.default not in (None, ())
    default = f" ({_shown(field.default)} unless said)" if known else " (may be left out)" if field.optional else ""
    return f"`{field.name}`: {field.takes}{default}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    sys.stdout.write(reference())
