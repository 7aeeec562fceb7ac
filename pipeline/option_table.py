"""What the options of sources and sinks have in common: a table from which they are parsed, refused and documented.

An error begins with the option's name, since only the first line survives the way to Spark. Used by `options`,
`kv_table` and `sink.options`; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import OptionError

if TYPE_CHECKING:
    from logyard.protocol.tls import TlsConfig

SPARKS_OWN = ("checkpointlocation", "queryname")
"""Options that Spark hands on to a sink, in lower case."""


class Option(NamedTuple):
    """One option: its text becomes the field `field` by `parse`; `default` is the text of one that is not given, in a
    stream `streams_default`. `only`: `BATCH` or `STREAM` for one that the other refuses, `why` says then what to do."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: str
    doc: str
    only: str = ""
    why: str = ""
    streams_default: str | None = None


def plain(text: str) -> str:
    """Return a text as it is."""
    return text


def names(text: str) -> tuple[str, ...]:
    """Return the names of a list."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise ValueError("a list of names, separated by commas, is expected")
    return found


def flag(text: str) -> bool:
    """Return true or false."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ValueError("true or false is expected")


def count(text: str) -> int:
    """Return a whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError("a whole number above 0 is expected")


def seconds(text: str) -> float:
    """Return seconds, above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if found > 0:
        return found
    raise ValueError("a number of seconds above 0 is expected")


def fields_of(
    table: Sequence[Option],
    given: Mapping[str, str],
    refusal: Callable[[Option], str],
    unknown: Callable[[str], str],
    streams: bool = False,
) -> tuple[dict[str, Any], set[str]]:
    """Return the values by field, and the names of the options that were given, whose case does not matter. `refusal`
    says why one is not for this use ("": it is), `unknown` what is said of a name
    that `table` does not have.
    `streams`: the defaults of streams hold. Raises `OptionError`."""
    texts = {name.lower(): (name, text) for name, text in given.items()}
    fields: dict[str, Any] = {}
    present: set[str] = set()
    for option in table:
        _, text = texts.pop(option.name.lower(), ("", None))
        default = option.default
        if streams and option.streams_default is not None:
            default = option.streams_default
        if text is not None:
            if why := refusal(option):
                raise OptionError(f"{option.name}: {why}")
            present.add(option.name)
        elif not default:
            fields[option.field] = None
            continue
        try:
            fields[option.field] = option.parse(default if text is None else text)
        except ValueError as error:
            raise OptionError(f"{option.name}: {error}, not {text!r}") from None
    for name, _ in texts.values():
        raise OptionError(unknown(name))
    return fields, present


def without_sparks_own(given: Mapping[str, str]) -> dict[str, str]:
    """Return options without those that Spark hands on to a sink for itself."""
    return {name: text for name, text in given.items() if name.lower() not in SPARKS_OWN}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was perhaps meant, as it is documented."""
    by_lower = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), by_lower, 1)
    return by_lower[near[0]] if near else None


def meant(name: str, table: Sequence[Option]) -> str:
    """Return what could be meant by a name that is no option."""
    near = nearest(name, (option.name for option in table))
    return f"is it {near}?" if near else f"there are {', '.join(option.name for option in table)}"


def check_servers(servers: Iterable[str]) -> None:
    """Raise `OptionError` for what is no address."""
    from logyard.client.session import parse_address
    from logyard.protocol.errors import BadRequest

    for server in servers:
        try:
            parse_address(server)
        except BadRequest as error:
            raise OptionError(f"servers: {error}") from None


def check_tls(fields: Mapping[str, object]) -> None:
    """Raise `OptionError` where some of the TLS options are given and others not."""
    named = (("tlsCa", "tls_ca"), ("tlsCertificate", "tls_certificate"), ("tlsKey", "tls_key"))
    missing = [name for name, field in named if fields[field] is None]
    if 0 < len(missing) < 3:
        raise OptionError(f"{missing[0]}: it is needed too: tlsCa, tlsCertificate and tlsKey go together")


def tls_of(ca: str | None, certificate: str | None, key: str | None) -> TlsConfig | None:
    """Return how a client proves itself, from the names of three files; None without them."""
    if not (ca and certificate and key):
        return None
    from pathlib import Path

    from logyard.protocol.tls import TlsConfig

    return TlsConfig(ca=Path(ca), certificate=Path(certificate), key=Path(key))


def markdown(table: Iterable[Option]) -> str:
    """Return a table of docs/guides/spark.md."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| {one.name} | {f'`{one.default}`' if one.default else ''} | {one.doc} |" for one in table]
    return "\n".join(rows) + "\n"
