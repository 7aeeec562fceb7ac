"""Losing a node's data directory; used wherever real processes lose theirs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from logyard.engine.disk.lock import lock_directory


def wipe(data: Path) -> None:
    """Remove the data directory of a node that was killed, once its writer, which outlives it by the transaction it is
    in, writes nothing more."""
    lock = lock_directory(str(data))
    try:
        shutil.rmtree(data)
    finally:
        os.close(lock)
