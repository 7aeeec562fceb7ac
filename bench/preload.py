"""A small C library that a process's loader puts before the C library: made by the machine's compiler when it is
asked for. Called by `call_times` and `suite.sync_delay`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


class NoCompiler(Exception):
    """The library can't be made; the message says what is missing."""


def preloaded(directory: Path, name: str, source: str) -> str:
    """Make `NAME.so` of this source in `directory`; return its path, for `LD_PRELOAD`. Raises `NoCompiler`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler(f"{name} needs a C compiler: apt-get install gcc libc6-dev")
    directory.mkdir(parents=True, exist_ok=True)
    text, library = directory / f"{name}.c", directory / f"{name}.so"
    text.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(text), "-ldl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NoCompiler(f"{name} was not made: {done.stderr.strip()[:300]}")
    return str(library.resolve())
