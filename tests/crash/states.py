"""What a power cut may leave: the model of a file system that promises only what was synced.

After a crash behind event k a file holds what was synced, and any subset of the writes since, each torn at 512-byte
sectors; a directory has the names that were synced, and any subset of the changes since. Both are independent of each
other: a file's sync does not save its name (ALICE's weakest file system). Names of a rename change together.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from .events import CREATE, DIRECTORY, MARK, RENAME, SIZE, SYNC, SYNC_DIRECTORY, THROUGH, UNLINK, WRITE, Event

SECTOR = 512
IGNORED = ("lock.mdb", "lock", "writer-lock")
"""Locks mean nothing after a crash."""


class File:
    """Durable bytes, and what was asked for since: (event number, event)."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[tuple[int, Event]] = []

    def through(self, which: int) -> None:
        """One write is durable, whatever becomes of those before it."""
        for number, event in self.pending:
            if number == which:
                apply(self.durable, event)
        self.pending = [row for row in self.pending if row[0] != which]

    def sync(self, before: int) -> None:
        """Everything asked for before an event is durable."""
        kept = []
        for number, event in self.pending:
            if number < before:
                apply(self.durable, event)
            else:
                kept.append((number, event))
        self.pending = kept


class Folder:
    """Durable names, and the changes since: (event number, a list of (name, what it names then or None))."""

    def __init__(self) -> None:
        self.durable: dict[str, File | Folder] = {}
        self.now: dict[str, File | Folder] = {}
        self.pending: list[tuple[int, list[tuple[str, File | Folder | None]]]] = []

    def change(self, number: int, *names: tuple[str, File | Folder | None]) -> None:
        """Names change together."""
        self.pending.append((number, list(names)))
        put(self.now, names)

    def sync(self, before: int) -> None:
        """Changes asked for before an event are durable."""
        for number, names in self.pending:
            if number < before:
                put(self.durable, names)
        self.pending = [row for row in self.pending if row[0] >= before]


def put(names: dict[str, File | Folder], changes: Iterable[tuple[str, File | Folder | None]]) -> None:
    """Apply changes of names."""
    for name, found in changes:
        if found is None:
            names.pop(name, None)
        else:
            names[name] = found


