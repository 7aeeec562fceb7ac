"""One append log of the blocking client: its verbs are in `_sync.log`, here is how appends leave: each in a frame of
its own.

Usable from any thread. Made by `sync.Yard.log`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO, cast

from logyard.protocol.frame import Buffer

from ._sync.frames import Appends, FramedLog
from .upload_sync import read_file, upload


class Log(FramedLog):
    """One append log, blocking."""

    __slots__ = ()

    def __init__(self, yard: Appends, name: str) -> None:
        self.yard = yard
        self.name = name

    def _upload(
        self,
        metadata: Buffer,
        source: Iterable[Buffer] | BinaryIO | memoryview,
        size: int | None,
        timeout: float | None,
        compress: bool,
        command: bytes,
    ) -> int:
        if isinstance(source, memoryview):
            buffers: Iterable[Buffer] = (source,)
        else:
            buffers = read_file(cast(BinaryIO, source)) if hasattr(source, "read") else source
        return upload(self.yard, self.name, metadata, buffers, size, timeout, compress, command)
