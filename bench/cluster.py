"""What a bench case needs of a cluster of real node processes. `service.local_cluster` provides it; the CLI wires both.

Every answer comes over a client's socket or from the kernel: a case never looks inside a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from logyard.client.sync import Yard

POLL_S = 0.05


class Nodes(Protocol):
    """Running nodes 1 to `count` on this machine."""

    count: int

    @property
    def addresses(self) -> list[str]:
        """Client addresses, in order of node ids."""
        ...

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of node ids."""
        ...


class Cluster(Nodes, Protocol):
    """Nodes that a case may end and start."""

    def kill9(self, *node_ids: int) -> None:
        """Send SIGKILL to these nodes."""
        ...

    def stop(self) -> Mapping[int, int]:
        """Send SIGTERM to all; return exit codes by node."""
        ...

    def start(self) -> None:
        """Start what is not running, wait until all serve."""
        ...


class NotReached(Exception):
    """A condition was not met in time; the message says which."""


def reach(what: str, condition: Callable[[], bool], timeout_s: float) -> float:
    """Look again and again until a condition that only the nodes can tell is met; return the seconds it took."""
    began = time.monotonic()
    tick = threading_wait()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise NotReached(f"{what}: not reached within {timeout_s:g} s")
        tick(POLL_S)
    return time.monotonic() - began


def threading_wait() -> Callable[[float], object]:
    """Return a pause that Ctrl-C ends."""
    import threading

    return threading.Event().wait


def groups_of(yard: Yard, cluster: Nodes) -> dict[int, Sequence[Mapping[str, Any]]]:
    """Return every node's own list of its groups."""
    return {node: yard.list(node=node) for node in range(1, cluster.count + 1)}


def all_led(yard: Yard, cluster: Nodes, logs: int) -> bool:
    """Return whether every log has a leader."""
    led = {
        group["name"] for groups in groups_of(yard, cluster).values() for group in groups if group["role"] == "leader"
    }
    return len(led) == logs


def holds_everything(lists: Sequence[Sequence[Mapping[str, Any]]], logs: int) -> bool:
    """Return whether every node lists every log, and has applied all that the log's leader holds; `lists` is what each
    node says of its groups.

    All that it holds, not its commit index: a new leader learns what was committed before it only when the first entry
    of its own term is committed, and what was acknowledged may lie between the two.
    """
    last: dict[object, int] = {}
    for groups in lists:
        for group in groups:
            # A group that hibernates has no leader after a restart of all; its row was committed as it is.
            if group["role"] == "leader" or group["state"] == "hibernating":
                last[group["name"]] = max(last.get(group["name"], 0), int(group["last"]))
    return len(last) == logs and all(
        len(groups) == logs and all(int(group["applied"]) >= last[group["name"]] for group in groups)
        for groups in lists
    )


def all_applied(yard: Yard, cluster: Nodes, logs: int) -> bool:
    """Return whether every member of every log has applied all that its leader holds."""
    return holds_everything(list(groups_of(yard, cluster).values()), logs)


def statuses(yard: Yard, cluster: Nodes) -> list[Mapping[str, Any]]:
    """Return every node's status, in order of node ids."""
    return [yard.status(node) for node in range(1, cluster.count + 1)]


def log_names(count: int) -> list[str]:
    """Return the bench's logs."""
    return [f"bench-{number:06d}" for number in range(count)]


def create_logs(yard: Yard, cluster: Nodes, count: int, batch: int = 500) -> float:
    """Create `count` logs on all nodes and wait until each has a leader; return the seconds it took."""
    began = time.monotonic()
    names = log_names(count)
    members = list(range(1, cluster.count + 1))
    for first in range(0, count, batch):
        yard.create_many(names[first : first + batch], members=members)
    reach("a leader for every log", lambda: all_led(yard, cluster, count), max(60.0, count / 100))
    return time.monotonic() - began
