"""Every error code is documented, and the document names no other."""

from __future__ import annotations

import re
from pathlib import Path

import msgpack

from logyard.engine.errors import Busy, LogyardError, NotLeader, encode_error
from logyard.engine.host import system as _  # noqa: F401 - defines the rest of the errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def all_errors() -> set[type[LogyardError]]:
    """Every class below `LogyardError` that the engine defines."""
    found: set[type[LogyardError]] = set()
    pending = [LogyardError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.startswith("logyard.engine"):
            found.add(kind)
    return found


def test_every_code_and_its_retry_are_in_the_page() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(), flags=re.M))
    codes = {kind.code: kind.retry for kind in all_errors() if kind.__name__ != "CommandRejected"}
    assert rows == codes


def test_an_error_travels_with_code_retry_and_details() -> None:
    value = msgpack.unpackb(encode_error(Busy("the group's byte budget", 0.05)))
    assert value["code"] == "busy" and value["retry"] == "same_session"
    assert value["details"] == {"cause": "the group's byte budget", "retry_after": 0.05}
    assert msgpack.unpackb(encode_error(NotLeader(3)))["details"] == {"leader": 3}
