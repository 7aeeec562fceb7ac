"""Consumer groups as docs/machines/groups.md has them, checked from outside: each command's answer and each change of
ownership is held against what members said so far. Knows nothing of how the machine decides."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from logyard.engine.machine import Reject
from logyard.machines.groups import Groups
from logyard.machines.rehearsal import Rehearsal, Upgrade
from logyard.protocol.groups import (
    Commit,
    Key,
    Owned,
    PartitionShape,
    Shape,
    Standing,
    beat_command,
    delete_command,
    describe_question,
    join_command,
    leave_command,
    reset_command,
    standing_of,
    unpacked,
)
from logyard.protocol.topics import Join, Sources

PATIENCE = 20_000
IDLE = 200_000
TTL = 10_000
GROUP = "g"


class Client:
    """What one process knows."""

    def __init__(self, number: int, name: str, standing: Standing, now: int) -> None:
        self.number = number
        self.name = name
        self.heard = now
        self.version = standing.version
        self.owned = {one.key: one for one in standing.owned or ()}
        self.gone = False
        self.ever = dict(self.owned)

    def take(self, standing: Standing) -> None:
        if standing.owned is not None:
            self.ever = self.owned or self.ever
            self.owned = {one.key: one for one in standing.owned}
        self.version = standing.version


class World:
    """One group, its processes, and a checker of every step. `partitions` of one topic, which grows."""

    def __init__(self, seed: int, make: Any = None) -> None:
        self.chance = random.Random(seed)
        self.run = Rehearsal(make or (lambda: Groups(PATIENCE, IDLE)))
        self.clients: list[Client] = []
        self.run.step(Upgrade(3))
        self.shape = Shape(1, "t", 1, tuple(PartitionShape(number) for number in range(self.chance.randint(1, 6))))
        # The epoch of the topic's layout.
        self.layout = 1
        self.told = self.shape
        # Whether the group knows the topic: what comes to it from then on is read from its start.
        self.knows = False
        # By partition: which one of its number the group knew last.
        self.ever: dict[Key, int] = {}
        self.offsets: dict[Key, int] = {}
        # (partition, epoch) -> when its owner was first asked for it, and whom it was owned by.
        self.asked: dict[tuple[Key, int], int] = {}
        self.instances = 0
        self.epochs: dict[Key, int] = {}
        self.before: dict[Key, list[Any]] = {}
        self.freed: set[tuple[Key, int]] = set()
        self.accepted = 0

    # Steps

    def step(self) -> None:
        self.freed = set()
        started = self.run.now
        kind = self.chance.choices(
            [
                "join", "beat", "commit", "confirm", "leave", "wait", "grow", "shrink", "retire", "again", "zombie",
                "reset", "restore",
            ],
            [6, 12, 12, 16, 2, 12, 2, 1, 1, 2, 6, 2, 2],
        )[0]  # fmt: skip
        getattr(self, f"_{kind}")()
        self._check(started)

    def _living(self) -> list[Client]:
        return [one for one in self.clients if not one.gone]

    def _any(self) -> Client | None:
        living = self._living()
        return self.chance.choice(living) if living else None

    def _join(self) -> None:
        name = self.chance.choice(["", "", "a", "b"])
        self.instances += 1
        joins = join_command(GROUP, name, self.instances, TTL, self.chance.choice(["", "x", "y"]), [self.shape])
        standing = standing_of(self.run.command(joins))
        again = standing_of(self.run.command(joins))
        assert again.member == standing.member, "the same process joins once"
        self._told_now()
        for one in self.clients:
            if name and one.name == name:
                # What it owned is the newer process's now.
                self.freed |= {(key, owned.epoch) for key, owned in one.owned.items()}
                self._lost(one)
        self.clients.append(Client(standing.member, name, again, self.run.now))

    def _lost(self, client: Client) -> None:
        client.gone = True

    def _send(
        self, client: Client, commits: list[Commit] | None = None, confirms: list[tuple[Key, int]] | None = None
    ) -> Standing | None:
        shapes = [self.shape] if self.shape != self.told and self.chance.random() < 0.5 else []
        current = {key: (row[2], row[3]) for key, row in self._rows().items()}
        command = beat_command(GROUP, client.name, client.number, client.version, commits or [], confirms or [], shapes)
        try:
            standing = standing_of(self.run.command(command))
        except Reject as refusal:
            assert refusal.code in ("unknown_member", "fenced"), refusal
            silent = self.run.now - client.heard >= TTL
            assert client.gone or silent, f"member {client.number} was heard in time, and is {refusal.code}"
            self._lost(client)
            return None
        assert not client.gone, f"member {client.number} is gone, and was answered"
        for one in commits or []:
            owns = current.get(one.key) == (client.number, one.epoch)
            assert (one.key not in standing.refused) == owns, f"a commit of {one} by {client.number}: {current}"
            if owns:
                self.accepted += 1
                self.offsets[one.key] = max(one.offset, self.offsets.get(one.key, -1))
        for key, epoch in confirms or []:
            if current.get(key) == (client.number, epoch):
                self.freed.add((key, epoch))
        if shapes:
            self._told_now()
        client.heard = self.run.now
        client.take(standing)
        if standing.owned is not None:
            self._check_passed(standing.owned)
        return standing

    def _beat(self) -> None:
        client = self._any()
        if client is not None:
            self._send(client)

    def _commit(self) -> None:
        client = self._any()
        if client is not None and client.owned:
            commits = [
                Commit(one.key, one.epoch, max(0, one.offset) + self.chance.randint(0, 50))
                for one in client.owned.values()
            ]
            self._send(client, commits)

    def _confirm(self) -> None:
        client = self._any()
        if client is not None:
            self._send(client)
            revoking = [(one.key, one.epoch) for one in client.owned.values() if one.revoking]
            if revoking and not client.gone:
                self._send(client, [], revoking[: self.chance.randint(1, len(revoking))])

    def _zombie(self) -> None:
        """A process that was replaced, expired or has left says what it knew."""
        living = self._any()
        if living is not None and self.chance.random() < 0.5:
            # What it had before, and may have got again.
            self._send(living, [Commit(one.key, one.epoch, 1 << 40) for one in living.ever.values()])
            return
        gone = [one for one in self.clients if one.gone and one.owned]
        if gone:
            one = self.chance.choice(gone)
            self._send(one, [Commit(owned.key, owned.epoch, 1 << 40) for owned in one.owned.values()])

    def _leave(self) -> None:
        client = self._any()
        if client is None:
            return
        self.freed |= {(key, owned.epoch) for key, owned in client.owned.items()}
        try:
            self.run.command(leave_command(GROUP, client.name, client.number))
        except Reject:
            assert self.run.now - client.heard >= TTL
        self._lost(client)

    def _wait(self) -> None:
        self.run.wait(self.chance.choice([100, 1000, 4000, 9000, 21_000]))

    def _live(self) -> list[PartitionShape]:
        return [one for one in self.shape.partitions if one.end is None]

    def _fence(self, number: int) -> int:
        return self.offsets.get((1, number), 0) + self.chance.choice([0, 30])

    def _becomes(self, partitions: Iterable[PartitionShape]) -> None:
        self.shape = self.shape._replace(revision=self.shape.revision + 1, partitions=tuple(partitions))

    def _grow(self) -> None:
        taken = {one.number for one in self.shape.partitions}
        if len(taken) < 12:
            self.layout += 1
            number = min(set(range(13)) - taken)
            born = self.layout if (1, number) in self.ever else 0
            fences = tuple((one.number, self._fence(one.number)) for one in self._live())
            self._becomes((*self.shape.partitions, PartitionShape(number, "", fences, born)))

    def _shrink(self) -> None:
        live = self._live()
        if len(live) > 1 and self.shape == self.told:
            self.layout += 1
            gone = live[-self.chance.randint(1, len(live) - 1) :]
            ends = {one.number: self._fence(one.number) for one in gone}
            joined = {
                one.number: Join(self.layout, self._fence(one.number), tuple(ends.items()))
                for one in live[: -len(gone)]
            }
            self._becomes(
                one._replace(end=ends[one.number]) if one.number in ends
                else one._replace(joins=(*one.joins, joined[one.number])) if one.number in joined else one
                for one in self.shape.partitions
            )  # fmt: skip

    def _retire(self) -> None:
        """What ended and was read goes, sometimes what was not read as well; nobody waits for it any more."""
        ended = [one.number for one in self.shape.partitions if one.end is not None]
        if ended and self.shape == self.told:
            gone = {number for number in ended if self._is_read(number) or self.chance.random() < 0.1}

            def left(sources: Sources) -> Sources:
                return tuple(one for one in sources if one[0] not in gone)

            self._becomes(
                one._replace(
                    sources=left(one.sources),
                    joins=tuple(join._replace(sources=left(join.sources)) for join in one.joins if left(join.sources)),
                )
                for one in self.shape.partitions
                if one.number not in gone
            )

    def _told_now(self) -> None:
        """The group knows the shape: what is not in it is forgotten, and so is what had a number before."""
        born = {(1, one.number): one.born for one in self.shape.partitions}
        for key in [key for key in self.ever if self.ever[key] != born.get(key)]:
            self.offsets.pop(key, None)
            if key in self.before:
                # Another one has its number, which nobody can own yet.
                self.freed.add((key, self.before[key][3]))
        before = {(1, one.number): one.born for one in self.told.partitions}
        for key in born:
            if self.knows and before.get(key) != born[key]:
                self.offsets[key] = 0
        self.ever |= born
        self.told, self.knows = self.shape, True

    def _again(self) -> None:
        """An older shape comes late: it changes nothing."""
        client = self._any()
        if client is not None:
            older = self.told._replace(revision=0, partitions=())
            before = self._rows()
            try:
                self.run.command(beat_command(GROUP, client.name, client.number, client.version, [], [], [older]))
                client.heard = self.run.now
            except Reject:
                self._lost(client)
            assert self._rows().keys() == before.keys()

    def _reset(self) -> None:
        found = self._described()
        if found is None:
            return
        key, offset = (1, 0), self.chance.randint(0, 100)
        try:
            self.run.command(reset_command(GROUP, [(key, offset, self.ever.get(key, 0))]))
            assert not found["members"], "reset while members live"
            self.offsets[key] = offset
        except Reject as refusal:
            assert refusal.code == "group_active" and found["members"]
        if self.chance.random() < 0.2:
            try:
                self.run.command(delete_command(GROUP))
                assert not found["members"], "deleted while members live"
                self._forgotten()
            except Reject as refusal:
                assert refusal.code == "group_active" and found["members"]

    def _forgotten(self) -> None:
        self.offsets, self.epochs, self.before, self.asked, self.knows = {}, {}, {}, {}, False
        for one in self.clients:
            self._lost(one)

    def _restore(self) -> None:
        self.run = self.run.restored()

    # What is checked

    def _described(self) -> Any:
        try:
            return unpacked(self.run.machine.query(describe_question(GROUP)))  # type: ignore[attr-defined]
        except Reject:
            return None

    def _rows(self) -> dict[Key, list[Any]]:
        found = self._described()
        return {} if found is None else {(row[0], row[1]): row for row in found["partitions"]}

    def _check(self, started: int) -> None:
        self.run.machine.check()  # type: ignore[attr-defined]
        found = self._described()
        if found is None:
            if self.clients and self.before:
                self._forgotten()
            return
        now = self.run.now
        members = {row[0] for row in found["members"]}
        for one in self.clients:
            if not one.gone and one.number in members:
                assert now - one.heard < TTL, f"member {one.number} was silent for {now - one.heard} ms and is there"
            if not one.gone and one.number not in members:
                assert now - one.heard >= TTL, f"member {one.number} was heard in time and is not there"
        rows = {(row[0], row[1]): row for row in found["partitions"]}
        for key, row in rows.items():
            _, _, owner, epoch, offset, revoking, _ = row
            assert offset == self.offsets.get(key, -1), f"{key} is committed up to {offset}"
            assert not owner or owner in members
            old = self.before.get(key)
            if old is not None and (old[2], old[3]) != (owner, epoch):
                assert epoch > old[3], f"{key} went from {old[2]} to {owner} in one epoch"
                if old[2]:
                    self._may_move(key, old, now)
            if revoking:
                self.asked.setdefault((key, epoch), now if old is None or not old[5] else started)
                limit = self.asked[key, epoch] + PATIENCE
                assert now < limit + 1, f"{key} was asked back at {self.asked[key, epoch]}, it is {now}, and stays"
            if owner:
                self._check_fences(key, rows)
        if members and not any(row[5] for row in rows.values()):
            for key in rows:
                if rows[key][2] == 0:
                    assert not self._readable(key, rows), f"nobody reads {key}"
        self.before = rows

    def _may_move(self, key: Key, old: list[Any], now: int) -> None:
        if (key, old[3]) in self.freed:
            return
        owner = next(one for one in self.clients if one.number == old[2])
        if owner.gone or now - owner.heard >= TTL:
            return
        asked = self.asked.get((key, old[3]))
        assert asked is not None and now - asked >= PATIENCE, f"{key} was taken from {old[2]}, who lives"

    def _readable(self, key: Key, rows: dict[Key, list[Any]]) -> bool:
        one = next((one for one in self.told.partitions if one.number == key[1]), PartitionShape(key[1]))
        return self._past(one.sources) and not self._is_read(one.number)

    def _past(self, sources: Sources) -> bool:
        return all(self.offsets.get((1, source), -1) >= fence for source, fence in sources)

    def _is_read(self, number: int) -> bool:
        """Whether a partition ended, and there is nothing left of it."""
        end = next((one.end for one in self.told.partitions if one.number == number), None)
        return end is not None and self.offsets.get((1, number), -1) >= end

    def _check_fences(self, key: Key, rows: dict[Key, list[Any]]) -> None:
        sources = next((one.sources for one in self.told.partitions if one.number == key[1]), ())
        assert self._past(sources), f"{key} is read before what its slots came from"
        assert not self._is_read(key[1]) or rows[key][5], f"{key} was read to its end, and is not asked back"

    def _check_passed(self, owned: Sequence[Owned]) -> None:
        """What a member is told of its partitions' joins is what the offsets say."""
        for one in owned:
            joins = next((part.joins for part in self.told.partitions if part.number == one.key[1]), ())
            passed = 0
            for join in joins:
                if not self._past(join.sources):
                    break
                passed = join.epoch
            assert one.passed == passed, f"{one}, of {joins} with {self.offsets}"
