"""The kernel's view of a process's disk calls: strace's output as events, LMDB's own calls included.

What goes through a memory map is not seen: LMDB writes by calls here, and the journal of open environments
(`payloads.journal`) means nothing after a power cut.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .events import CREATE, DIRECTORY, MARK, RENAME, SIZE, SYNC, SYNC_DIRECTORY, THROUGH, UNLINK, WRITE, Event

CALLS = (
    "openat,pwrite64,pwritev,pwritev2,write,writev,ftruncate,truncate,fallocate,fsync,fdatasync,rename,renameat,"
    "renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,lseek"
)
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
PLACE = re.compile(r"(-?\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2}|[^>\\])*)>")
LINE = re.compile(r"(\d+) +(.*)")
CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)", re.DOTALL)
RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)", re.DOTALL)
NUMBERS = re.compile(r"-?\d+")


class Call(NamedTuple):
    """One system call: when it began and ended (line numbers), its arguments as text, its result."""

    begun: int
    ended: int
    name: str
    arguments: str
    result: int


def available() -> bool:
    """Whether there is an strace that may trace."""
    strace = shutil.which("strace")
    return (
        strace is not None and not subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True).returncode
    )


def run_traced(command: Sequence[str], output: Path, **options: object) -> None:
    """Run a command under strace. Raises `CalledProcessError`."""
    strace = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", "-o", str(output)]
    subprocess.run([*strace, *command], check=True, **options)  # type: ignore[call-overload]


def calls(lines: Iterator[str]) -> Iterator[Call]:
    """Calls in the order of their ends; those of threads that interrupt each other are put together."""
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        found = LINE.match(line)
        if found is None:
            continue
        process, text = found.groups()
        start = number
        resumed = RESUMED.match(text)
        if resumed is not None:
            start, head = begun.pop(process, (number, ""))
            text = head + resumed[2]
        elif text.endswith("<unfinished ...>"):
            begun[process] = number, text[: -len("<unfinished ...>")].rstrip()
            continue
        call = CALL.match(text)
        if call is not None and not call[3].startswith("-"):
            yield Call(start, number, call[1], call[2], int(call[3]))


def raw(text: str) -> bytes:
    """Bytes written as \\x.. ."""
    return bytes.fromhex(text.replace("\\x", ""))


def touched(event: Event) -> Iterator[str]:
    """What a sync has to name to cover an event: the file, or the folders of its names."""
    if event.kind in (WRITE, SIZE):
        yield event.path
    elif event.kind in (CREATE, DIRECTORY, UNLINK, RENAME):
        for path in (event.path, event.data.decode())[: 2 if event.kind == RENAME else 1]:
            yield os.path.dirname(path) or "."


class Reader:
    """Turns calls below `root` into events. Descriptors are the process's own: one process, any threads."""

    def __init__(self, root: str, marks: str) -> None:
        self.root = os.path.realpath(root) + "/"
        self.marks = os.path.realpath(marks)
        self.known: set[str] = set()
        self.folders = {"."}
        self.at: dict[int, int] = {}
        self.through: set[int] = set()

    def within(self, path: str) -> str | None:
        """The path below the root; None for others."""
        if path == self.root[:-1]:
            return "."
        return path[len(self.root) :] if path.startswith(self.root) and not path.endswith(" (deleted)") else None

    def events(self, found: Sequence[Call]) -> list[Event]:
        """All events in order: a sync counts when it ended and covers what had ended when it began, everything else
        counts from when it began."""
        rows: list[tuple[int, int, Call, Event]] = []
        for call in found:
            for event in self.one(call):
                late = event.kind in (SYNC, SYNC_DIRECTORY, THROUGH)
                rows.append((call.ended if late else call.begun, len(rows), call, event))
        rows.sort(key=lambda row: row[:2])
        events: list[Event] = []
        ends: dict[str, list[tuple[int, int]]] = {}
        last_write: dict[int, int] = {}
        for _, _, call, event in rows:
            number = len(events)
            if event.kind in (SYNC, SYNC_DIRECTORY):
                # What was under way when it began is not covered, on whichever thread; other files don't matter.
                open_ = [at for at, end in ends.get(event.path, ()) if end >= call.begun]
                event = event._replace(offset=min([number, *open_]))
            elif event.kind == THROUGH:
                event = event._replace(offset=last_write[call.begun])
            elif event.kind == WRITE:
                last_write[call.begun] = number
            events.append(event)
            for path in touched(event):
                ends.setdefault(path, []).append((number, call.ended))
        return events

    def one(self, call: Call) -> Iterator[Event]:
        """The events of one call that succeeded."""
        places = [
            (fd, raw(path).decode() if path.startswith("\\x") else path) for fd, path in PLACE.findall(call.arguments)
        ]
        texts = [raw(text) for text in TEXT.findall(PLACE.sub("", call.arguments))]
        if call.name == "openat":
            yield from self.opened(call, places, texts)
        elif call.name in (
            "mkdir",
            "mkdirat",
            "rmdir",
            "unlink",
            "unlinkat",
            "rename",
            "renameat",
            "renameat2",
            "truncate",
        ):
            yield from self.names(call, places, texts)
        elif places:
            fd, path = int(places[0][0]), places[0][1]
            if call.name == "lseek":
                self.at[fd] = call.result
            elif path == self.marks:
                yield Event(MARK, "", 0, b"".join(texts))
            elif (inside := self.within(path)) is not None:
                yield from self.content(call, fd, inside, b"".join(texts))

    def opened(self, call: Call, places: list[tuple[str, str]], texts: list[bytes]) -> Iterator[Event]:
        """openat."""
        path = self.named(places[0][1], texts[0])
        self.at[call.result] = 0
        self.through.discard(call.result)
        if "O_DSYNC" in call.arguments or "O_SYNC" in call.arguments:
            self.through.add(call.result)
        inside = self.within(path)
        if inside is None or "O_DIRECTORY" in call.arguments:
            return
        if "O_CREAT" in call.arguments and inside not in self.known:
            self.known.add(inside)
            yield Event(CREATE, inside)
        elif "O_TRUNC" in call.arguments:
            yield Event(SIZE, inside, 0, b"=")

    def named(self, folder: str, name: bytes) -> str:
        """A path that may be relative to a descriptor."""
        text = os.fsdecode(name)
        return text if text.startswith("/") else os.path.normpath(os.path.join(folder, text))

    def names(self, call: Call, places: list[tuple[str, str]], texts: list[bytes]) -> Iterator[Event]:
        """Calls that change names."""
        folders = [path for _, path in places] or [os.getcwd()]
        inside = self.within(self.named(folders[0], texts[0]))
        if inside is None:
            return
        if call.name in ("mkdir", "mkdirat"):
            self.known.add(inside)
            self.folders.add(inside)
            yield Event(DIRECTORY, inside)
        elif call.name == "truncate":
            yield Event(SIZE, inside, int(NUMBERS.findall(call.arguments)[-1]), b"=")
        elif call.name.startswith("rename"):
            target = self.within(self.named(folders[-1], texts[1]))
            assert target is not None
            moved = {path for path in self.known if path == inside or path.startswith(inside + "/")}
            self.known -= moved
            self.known |= {target + path[len(inside) :] for path in moved}
            self.folders |= {target + path[len(inside) :] for path in moved & self.folders}
            yield Event(RENAME, inside, 0, target.encode())
        else:
            self.known.discard(inside)
            yield Event(UNLINK, inside)

    def content(self, call: Call, fd: int, path: str, data: bytes) -> Iterator[Event]:
        """Calls on a file's content."""
        if call.name in ("fsync", "fdatasync"):
            yield Event(SYNC_DIRECTORY if path in self.folders else SYNC, path)
            return
        numbers = [int(number) for number in NUMBERS.findall(PLACE.sub("", TEXT.sub("", call.arguments)))]
        if call.name == "ftruncate":
            yield Event(SIZE, path, numbers[-1], b"=")
            return
        if call.name == "fallocate":
            yield Event(SIZE, path, numbers[-2] + numbers[-1])
            return
        if call.name in ("write", "writev"):
            offset = self.at.get(fd, 0)
            self.at[fd] = offset + call.result
        else:
            offset = numbers[-2] if call.name == "pwritev2" else numbers[-1]
        yield Event(WRITE, path, offset, data[: call.result])
        if fd in self.through:
            yield Event(THROUGH, path)


def read_trace(output: Path, root: str, marks: str) -> list[Event]:
    """The events of a trace."""
    with output.open(encoding="ascii", errors="replace") as lines:
        found = sorted(calls(iter(lines)), key=lambda call: call.begun)
    return Reader(root, marks).events(found)
