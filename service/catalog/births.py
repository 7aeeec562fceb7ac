"""Creations and deletions by way of the catalogue: an intent first, then the groups, then what became of them.

Invariant: a creation is decided by what is committed to the catalogue first, `live` or `undoing`, and no node takes
back or deletes anything of it before; whoever finishes an intent makes the group of its uid. Without a catalogue both
answer `busy` and change nothing. Called by the verbs `create` and `delete`, and by the catalogue's leader for those
that nobody finished.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from logyard.engine.types import Spec, draw_batch, draw_uid
from logyard.machines.catalog.logs import LIVE, MAKING, UNDOING, Log
from logyard.protocol.errors import Busy, GroupExists, LogyardError, classes

from .calls import CatalogCalls

log = logging.getLogger(__name__)

STEP = 256
"""Groups of one command of a batch: the catalogue's entries stay small."""


class Registry(Protocol):
    """Who makes groups on their members' nodes."""

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for a name, members or a machine that no group can have here."""
        ...

    async def define(self, specs: Sequence[Spec], asleep: bool = False) -> None:
        """Make groups whose uids were agreed on; idempotent. `asleep`: nobody uses them yet. What fails stays as it
        is."""
        ...

    async def delete(self, uids: Sequence[int], tell: bool = True) -> None:
        """Let groups go here, and tell their other members' nodes."""
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
        wanted = [{**request, "members": sorted(set(request["members"])), "uid": draw_uid()} for request in requests]
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
        new = [row for row in rows if row["state"] == MAKING]
        await self._make(new, asleep)
        if refusal is not None:
            code, message = refusal
            raise classes().get(code, LogyardError).told(message, code=code)
        return [spec_of(row) for row in rows], len(new)

    async def finish(self, rows: Sequence[Log]) -> None:
        """Finish creations that nobody finished; one that can't be made is taken back."""
        for row in rows:
            try:
                await self._make([row._asdict()])
            except (Busy, GroupExists):
                continue

    async def _make(self, rows: Sequence[Mapping[str, Any]], asleep: bool = False) -> None:
        if not rows:
            return
        uids = [int(row["uid"]) for row in rows]
        try:
            await self._registry.define([spec_of(row) for row in rows], asleep)
        except LogyardError as error:
            states = await self._calls.change("logs", "undo", {"uids": uids})
            undone = [row for row, state in zip(rows, states, strict=True) if state == UNDOING]
            if isinstance(error, GroupExists) and not asleep:
                await self._end(undone)
            if any(state != LIVE for state in states):
                raise
            return
        for state in await self._calls.change("logs", "live", {"uids": uids}):
            if state != LIVE:
                raise Busy("a creation that was taken back meanwhile", 1.0)

    async def _end(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Have groups deleted that were refused: the members that took one may have a leader by now, which would make
        a second log of a name that is taken. Where this is cut off it lives, and the catalogue hears of it."""
        gone: list[int] = []
        try:
            for row in rows:
                await self._calls.change("logs", "delete", {"uid": row["uid"], "owner": row.get("owner", "")})
                gone.append(int(row["uid"]))
        except LogyardError as error:
            log.warning("creations that were refused are not deleted yet: %s", error)
        if gone:
            # Its members' nodes would do that by themselves, at their next look.
            await self._registry.delete(gone)

    async def delete(self, uid: int) -> None:
        """Mark a log as deleted, which frees its name. Raises `UnknownGroup`, `Refused`."""
        await self._calls.change("logs", "delete", {"uid": uid})


def spec_of(row: Mapping[str, Any]) -> Spec:
    """Return the definition that an intent carries."""
    return Spec(
        int(row["uid"]), str(row["name"]), str(row["machine"]), dict(row["arguments"]), tuple(row["members"]),
        int(row["created"]),
    )  # fmt: skip
