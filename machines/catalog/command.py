"""The catalogue's commands and answers as bytes: what the leader proposes, and what everyone reads off a reply.

A command is a msgpack array ``[section, version, command, values, request]``; `request` is 16 bytes that its caller
drew, or nil: the same command comes to one outcome only, however often it is sent. A reply is ``[nil, result]`` or
``[code, message]``: a refusal is committed like a success, and told again to whoever asks again. A question is
``[section, question, values]``, its answer a reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

from logyard.engine.machine import Reject
from logyard.protocol.errors import LogyardError, classes

REQUEST_BYTES = 16


class Command(NamedTuple):
    """A command, decoded as far as the catalogue itself looks."""

    section: str
    version: int
    command: str
    values: Mapping[str, Any]
    request: bytes | None


def command(
    section: str, name: str, values: Mapping[str, Any], request: bytes | None = None, version: int = 1
) -> bytes:
    """Return a command as bytes, written for that version of the section."""
    data: bytes = msgpack.packb([section, version, name, values, request])
    return data


def command_of(data: bytes) -> Command:
    """Return a decoded command. Raises `Reject`."""
    try:
        found = Command(*msgpack.unpackb(data, use_list=False, strict_map_key=False))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Reject("bad_request", "a catalogue's command is [section, version, command, values, request]") from error
    section, version, name, values, request = found
    if not (type(section) is str and type(version) is int and type(name) is str and isinstance(values, dict)):
        raise Reject("bad_request", "a catalogue's command has other types")
    if request is not None and (type(request) is not bytes or len(request) != REQUEST_BYTES):
        raise Reject("bad_request", f"a request has {REQUEST_BYTES} bytes")
    return found


def question(section: str, name: str, values: Mapping[str, Any]) -> bytes:
    """Return a question as bytes."""
    data: bytes = msgpack.packb([section, name, values])
    return data


def question_of(data: bytes) -> tuple[str, str, Mapping[str, Any]]:
    """Return a decoded question. Raises `Reject`."""
    try:
        section, name, values = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Reject("bad_request", "a question to the catalogue is [section, question, values]") from error
    if not (type(section) is str and type(name) is str and isinstance(values, dict)):
        raise Reject("bad_request", "a question to the catalogue has other types")
    return section, name, values


def done(result: object) -> bytes:
    """Return the reply of a command that was carried out."""
    data: bytes = msgpack.packb([None, result])
    return data


def refused(refusal: Reject) -> bytes:
    """Return the reply of a command that the catalogue's own logic refused."""
    data: bytes = msgpack.packb([refusal.code, refusal.message])
    return data


def result_of(reply: bytes) -> Any:
    """Return what a command or a question came to. Raises the refusal, as the error of its code, and `LogyardError`
    for what is no answer."""
    try:
        code, found = msgpack.unpackb(reply, strict_map_key=False)
        if code is None:
            return found
        error = classes().get(code, LogyardError).told(found, code=code)
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise LogyardError(f"an answer of the catalogue can't be read: {wrong!r}") from None
    raise error
