"""Clients of KV groups under chaos: reads, writes, compare-and-sets, leases, compactions, and watchers that resume.

Every key's operations are a history of `tests.linearizability`. Beside that a revision has one content, whoever tells
of it: the answer to who wrote it, a reader, any watcher. Watchers see every revision once and in order.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from logyard.client.kv import KV
from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import Changes, Compacted, Compare, Event, Get, GetResult, KeyValue, Put

from .load import KVS, OPEN, Journal, body, number_of
from .trio_load import TrioLoad

CLIENTS = 4
WATCHERS = 2
SLOTS = 6
TURN = 150
"""Operations on a slot until it is another key: short histories are decided at once."""
COMPACT_EVERY, COMPACT_KEEP = 1500, 3000
"""Revisions."""
LEASE_S = 1.5
NODES = (1, 2, 3)


class Change(NamedTuple):
    """One key's change, as a revision has it. `number` None: deleted."""

    key: str
    number: int | None


class Revisions:
    """What all clients and watchers of one KV group were told of its revisions."""

    def __init__(self, name: str, journal: Journal) -> None:
        self.name = name
        self.journal = journal
        self.told: dict[int, set[Change]] = {}
        self.whole: dict[int, frozenset[Change]] = {}
        self.last = 0
        self.compacted = 0
        self.reached: list[int] = []

    def tell(self, revision: int, key: str, number: int | None) -> None:
        """A client was told that a revision has this change."""
        self.last = max(self.last, revision)
        change = Change(key, number)
        self.told.setdefault(revision, set()).add(change)
        if revision in self.whole and change not in self.whole[revision]:
            self.journal.violation(f"{self.name}: revision {revision} has {change}, and watchers saw no such change")

    def served(self, found: KeyValue) -> int | None:
        """A value that was read: its number."""
        number = number_of(found.value)
        if number is None:
            self.journal.violation(f"{self.name}: wrong bytes were served at revision {found.mod_revision}")
        self.tell(found.mod_revision, found.key.decode(), number)
        return number

    def watched(self, changes: Changes, following: int) -> int:
        """A watcher's next revision, which must be `following`; what follows."""
        revision = changes.revision
        if revision != following:
            self.journal.violation(f"{self.name}: a watcher waited for revision {following} and got {revision}")
        found = frozenset(self.change(one, revision) for one in changes.events)
        if self.whole.setdefault(revision, found) != found:
            self.journal.violation(f"{self.name}: two watchers saw different revisions {revision}")
        for change in self.told.get(revision, ()):
            if change not in found:
                self.journal.violation(f"{self.name}: revision {revision} has {change}, and a watcher did not see it")
        return revision + 1

    def change(self, event: Event, revision: int) -> Change:
        """An event as a change; its bytes must be right."""
        if event.kv is None:
            return Change(event.key.decode(), None)
        if event.kv.mod_revision != revision:
            self.journal.violation(f"{self.name}: revision {revision} brought one of {event.kv.mod_revision}")
        number = number_of(event.kv.value)
        if number is None:
            self.journal.violation(f"{self.name}: a watcher got wrong bytes at revision {revision}")
        return Change(event.key.decode(), number)

    def replayed(self) -> dict[str, tuple[int, int]] | None:
        """What the watched changes add up to: (number, revision) by key; None where some were compacted unseen."""
        if len(self.whole) != max(self.whole, default=1) - 1:
            return None
        state: dict[str, tuple[int, int]] = {}
        for revision in sorted(self.whole):
            for change in self.whole[revision]:
                state.pop(change.key, None)
                if change.number is not None:
                    state[change.key] = change.number, revision
        return state


