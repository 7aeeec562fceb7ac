"""What an export consists of, and the proof that it is whole.

`plan.json` is written first and fixes each log's range; every Parquet file names in its footer what it holds, with the
digest of its records; `manifest.jsonl` comes last: a header, then a line for each log with its parts. Files appear
under their names only when they are complete. Written by `export`, read by `importing`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from logyard.protocol.errors import LogyardError

from .digests import Digest

FORMAT = 1
PLAN = "plan.json"
MANIFEST = "manifest.jsonl"
DATA = "data"
FOOTER = b"logyard.part"
TEMPORARY = ".tmp"


class ExportError(LogyardError):
    """An export that is not whole, or not what was asked for."""

    code = "export"


class Part(NamedTuple):
    """Records `first` up to, without, `end` of a log in one file, relative to the export's directory. `bytes`: the
    file's size. `export` is the number of the export that it was written for."""

    export: str
    log: str
    uid: int
    first: int
    end: int
    file: str
    rows: int = 0
    payload_bytes: int = 0
    digest: str = ""
    bytes: int = 0

    @property
    def sum(self) -> Digest:
        """Its records' digest."""
        return Digest(self.rows, self.payload_bytes, int(self.digest or "0", 16))


class LogPart(NamedTuple):
    """One log of an export: its range and its parts, in order."""

    log: str
    uid: int
    start: int
    end: int
    parts: tuple[Part, ...]

    @property
    def sum(self) -> Digest:
        """The digest of all records."""
        total = Digest()
        for part in self.parts:
            total = total.plus(part.sum)
        return total


def folder_of(log: str) -> str:
    """Return a log's directory: a log's name is no path. Spark reads it back as the value of the column `log`."""
    return f"log={quote(log, safe='')}"


def is_temporary(path: Path) -> bool:
    """Return whether a file is one that `write_file` or `write_once` was about to put in its place."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, text: str) -> None:
    """Write a small file that is there whole or not at all."""
    os.replace(_written(path, text), path)
    sync(path.parent)


def write_once(path: Path, text: str) -> bool:
    """Write a small file, unless somebody else has; return whether it is ours."""
    temporary = _written(path, text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # There are no links on this file system.
        if not _moved(temporary, path):
            return False
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def _moved(temporary: Path, path: Path) -> bool:
    """Give a file its name, unless there is one of that name; return whether it did. Of two at once one waits for the
    other; only where a file system has no locks either may both find nothing."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            return False
        os.replace(temporary, path)
        return True
    finally:
        os.close(folder)


def _written(path: Path, text: str) -> Path:
    """Return a file of ours alone that has that text."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    return temporary


def check_whole(log: str, start: int, end: int, parts: Sequence[Part]) -> LogPart:
    """Return a log from its parts, in any order. Raises `ExportError` unless they are all records from `start` to
    `end`."""
    ordered = sorted(parts, key=lambda part: part.first)
    at = start
    for part in ordered:
        if part.first != at or part.rows != part.end - part.first:
            raise ExportError(f"log {log!r}: records from {at} on are missing in the export")
        at = part.end
    if at != end:
        raise ExportError(f"log {log!r}: records {at}..{end - 1} are missing in the export")
    return LogPart(log, ordered[0].uid if ordered else 0, start, end, tuple(ordered))


def write_manifest(out: Path, plan: dict[str, Any], logs: Iterable[LogPart]) -> None:
    """Write the last file of an export."""
    lines = []
    total = Digest()
    for log in logs:
        total = total.plus(log.sum)
        parts = [part._asdict() for part in log.parts]
        lines.append({"log": log.log, "uid": log.uid, "start": log.start, "end": log.end, "digest": log.sum.text,
                      "rows": log.sum.rows, "payload_bytes": log.sum.payload_bytes, "parts": parts})  # fmt: skip
    header = {"format": FORMAT, "export": plan["export"], "payloads": plan["payloads"], "logs": len(lines),
              "rows": total.rows, "payload_bytes": total.payload_bytes}  # fmt: skip
    write_file(out / MANIFEST, "".join(json.dumps(line) + "\n" for line in [header, *lines]))


def read_manifest(out: Path) -> tuple[dict[str, Any], list[LogPart]]:
    """Return (header, logs). Raises `ExportError` for one that is not finished, not whole or of a newer format."""
    try:
        lines = [json.loads(line) for line in (out / MANIFEST).read_text(encoding="utf-8").splitlines()]
        header, rows = lines[0], lines[1:]
    except FileNotFoundError:
        raise ExportError(f"{out}: there is no {MANIFEST}: the export is not finished; run it again") from None
    except (ValueError, IndexError) as error:
        raise ExportError(f"{out / MANIFEST} can't be read: {error}") from None
    if header.get("format") != FORMAT:
        raise ExportError(f"{out}: format {header.get('format')}; this logyard reads {FORMAT}")
    logs = [
        check_whole(row["log"], row["start"], row["end"], [Part(**part) for part in row["parts"]])._replace(
            uid=row["uid"]
        )
        for row in rows
    ]
    if len(logs) != header["logs"] or sum(log.sum.rows for log in logs) != header["rows"]:
        raise ExportError(f"{out / MANIFEST} is cut short: {len(logs)} of {header['logs']} logs")
    return header, logs
