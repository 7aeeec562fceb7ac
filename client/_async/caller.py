"""What the handles of a face need of their yard. Filled in by `network.Network` and `sync.Yard`."""

from __future__ import annotations

from typing import Any, Protocol

from ..admin import Call, T


class Caller(Protocol):
    """A yard, as its handles see it."""

    @property
    def timeout(self) -> float:
        """Return what bounds a verb that is not given a time, in seconds."""

    @property
    def exactly_once(self) -> bool:
        """Return whether appends belong to sessions."""

    def clock(self) -> float:
        """Return the time, in seconds."""

    async def pause(self, seconds: float) -> None:
        """Wait."""

    def event(self) -> Any:
        """Make what a caller can wait for: see `wait_for`."""

    async def wait_for(self, event: Any, seconds: float) -> None:
        """Wait until an event is set, so long at most."""

    def compresses(self, name: str) -> bool | None:
        """Return what a log's option says about compression; None until the log was found."""

    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time."""

    async def locate(self, name: str) -> dict[str, Any]:
        """Find a group."""

    async def describe(self, name: str, node: int | None = None) -> dict[str, Any]:
        """Describe a group."""

    async def snapshot(self, names: list[str], node: int | None = None) -> dict[int, Any]:
        """Snapshot groups."""
