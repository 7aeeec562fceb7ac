"""Opens the source that options name. Called on the driver for planning and in each task for reading."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .option_table import tls_of
from .options import Options
from .sources import LogSource

if TYPE_CHECKING:
    from .network import NetworkSource


class Kept:
    """The clusters that this process stays connected to: a Python worker of Spark runs one task after the other."""

    def __init__(self) -> None:
        self._sources: dict[tuple[object, ...], NetworkSource] = {}

    def source(self, options: Options) -> NetworkSource:
        """Return the source that `options` name, connected or not. Nobody closes it."""
        # A worker that was forked does not share its parent's connections.
        tls = options.tls_ca, options.tls_certificate, options.tls_key
        place = os.getpid(), options.servers, tls, options.timeout_s
        found = self._sources.get(place)
        if found is None:
            found = self._sources[place] = open_network(options)
        return found


KEPT = Kept()


def open_source(options: Options) -> LogSource:
    """Return a source; nothing is connected or read yet. Close it."""
    if options.path is not None:
        from pathlib import Path

        from .directory.source import DirectorySource

        return DirectorySource(Path(options.path))
    return open_network(options)


def open_network(options: Options) -> NetworkSource:
    """Return a source of a running cluster."""
    from .network import NetworkSource

    assert options.servers is not None
    tls = tls_of(options.tls_ca, options.tls_certificate, options.tls_key)
    return NetworkSource(options.servers, tls=tls, timeout_s=options.timeout_s)