def apply(content: bytearray, event: Event, keep: list[bool] | None = None) -> None:
    """A write or a change of size; `keep` says which of its sectors arrived."""
    if event.kind == SIZE:
        if event.data:
            del content[event.offset :]
        content.extend(bytes(max(0, event.offset - len(content))))
        return
    end = event.offset + len(event.data)
    if keep is None:
        content.extend(bytes(max(0, end - len(content))))
        content[event.offset : end] = event.data
        return
    at = event.offset
    for kept in keep:
        stop = min(end, (at // SECTOR + 1) * SECTOR)
        if kept:
            content.extend(bytes(max(0, stop - len(content))))
            content[at:stop] = event.data[at - event.offset : stop - event.offset]
        at = stop


def sectors(event: Event) -> int:
    """How many sectors a write touches."""
    return (event.offset + len(event.data) - 1) // SECTOR - event.offset // SECTOR + 1


class Model:
    """The file system while events go by."""

    def __init__(self) -> None:
        self.root = Folder()
        self.number = 0

    def folder(self, path: str) -> tuple[Folder, str]:
        """The folder of a path, as it is now, and the last name."""
        found = self.root
        *parts, name = path.split("/")
        for part in parts:
            inner = found.now[part]
            assert isinstance(inner, Folder), path
            found = inner
        return found, name

    def file(self, path: str) -> File:
        """The file of that name now."""
        folder, name = self.folder(path)
        found = folder.now[name]
        assert isinstance(found, File)
        return found

    def take(self, event: Event) -> None:
        """The next event."""
        number, self.number = self.number, self.number + 1
        if event.kind == MARK or event.path.rpartition("/")[2] in IGNORED:
            return
        if event.kind == SYNC_DIRECTORY:
            folder: File | Folder = self.root
            if event.path != ".":
                at, name = self.folder(event.path)
                folder = at.now[name]
            assert isinstance(folder, Folder)
            folder.sync(event.offset)
            return
        if event.kind in (WRITE, SIZE):
            self.file(event.path).pending.append((number, event))
            return
        if event.kind == SYNC:
            self.file(event.path).sync(event.offset)
            return
        if event.kind == THROUGH:
            self.file(event.path).through(event.offset)
            return
        at, name = self.folder(event.path)
        if event.kind in (CREATE, DIRECTORY):
            at.change(number, (name, File() if event.kind == CREATE else Folder()))
        elif event.kind == UNLINK:
            at.change(number, (name, None))
        elif event.kind == RENAME:
            to, new = self.folder(event.data.decode())
            found = at.now[name]
            if to is at:
                at.change(number, (name, None), (new, found))
            else:
                to.change(number, (new, found))
                at.change(number, (name, None))

    def idle(self) -> bool:
        """Whether nothing is open: then all states are one."""
        stack: list[File | Folder] = [self.root]
        while stack:
            found = stack.pop()
            if found.pending:
                return False
            if isinstance(found, Folder):
                stack += found.now.values()
        return True

    def state(self, draw: random.Random | None, share: float) -> dict[str, bytes | None]:
        """One crash state: content by path, None for a directory. `share` of what is pending arrives; a draw of None:
        all of it (1.0) or nothing (0.0)."""
        found: dict[str, bytes | None] = {}
        self._collect(self.root, "", draw, share, found)
        return found

    def _collect(
        self, folder: Folder, prefix: str, draw: random.Random | None, share: float, found: dict[str, bytes | None]
    ) -> None:
        names = dict(folder.durable)
        for _, change in folder.pending:
            if (draw.random() if draw else 0.5) < share:
                put(names, change)
        for name, inner in sorted(names.items()):
            path = prefix + name
            if isinstance(inner, Folder):
                found[path] = None
                self._collect(inner, path + "/", draw, share, found)
                continue
            content = bytearray(inner.durable)
            for _, event in inner.pending:
                chance = draw.random() if draw else 0.5
                if draw and event.kind == WRITE and draw.random() < 0.4:
                    apply(content, event, [draw.random() < share for _ in range(sectors(event))])
                elif chance < share:
                    apply(content, event)
            found[path] = bytes(content)


def fingerprint(state: dict[str, bytes | None]) -> int:
    """Equal for equal states."""
    found = xxhash.xxh3_128()
    for path, content in sorted(state.items()):
        found.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        found.update(content or b"")
    return int(found.intdigest())


def materialise(state: dict[str, bytes | None], root: Path) -> None:
    """Make the directory `root` be that state."""
    for path, content in sorted(state.items()):
        place = root / path
        if content is None:
            place.mkdir(mode=0o700)
            continue
        with place.open("wb") as file:
            used = content.rstrip(b"\0")
            file.write(used)
            file.truncate(len(content))
        os.chmod(place, 0o600)


def crash_states(
    events: list[Event],
    seed: int,
    variants: int,
    since: int = 0,
    wanted: Callable[[int], bool] | None = None,
) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """Different states, each with the number of events that were asked for before the cut: behind every event from
    `since` on (and `wanted`, by that number) everything, nothing, and `variants` drawn subsets of what was not
    synced."""
    model = Model()
    draw = random.Random(f"{seed} states")
    seen: set[int] = set()
    for number, event in enumerate(events, 1):
        model.take(event)
        if number <= since or event.kind == MARK or (wanted is not None and not wanted(number)):
            continue
        choices: list[tuple[random.Random | None, float]] = [(None, 1.0)]
        if not model.idle():
            choices.append((None, 0.0))
            choices += [(draw, draw.choice([0.2, 0.5, 0.8, 0.95])) for _ in range(variants)]
        for source, share in choices:
            state = model.state(source, share)
            mark = fingerprint(state)
            if mark not in seen:
                seen.add(mark)
                yield number, state
