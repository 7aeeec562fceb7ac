"""How many file descriptors a process may have, and who gets the last of them: files first, then peers, then clients.

Invariant: a connection stands only while a share of the table is free behind it. The kernel gives the lowest free
number, so the number of a new connection's descriptor says how many are in use at least. Called by the daemon and by
the doors that accept connections; `disk` holds a few more in reserve.
"""

from __future__ import annotations

import resource

CLIENTS = 0.75
"""Of all descriptors: clients get none above this."""
PEERS = 0.875
"""Nor peers above this: the rest is for files."""


def raise_limit() -> int:
    """Raise this process's soft limit to what it may raise it to; return the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def has_room(fd: int, share: float) -> bool:
    """Return whether a connection with this descriptor leaves files their part."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft < 0 or fd < soft * share
