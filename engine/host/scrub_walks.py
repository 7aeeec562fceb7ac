"""What the scrub walks over that LMDB keeps: the meta store's rows in both copies, snapshots, generations.

A file is read as bytes first, through the disk as far as nobody has it mapped: a page that can't be read is then an
error here, and never a signal that kills the node. Called by `scrub`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from logyard.protocol.errors import Corrupt, LogyardError

from ..disk import is_damage
from ..log import meta_rows
from . import rows
from .scrub import always, is_alone, never

if TYPE_CHECKING:
    from .scrub import Scrub
    from .system import System

READ_BYTES = 1 << 20
META_ROWS = 512


async def read_through(scrub: Scrub, kind: str, path: str) -> str | None:
    """Read a file to its end. "" when all of it could be read, else why not; None: it is not there. Raises
    OSError that is no damage."""
    disk = scrub.system.disk
    try:
        fd = await trio.to_thread.run_sync(disk.open_file, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_damage(error):
            raise
        return f"it can't be opened: {error.strerror}"

    def portion(offset: int) -> int:
        disk.forget_pages(fd, offset, READ_BYTES)
        return len(disk.read(fd, READ_BYTES, offset))

    offset = 0
    try:
        while size := await trio.to_thread.run_sync(portion, offset):
            offset += size
            await scrub.read(kind, size)
    except OSError as error:
        if not is_damage(error):
            raise
        return f"it can't be read at byte {offset}: {error.strerror}"
    finally:
        disk.close(fd)
    return ""


async def meta(scrub: Scrub) -> None:
    """Both copies of every row. One that is bad or old is written over with the other."""
    system = scrub.system
    store = system.storage.books.meta
    for path in store.files():
        if failed := await read_through(scrub, "meta", path):
            # What is mapped of it may kill the node: a start sets it aside, and fills it from the other copy.
            scrub.found("meta", "", f"{path}: {failed}; stop and start this node", never)
            return
    start: bytes | None = b""
    while start is not None:
        try:
            found = await trio.to_thread.run_sync(store.verify, start, META_ROWS)
        except Corrupt as error:
            scrub.found("meta", "", f"{error}; stop and start this node", never)
            return
        for key, name in found.mended:
            scrub.found("meta", _group_of(system, key), f"row {key!r} in copy {name} of the meta store", always)
        for key in found.lost:
            await _lost_row(scrub, key)
        await scrub.read("meta", found.size)
        start = found.next


def _group_of(system: System, key: bytes) -> str:
    """The group that a row is about; "" for none."""
    uid = int.from_bytes(key[-8:], "big") if len(key) >= 9 else 0
    spec = system.spec(uid) if system.has(uid) else None
    return spec.name if spec is not None else ""


async def _lost_row(scrub: Scrub, key: bytes) -> None:
    """A row that verifies in no copy: this process knows what it said, or the group is mended."""
    system = scrub.system
    uid = int.from_bytes(key[-8:], "big")
    what = f"row {key!r} in both copies of the meta store"
    member = system.members.get(uid)
    kind = key[:1]
    if member is None or member.raft.stopped or kind not in (b"g", b"s", b"n", meta_rows.CHUNK):
        scrub.found("meta", _group_of(system, key), what, never)
    elif kind in (b"g", b"s"):
        one = member

        def build() -> list[rows.Put]:
            if system.members.get(uid) is not one or one.is_gone or one.damaged:
                return []
            return [rows.group(one.spec) if kind == b"g" else rows.state(one)]

        await system.storage.books.commit(build)
        scrub.found("meta", member.spec.name, what, always)
    elif kind == b"n" or key[1:-8] in member.chunks:
        await scrub.renew("meta", member, Corrupt("the meta store", 0, what, "two bad copies"))


async def snapshots(scrub: Scrub) -> None:
    """Every group's newest snapshot with its chunks: that it is there, and what its sections' hashes say."""
    system = scrub.system
    keys = await trio.to_thread.run_sync(system.storage.books.meta.keys, meta_rows.SnapshotRow.PREFIX)
    for key in keys:
        uid = int.from_bytes(key[1:], "big")
        size, error = await trio.to_thread.run_sync(_load, system, uid)
        await scrub.read("snapshot", size)
        member = system.hibernation.find(uid) if error is not None else None
        if error is not None and member is not None:
            await scrub.renew("snapshot", member, error)


def _load(system: System, uid: int) -> tuple[int, LogyardError | None]:
    """In a thread: bytes of a snapshot, and what is wrong with it."""
    books, before = system.storage.books, -1
    while True:
        try:
            value = books.meta.get(meta_rows.snapshot_key(uid))
        except Corrupt:
            # In both copies: the walk over rows has said so, or does the next time.
            return 0, None
        if value is None:
            return 0, None
        row = meta_rows.SnapshotRow.unpack(meta_rows.snapshot_key(uid), value)
        try:
            snapshot = books.load_snapshot(row)
            return len(row.data) + sum(map(len, snapshot.sections.values())), None
        except LogyardError as error:
            # A newer one may have taken its place, and its chunks away, in between.
            if row.index == before:
                return len(row.data), error
            before = row.index


async def generations(scrub: Scrub) -> None:
    """Every row of every generation, in a process of its own."""
    store = scrub.system.store
    for number in [one.id for one in store.generations()]:
        path = store.data_file(number)
        reason = await read_through(scrub, "generation", path)
        if reason is None:
            continue
        damaged: dict[int, list[int]] = {}
        if not reason:
            entries, reason = await store.verify(number)
            for uid, index in entries:
                damaged.setdefault(uid, []).append(index)
        for uid, indexes in damaged.items():
            scrub.lose("generation", uid, indexes, f"at home in generation {number}")
        if reason and any(one.id == number for one in store.generations()):
            _fail(scrub, number, reason)


def _fail(scrub: Scrub, number: int, reason: str) -> None:
    """Nothing of a generation can be trusted: all that is at home there comes from peers, if each group has some."""
    system = scrub.system
    homes = system.store.at_home(number)
    members = {uid: system.hibernation.find(uid) for uid, _, _ in homes}
    what = f"generation {number}: {reason}"
    alone = [member.spec.name for member in members.values() if member is not None and is_alone(system, member)]
    if alone:
        # What can still be read of it is all that there is.
        scrub.found("generation", "", f"{what}; no other node has {', '.join(alone[:8])}", never)
        return
    system.store.fail(number, reason)
    system.storage.books.owe_store()

    def whole() -> bool:
        return not any(system.store.lost(*home) for home in homes)

    scrub.found("generation", "", what, whole)