class KvLoad(TrioLoad):
    """The clients and watchers of all KV groups."""

    def prepare(self) -> None:
        """Before it starts: what is shared by the clients and read by the judge."""
        self.revisions = {name: Revisions(name, self.journal) for name in KVS}
        self.operations = dict.fromkeys(range(SLOTS), 0)

    async def work(self) -> None:
        """Clients until the storm is over, watchers until they have seen everything."""
        async with trio.open_nursery() as watching:
            for number in range(WATCHERS):
                for seen in self.revisions.values():
                    watching.start_soon(self.watch, seen, number)
            async with trio.open_nursery() as working:
                for number in range(CLIENTS):
                    working.start_soon(self.serve, number)
            async with self.client() as yard:
                for name, seen in self.revisions.items():
                    await self.finish(yard.kv(name), seen)
            watching.cancel_scope.cancel()

    async def finish(self, kv: KV, seen: Revisions) -> None:
        """Until the last lease is over and every watcher knows of it."""

        async def leases_over() -> bool:
            return not await kv.leases()

        if not await self.until(leases_over):
            self.journal.violation(f"{kv.name}: leases do not end")
        goal = 0

        async def caught_up() -> bool:
            nonlocal goal
            goal = (await kv.status())["revision"]
            return min(seen.reached) > goal

        if not await self.until(caught_up):
            self.journal.violation(f"{kv.name}: watchers are at {seen.reached}, the group at revision {goal}")

        for node in NODES:

            async def all_of_it(node: int = node) -> bool:
                return await self.read_history(kv, seen, node, goal)

            if not await self.until(all_of_it):
                self.journal.violation(f"{kv.name}: node {node} does not tell all revisions up to {goal}")

    async def read_history(self, kv: KV, seen: Revisions, node: int, goal: int) -> bool:
        """What a member still has of the history, read once more: damage that nobody has met yet is met now."""
        start = max((await kv.status())["compacted"] + 1, 2)
        async with kv.watch(b"", prefix=True, start=start, node=node) as changes:
            while start <= goal:
                start = seen.watched(await changes.__anext__(), start)
        return True

    async def serve(self, number: int) -> None:
        """One client."""
        async with self.client() as yard:
            groups = {name: yard.kv(name) for name in KVS}
            one = KvClient(self, number, groups)
            while not self.stop.is_set():
                await one.step()

    async def watch(self, seen: Revisions, number: int) -> None:
        """One watcher, which leaves and comes back all the time, now and then to see older revisions once more."""
        draw = self.draw(f"watcher {number} {seen.name}")
        following, place = 2, len(seen.reached)
        seen.reached.append(following)
        async with self.client() as yard:
            kv = yard.kv(seen.name)
            while True:
                start = max(seen.compacted + 1, 2, following - (draw.randrange(300) if draw.random() < 0.2 else 0))
                try:
                    with trio.move_on_after(draw.uniform(0.5, 5)):
                        node = draw.choice((None, None, *NODES))
                        async with kv.watch(b"", prefix=True, start=start, node=node) as changes:
                            async for one in changes:
                                start = seen.watched(one, start)
                                following = seen.reached[place] = max(following, start)
                except Compacted as error:
                    seen.compacted = max(seen.compacted, error.revision)
                    following = seen.reached[place] = max(following, error.revision + 1)
                except LogyardError as error:
                    await self.refused(error)


def same(key: str, expected: int | None) -> Compare:
    """That a key has that value, or, None, is not there."""
    if expected is None:
        return Compare(key.encode(), "version", "=", 0)
    return Compare(key.encode(), "value", "=", body(expected))


