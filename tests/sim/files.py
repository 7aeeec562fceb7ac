"""A file system in memory that knows what a power cut leaves of it.

Each file has what a reader sees and what the disk has; between the two lie the writes since the last sync. Each
directory has its names, those the disk has, and the changes since its last sync. `FileSystem.cut` is the power cut: any
subset of 512-byte sectors and any subset of name changes may have reached the disk. Used by `disk` and `store`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from typing import Any

SECTOR = 512


class File:
    """`seen` is what reads give, `held` what the disk has; `writes` lie between them. `rows` are an environment's."""

    __slots__ = ("seen", "held", "writes", "rows", "last", "before", "newest", "synced", "kind")

    def __init__(self) -> None:
        self.seen = bytearray()
        self.held = bytearray()
        self.writes: list[tuple[int, bytes]] = []
        # Key -> value, when the file is an LMDB environment: its commits are durable or did not happen.
        self.rows: Any = None
        self.kind = ""
        # Where the newest write began.
        self.last = 0
        # The newest two synced writes of a log's file: offset, what stood there, what was written.
        self.before: tuple[int, bytes, bytes] | None = None
        self.newest: tuple[int, bytes, bytes] | None = None
        self.synced = True

    def write(self, offset: int, data: bytes) -> None:
        """Into the page cache."""
        seen, end = self.seen, offset + len(data)
        if end > len(seen):
            seen.extend(bytes(end - len(seen)))
        seen[offset:end] = data
        self.last = offset
        self.writes.append((offset, data))

    def resize(self, size: int) -> None:
        """Cut, or extend with zeros. Lengths are durable at once: only contents are at stake."""
        for data in (self.seen, self.held):
            if size < len(data):
                del data[size:]
            else:
                data.extend(bytes(size - len(data)))

    def sync(self) -> None:
        """What was written is on the disk."""
        held = self.held
        for offset, data in self.writes:
            end = offset + len(data)
            if end > len(held):
                held.extend(bytes(end - len(held)))
            held[offset:end] = data
        self.writes.clear()

    def forget(self) -> None:
        """A failed sync: the pages count as clean, and never reach the disk."""
        self.writes.clear()

    def revalidate(self) -> bool:
        """The page cache is what the disk has; whether it was not before."""
        self.sync()
        differs = self.seen != self.held
        self.seen[:] = self.held
        return differs

    def cut(self, draw: random.Random, chance: float, garbage: bool) -> int:
        """Lose power: each unsynced sector survives with `chance`; with `garbage` a lost one may hold zeros. Returns
        how many did not survive."""
        lost = 0
        held = self.held
        for offset, data in self.writes:
            end = offset + len(data)
            if end > len(held):
                held.extend(bytes(end - len(held)))
            at = offset
            while at < end:
                stop = min(end, (at // SECTOR + 1) * SECTOR)
                if draw.random() < chance:
                    held[at:stop] = data[at - offset : stop - offset]
                else:
                    lost += 1
                    if garbage and draw.random() < 0.5:
                        held[at:stop] = bytes(stop - at)
                at = stop
        self.writes.clear()
        self.seen[:] = held
        if lost:
            # The newest write is gone, or torn: nothing follows the one before it any more.
            self.newest, self.before, self.synced = self.before, None, True
            self.last = self.newest[0] if self.newest is not None else 0
        return lost


class Directory:
    """`names` as seen, `held` as on the disk, and the changes in between: (name, what it is from then on or None)."""

    __slots__ = ("names", "held", "changes")

    def __init__(self) -> None:
        self.names: dict[str, File | Directory] = {}
        self.held: dict[str, File | Directory] = {}
        self.changes: list[list[tuple[str, File | Directory | None]]] = []

    def change(self, *change: tuple[str, File | Directory | None]) -> None:
        """One change, atomic on the disk when its names are in one directory."""
        for name, node in change:
            if node is None:
                self.names.pop(name, None)
            else:
                self.names[name] = node
        self.changes.append(list(change))

    def sync(self) -> None:
        """The names are on the disk."""
        self.held = dict(self.names)
        self.changes.clear()

    def cut(self, draw: random.Random, chance: float) -> int:
        """Lose power: each change survives with `chance`. Returns how many did not."""
        lost = 0
        for change in self.changes:
            if draw.random() < chance:
                for name, node in change:
                    if node is None:
                        self.held.pop(name, None)
                    else:
                        self.held[name] = node
            else:
                lost += 1
        self.changes.clear()
        self.names = dict(self.held)
        return lost


class FileSystem:
    """One node's. Paths are absolute; the node's root directory is always there."""

    def __init__(self, root: str) -> None:
        self.root = Directory()
        self.prefix = root
        self.descriptors: dict[int, File | Directory] = {}
        self.next = 1000
        self.locked = False

    def _parts(self, path: str) -> list[str]:
        path = str(path)
        assert path.startswith(self.prefix), f"{path} is not on the disk {self.prefix}"
        return [part for part in path[len(self.prefix) :].split("/") if part]

    def find(self, path: str) -> File | Directory | None:
        """What lies there."""
        node: File | Directory | None = self.root
        for part in self._parts(path):
            if not isinstance(node, Directory):
                return None
            node = node.names.get(part)
        return node

    def place(self, path: str) -> tuple[Directory, str]:
        """The directory of a path, and the name in it. Raises FileNotFoundError."""
        parts = self._parts(path)
        if not parts:
            return Directory(), ""
        node: File | Directory | None = self.root
        for part in parts[:-1]:
            node = node.names.get(part) if isinstance(node, Directory) else None
        if not isinstance(node, Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node, parts[-1]

    def file(self, path: str) -> File:
        """A file. Raises FileNotFoundError."""
        found = self.find(path)
        if not isinstance(found, File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def directory(self, path: str) -> Directory:
        """A directory. Raises FileNotFoundError."""
        found = self.find(path)
        if not isinstance(found, Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def create(self, path: str, exclusive: bool = True) -> File:
        """A new file; with `exclusive` it must not be there."""
        place, name = self.place(path)
        found = place.names.get(name)
        if found is not None:
            if exclusive or not isinstance(found, File):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return found
        made = File()
        place.change((name, made))
        return made

    def make_directory(self, path: str) -> bool:
        """False when it is there already."""
        place, name = self.place(path)
        if not name or name in place.names:
            return False
        place.change((name, Directory()))
        return True

    def rename(self, old: str, new: str) -> None:
        """Within one directory as one change; across two as two."""
        (place, name), (there, other) = self.place(old), self.place(new)
        if name not in place.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        node = place.names[name]
        if place is there:
            place.change((name, None), (other, node))
        else:
            there.change((other, node))
            place.change((name, None))

    def unlink(self, path: str) -> None:
        """Remove a name. Raises FileNotFoundError."""
        place, name = self.place(path)
        if name not in place.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        place.change((name, None))

    def open(self, node: File | Directory) -> int:
        """A descriptor."""
        self.next += 1
        self.descriptors[self.next] = node
        return self.next

    def opened(self, fd: int) -> File:
        """The file of a descriptor."""
        found = self.descriptors.get(fd)
        if not isinstance(found, File):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def walk(self, node: Directory | None = None, path: str = "") -> Iterator[tuple[str, File | Directory]]:
        """Everything, with its path below the root, in the order of names."""
        node = node or self.root
        path = path or self.prefix
        for name in sorted(node.names):
            found = node.names[name]
            yield f"{path}/{name}", found
            if isinstance(found, Directory):
                yield from self.walk(found, f"{path}/{name}")

    def _files(self) -> list[File]:
        """All that may be found on the disk: seen, held or open, once each."""
        found: dict[int, File] = {}
        todo: list[Directory] = [self.root]
        while todo:
            directory = todo.pop()
            for node in (*directory.names.values(), *directory.held.values()):
                if isinstance(node, Directory):
                    if node is not directory and id(node) not in found:
                        todo.append(node)
                else:
                    found.setdefault(id(node), node)
        return list(found.values())

    def kill(self) -> None:
        """The process is gone: its descriptors and its lock are, what it wrote is not."""
        self.descriptors.clear()
        self.locked = False

    def cut(
        self, draw: random.Random, chance: float = 0.0, names: float = 0.0, garbage: bool = False
    ) -> tuple[int, int]:
        """A power cut; how many sectors and how many changes of names were lost."""
        self.kill()
        sectors = sum(file.cut(draw, chance, garbage) for file in self._files())
        changes = 0
        todo = [self.root]
        while todo:
            directory = todo.pop()
            changes += directory.cut(draw, names)
            todo += [node for _, node in sorted(directory.names.items()) if isinstance(node, Directory)]
        return sectors, changes

    def unsynced(self) -> int:
        """Sectors that were written and not synced."""
        return sum((len(data) + SECTOR - 1) // SECTOR for file in self._files() for _, data in file.writes)

    def used(self) -> int:
        """Bytes of all files."""
        return sum(len(node.seen) for _, node in self.walk() if isinstance(node, File))
