"""Creations and deletions by way of the catalogue: an intent first, then the groups, then what became of them.

Invariant: a creation is decided by what is committed to the catalogue first, `live` or `undoing`; whoever finishes an
intent makes the group of its uid. Without a catalogue both answer `busy` and change nothing. Called by the verbs
`create` and `delete`, and by the catalogue's leader for those that nobody finished.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from logyard.engine.types import Spec, draw_batch
from logyard.machines.catalog.logs import LIVE, MAKING, Log
from logyard.protocol.errors import Busy, GroupExists, LogyardError, classes

from .calls import CatalogCalls

STEP = 256
"""Groups of one command of a batch: the catalogue's entries stay small."""


class Registry(Protocol):
    """Who makes groups on their members' nodes."""

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for a name, members or a machine that no group can have here."""
        ...

    async def define(self, specs: Sequence[Spec], asleep: bool = False) -> None:
        """Make groups whose uids were agreed on; idempotent. `asleep`: nobody uses them yet."""
        ...


class Births:
    """One node's."""

    def __init__(self, calls: CatalogCalls, registry: Registry) -> None:
        self._calls = calls
        self._registry = registry

    async def create(self, requests: Sequence[Mapping[str, Any]]) -> list[Spec]:
        """Create groups: each request has name, members, machine, arguments. Raises what the first refusal says; the
        others are made all the same. Raises `BadRequest` for what can't be made: before there is an intent, which would
        wait for its members to let it go."""
        for request in requests:
            self._registry.check(request)
        wanted = [
            {**request, "members": sorted(set(request["members"])), "uid": int.from_bytes(os.urandom(8), "little") | 1}
            for request in requests
        ]
        return (await self._create(wanted, False))[0]

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep; return how many are new. Raises as `create`."""
        first = draw_batch()
        model = {"members": sorted(set(members)), "machine": machine, "arguments": dict(arguments)}
        for name in names[:1]:
            self._registry.check({**model, "name": name})
        wanted = [{**model, "name": name, "uid": first + at} for at, name in enumerate(dict.fromkeys(names))]
        return sum([(await self._create(wanted[at : at + STEP], True))[1] for at in range(0, len(wanted), STEP)])

    async def _create(self, wanted: Sequence[Mapping[str, Any]], asleep: bool) -> tuple[list[Spec], int]:
        answers = await self._calls.change("logs", "create", {"logs": wanted})
        refusal = next((one for one in answers if isinstance(one, list)), None)
        rows = [one for one in answers if not isinstance(one, list)]
        specs = [spec_of(row) for row in rows]
        new = [spec for spec, row in zip(specs, rows, strict=True) if row["state"] == MAKING]
        await self._make(new, asleep)
        if refusal is not None:
            code, message = refusal
            raise classes().get(code, LogyardError).told(message, code=code)
        return specs, len(new)

    async def finish(self, rows: Sequence[Log]) -> None:
        """Finish creations that nobody finished; one that can't be made is taken back."""
        for row in rows:
            try:
                await self._make([spec_of(row._asdict())])
            except (Busy, GroupExists):
                continue

    async def _make(self, specs: Sequence[Spec], asleep: bool = False) -> None:
        if not specs:
            return
        uids = [spec.uid for spec in specs]
        try:
            await self._registry.define(specs, asleep)
        except LogyardError:
            states = await self._calls.change("logs", "undo", {"uids": uids})
            if any(state != LIVE for state in states):
                raise
            return
        for state in await self._calls.change("logs", "live", {"uids": uids}):
            if state != LIVE:
                raise Busy("a creation that was taken back meanwhile", 1.0)

    async def delete(self, uid: int) -> None:
        """Mark a log as deleted, which frees its name. Raises `UnknownGroup`, `Refused`."""
        await self._calls.change("logs", "delete", {"uid": uid})


def spec_of(row: Mapping[str, Any]) -> Spec:
    """Return the definition that an intent carries."""
    return Spec(
        int(row["uid"]), str(row["name"]), str(row["machine"]), dict(row["arguments"]), tuple(row["members"]),
        int(row["created"]),
    )  # fmt: skip
