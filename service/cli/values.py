"""How ages, sizes and times are written on a command line: click callbacks. Used by `cli_retention` and `cli_logs`."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import click

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def age_option(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Return seconds of "90s", "30m", "12h" or "7d"."""
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)([smhd])", value)
    if found is None and value != "0":
        raise click.BadParameter(f"{value!r} is not an age such as 90s, 30m, 12h or 7d")
    return float(found[1]) * SECONDS[found[2]] if found is not None else 0.0


def size_option(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    """Return bytes of "1000", "64KiB", "10MiB", "1GiB" or "2TiB"."""
    found = re.fullmatch(r"(\d{1,20})([KMGT]iB|)", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size such as 1000, 64KiB, 10MiB or 1GiB")
    return int(found[1]) * BYTES[found[2]]


def since_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Return milliseconds since 1970 of such a number or of an ISO 8601 time, which is UTC unless it says otherwise."""
    if value is None:
        return None
    if value.isdecimal() and len(value) <= 20:
        return int(value)
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither milliseconds since 1970 nor a time as 2026-01-31T12:00"
        ) from None
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
