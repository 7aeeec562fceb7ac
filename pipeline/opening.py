"""Opens the source that options name. Called on the driver for planning and in each task for reading."""

from __future__ import annotations

from .options import Options
from .sources import LogSource


def open_source(options: Options) -> LogSource:
    """Return a source; nothing is connected or read yet. Close it."""
    from pathlib import Path

    from logyard.protocol.tls import TlsConfig

    if options.path is not None:
        from .directory.source import DirectorySource

        return DirectorySource(Path(options.path))

    from .network import NetworkSource

    tls = None
    if options.tls_ca and options.tls_certificate and options.tls_key:
        tls = TlsConfig(ca=Path(options.tls_ca), certificate=Path(options.tls_certificate), key=Path(options.tls_key))
    assert options.servers is not None
    return NetworkSource(options.servers, tls=tls, timeout_s=options.timeout_s)
