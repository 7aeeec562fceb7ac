"""The meta store, read without touching it: rows of both copies, judged as a start would judge them.

Invariant: the copies are opened read-only and without LMDB's lock file; their rows are poured into a fresh pair in a
temporary directory, and `MetaStore` reconciles that pair, so that what is checked is what a start would get. Called by
`service.check.process`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from xxhash import xxh3_64_intdigest

from logyard.engine.disk.door import Disk
from logyard.engine.log import meta_rows
from logyard.engine.log.manifest_files import FOLDER, SUFFIX
from logyard.engine.log.manifest_files import uid_of as manifest_uid
from logyard.engine.log.meta import (
    COMMIT,
    HEADER_BYTES,
    IDENTITY,
    NAMES,
    MetaStore,
    fill_environment,
    read_environment,
)
from logyard.engine.log.wal_files import wal_epochs
from logyard.engine.recovery import manifests
from logyard.engine.recovery.inspect import Facts
from logyard.payloads.measuring import check_file
from logyard.protocol.errors import Corrupt, GenerationFailed, WrongIdentity

from .report import Report, lacks

KINDS = {
    b"g": "definition", b"s": "checkpoint", b"n": "snapshot", b"f": "file", b"p": "payload homes", b"d": "deletion",
    b"e": "epoch", b"x": "damage", b"c": "section", b"i": "transfer", b"k": "peer", b"r": "departure",
}  # fmt: skip
GROUP_ROWS = (b"g", b"s", b"n", b"d", b"x", b"i", b"r")


def holds(key: bytes, raw: bytes) -> bool:
    """Return whether a row's checksum is that of its key and value."""
    if len(raw) < HEADER_BYTES:
        return False
    return xxh3_64_intdigest(raw[8:], xxh3_64_intdigest(key)) == int.from_bytes(raw[:8], "little")


def uid_of(key: bytes) -> int:
    """Return the group that a row belongs to; 0: none."""
    if key[:1] in GROUP_ROWS and len(key) == 1 + meta_rows.KEY.size:
        return int.from_bytes(key[1:], "big")
    if key[:1] in (meta_rows.STORE, meta_rows.CHUNK) and len(key) > 8:
        return int.from_bytes(key[-8:], "big")
    return 0


def describe(key: bytes) -> str:
    """Return a row's name."""
    if key in (IDENTITY, COMMIT, meta_rows.DIRECTORY, meta_rows.OUTDATED):
        return f"the {key[1:].decode()} row"
    kind = KINDS.get(key[:1], "unknown")
    uid = uid_of(key)
    return f"the {kind} row of group {uid:016x}" if uid else f"the {kind} row {key!r}"


def read_meta(directory: Path, skip: frozenset[str], report: Report) -> Facts:
    """Return facts from both copies; what is wrong with them is reported. Raises `WrongIdentity` for a newer format."""
    facts = Facts()
    copies = [_read_copy(directory, f"meta/{name}", skip, report) for name in NAMES]
    readable = [copy for copy in copies if copy is not None]
    for name, copy in zip(NAMES, copies, strict=True):
        if copy is None and readable:
            report.healed("meta", "this copy can't be read; the other one can", path=f"meta/{name}")
    if not readable:
        if _has_begun(directory):
            report.damage("meta", "neither copy of the meta store can be read: no group is known here", path="meta")
        else:
            # The first commit comes before the first file of the log.
            report.warning("unborn", "no start came as far as its first commit: the next one is the first", path="meta")
        facts.complete = False
        return facts
    for name in _set_aside(directory / "meta"):
        report.warning("meta", "a copy that an earlier start set aside", path=f"meta/{name}")
    with tempfile.TemporaryDirectory(prefix="logyard-check-") as temporary:
        for name, copy in zip(NAMES, copies, strict=True):
            if copy is not None:
                fill_environment(os.path.join(temporary, name), copy)
        files = _copy_files(directory, Path(temporary), report)
        store = MetaStore(Disk(), temporary)
        try:
            store.open()
            _mend_files(store, report)
            _compare(store, copies, facts, report)
            _gather(store, facts, report)
            for uid, spec in facts.groups.items():
                if spec.is_system and uid in facts.snapshots and uid not in files:
                    text = "the third copy of its snapshot is missing: the next start writes it"
                    report.healed("manifest", text, path=_file(uid), group=spec.name)
        except WrongIdentity as error:
            raise WrongIdentity(str(error).replace(temporary, str(directory / "meta"))) from None
        finally:
            store.close()
    return facts


def _file(uid: int) -> str:
    return f"meta/{FOLDER}/{uid:016x}{SUFFIX}"


def _copy_files(directory: Path, temporary: Path, report: Report) -> set[int]:
    """Copy the files of snapshots beside the copies of the rows; return whose they are."""
    found, folder = set(), directory / "meta" / FOLDER
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if name.endswith(".tmp"):
            report.orphan(f"meta/{FOLDER}/{name}", "a file that was being made when the process ended")
        elif not (uid := manifest_uid(name)):
            report.warning("unknown_file", "this is no name of a snapshot's file", path=f"meta/{FOLDER}/{name}")
        else:
            found.add(uid)
            (temporary / FOLDER).mkdir(exist_ok=True)
            try:
                data = (folder / name).read_bytes()
            except OSError as error:
                if lacks(error):
                    raise
                data = b""
            (temporary / FOLDER / name).write_bytes(data)
    return found