class KvClient:
    """One process of the histories."""

    def __init__(self, load: KvLoad, number: int, groups: dict[str, KV]) -> None:
        self.load = load
        self.number = load.number + number
        self.groups = groups
        self.draw: random.Random = load.draw(number)
        self.last: dict[str, int | None] = {}

    async def step(self) -> None:
        """One operation."""
        load, name = self.load, self.draw.choice(KVS)
        kv, seen = self.groups[name], load.revisions[name]
        slot = self.draw.randrange(SLOTS)
        load.operations[slot] += 1
        key = f"{slot}.{load.operations[slot] // TURN}"
        chance = self.draw.random()
        if chance < 0.4:
            await self.operate("get", name, key, None, lambda: self.get(kv, seen, key))
        elif chance < 0.7:
            new = load.fresh()
            await self.operate("put", name, key, new, lambda: self.put(kv, seen, key, new))
        elif chance < 0.8:
            await self.operate("delete", name, key, None, lambda: self.delete(kv, seen, key))
        elif chance < 0.9:
            await self.transact(kv, seen, f"t{key}")
        elif chance < 0.98:
            new, expected = load.fresh(), self.last.get(key)
            await self.operate("cas", name, key, [expected, new], lambda: self.compare(kv, seen, key, expected, new))
        else:
            await self.aside(kv, seen)

    async def operate(self, f: str, name: str, key: str, value: object, call: Callable[[], Awaitable[object]]) -> None:
        """One operation and its lines."""
        journal, place = self.load.journal, f"{name}/{key}"
        journal.row(self.number, "invoke", f, place, value, "kv")
        try:
            found = await call()
        except LogyardError as error:
            kind = "info" if error.code in OPEN and f != "get" else "fail"
            journal.row(self.number, kind, f, place, value, "kv")
            await self.load.refused(error)
            return
        if f == "cas" and found is None:
            # It was applied, and found another value there: that is judged as well.
            journal.row(self.number, "ok", f, place, False, "kv")
            self.last.pop(key, None)
            return
        self.last[key] = found if isinstance(found, int) else None
        journal.row(self.number, "ok", f, place, found if f == "get" else value, "kv")

    async def transact(self, kv: KV, seen: Revisions, group: str) -> None:
        """A transaction over three keys: two are written if one of them is what it was, else all are read."""
        journal, place, names = self.load.journal, f"{seen.name}/{group}", list("abc")
        self.draw.shuffle(names)
        one, other, third = names
        expected = self.last.get(f"{group}/{one}")
        news = {one: self.load.fresh(), other: self.load.fresh()}
        value = [
            [[one, expected]],
            [*(["put", name, new] for name, new in news.items()), ["get", third]],
            [["get", name] for name in names],
        ]
        keys = {name: f"{group}/{name}" for name in names}
        puts = [Put(keys[name].encode(), body(new)) for name, new in news.items()]
        gets = [Get(keys[name].encode()) for name in names]
        journal.row(self.number, "invoke", "txn", place, value, "txn")
        try:
            found = await kv.txn([same(keys[one], expected)], [*puts, gets[-1]], gets)
        except LogyardError as error:
            journal.row(self.number, "info" if error.code in OPEN else "fail", "txn", place, value, "txn")
            await self.load.refused(error)
            return
        read = [one.kvs for one in found.results if isinstance(one, GetResult)]
        numbers = [seen.served(kvs[0]) if kvs else None for kvs in read]
        journal.row(self.number, "ok", "txn", place, [found.succeeded, numbers], "txn")
        if found.succeeded:
            for name, new in news.items():
                seen.tell(found.revision, keys[name], new)
            numbers = [*news.values(), *numbers]
        self.last |= {keys[name]: number for name, number in zip(names, numbers, strict=True)}

    async def get(self, kv: KV, seen: Revisions, key: str) -> int | None:
        """A linearizable read."""
        found = await kv.get(key.encode())
        return None if found is None else seen.served(found)

    async def put(self, kv: KV, seen: Revisions, key: str, new: int) -> int:
        """A write."""
        seen.tell((await kv.put(key.encode(), body(new))).revision, key, new)
        return new

    async def delete(self, kv: KV, seen: Revisions, key: str) -> None:
        """A deletion, perhaps of nothing."""
        found = await kv.delete(key.encode())
        if found.deleted:
            seen.tell(found.revision, key, None)

    async def compare(self, kv: KV, seen: Revisions, key: str, expected: int | None, new: int) -> int | None:
        """Compare and set, as one transaction; None where it was something else."""
        found = await kv.txn([same(key, expected)], [Put(key.encode(), body(new))])
        if not found.succeeded:
            return None
        seen.tell(found.revision, key, new)
        return new

    async def aside(self, kv: KV, seen: Revisions) -> None:
        """What is no operation on a key: a lease with a key of its own, or a compaction."""
        try:
            if seen.last - seen.compacted > COMPACT_EVERY + COMPACT_KEEP:
                await kv.compact(seen.last - COMPACT_KEEP)
                seen.compacted = max(seen.compacted, seen.last - COMPACT_KEEP)
            else:
                lease = await kv.grant(LEASE_S)
                new, key = self.load.fresh(), f"lease/{lease.id}"
                found = await kv.put(key.encode(), body(new), lease=lease.id)
                seen.tell(found.revision, key, new)
        except LogyardError as error:
            await self.load.refused(error)