def _mend_files(store: MetaStore, report: Report) -> None:
    """Judge the files as a start would."""
    for one in manifests.mend(store):
        path, group = _file(one.uid), f"{one.uid:016x}"
        if one.kind in (manifests.NOBODYS, manifests.USELESS):
            report.warning("manifest", one.message, path=path, group=group)
        else:
            report.healed("manifest", one.message, path=path, group=group)


def _has_begun(directory: Path) -> bool:
    """Return whether a start has made files that only a first commit is followed by."""
    wal, segments = directory / "wal", directory / "segments"
    return bool(wal.is_dir() and wal_epochs(os.listdir(wal))) or (segments.is_dir() and any(segments.iterdir()))


def _set_aside(meta: Path) -> list[str]:
    return sorted(name for name in os.listdir(meta) if ".bad-" in name)


def _read_copy(directory: Path, relative: str, skip: frozenset[str], report: Report) -> dict[bytes, bytes] | None:
    path = directory / relative
    data = f"{relative}/data.mdb"
    if relative in skip:
        report.warning("meta", "reading it kills the process: a page is unreadable or nonsense", path=data)
        return None
    try:
        check_file(str(path / "data.mdb"))
        report.inside(relative)
        try:
            found, most = read_environment(str(path))
        finally:
            report.inside("")
    except (GenerationFailed, Corrupt, OSError) as error:
        if lacks(error):
            raise
        report.warning("meta", f"it can't be read: {error}", path=data)
        return None
    if len(found) != most:
        report.healed("meta", f"{len(found)} of {most} rows can be reached", path=data)
    return found


def _compare(store: MetaStore, copies: list[dict[bytes, bytes] | None], facts: Facts, report: Report) -> None:
    """Report rows that are bad in one copy, bad in both, or older in one."""
    lost = set(store.lost)
    stale = dict.fromkeys(NAMES, 0)
    keys = sorted({key for copy in copies if copy is not None for key in copy})
    for key in keys:
        raws = [None if copy is None else copy.get(key) for copy in copies]
        good = [raw is not None and holds(key, raw) for raw in raws]
        for name, copy, raw, is_good in zip(NAMES, copies, raws, good, strict=True):
            if raw is not None and not is_good and key not in lost:
                other = "the other copy's" if any(good) else "that of the group's file"
                text = f"{describe(key)} does not match its checksum; {other} does"
                report.healed("meta_row", text, path=f"meta/{name}/data.mdb", group=_group(key))
            elif copy is not None and is_good is False and raw is None:
                stale[name] += 1
        if all(good) and raws[0] != raws[1]:
            older = 0 if _commit_of(raws[0]) < _commit_of(raws[1]) else 1
            stale[NAMES[older]] += 1
        if key not in lost:
            continue
        if None in raws and None not in copies:
            # A key that only one copy has, and not even that one proves: a damaged key, whose true row is in the other.
            name = NAMES[0 if raws[0] is not None else 1]
            text = f"a row {key!r} that is nobody's: its key is damaged"
            report.healed("meta_row", text, path=f"meta/{name}/data.mdb")
            continue
        facts.miss()
        facts.lost.add(key)
        report.damage("meta_row", f"{describe(key)} is damaged in every copy: {key!r}", path="meta", group=_group(key))
    for name, many in stale.items():
        if many:
            text = f"{many} rows are older than in the other copy, or missing: a crash came between the two commits"
            report.healed("meta_row", text, path=f"meta/{name}/data.mdb")


def _commit_of(raw: bytes | None) -> int:
    return int.from_bytes((raw or b"")[8:HEADER_BYTES], "little")


def _group(key: bytes) -> str:
    uid = uid_of(key)
    return f"{uid:016x}" if uid else ""


def _gather(store: MetaStore, facts: Facts, report: Report) -> None:
    """Gather the typed rows."""
    identity = store.identity
    if identity is not None:
        facts.identify(identity.node, identity.cluster)

    def unreadable(key: bytes, error: Exception) -> None:
        report.damage("meta_row", f"{describe(key)} can't be read: {error}", path="meta", group=_group(key))

    facts.gather(store, unreadable)
    if facts.refused:
        text = f"the other nodes refuse this directory, and so does a start: {facts.refused}"
        report.damage("outdated", text, path="meta")
    for uid, known in facts.damaged.items():
        group = facts.name(uid)
        if known.sound:
            report.healed("damaged", f"this group was mended by others: {known.reason}", path="meta", group=group)
        else:
            text = f"this group lost records here, and waits for others to mend it: {known.reason}"
            report.damage("damaged", text, path="meta", group=group)
    report.count("groups", len(facts.groups))
    for uid in sorted(facts.states.keys() | facts.snapshots.keys()):
        if uid not in facts.groups:
            why = "was deleted" if uid in facts.deleted else "has no definition"
            report.damage("meta_row", f"a group with rows {why}", path="meta", group=facts.name(uid))
