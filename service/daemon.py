"""The process of one node: reads its configuration, runs `service.node.serve`, and says when it serves.

The line ``ready client=HOST:PORT pid=N`` is printed on standard output once, when clients are answered. SIGTERM and
SIGINT stop it cleanly at any moment, SIGHUP reads the TLS files again; with `until_eof` the end of standard input stops
it too, so that a node never outlives the process that started it. Exit codes: 0 stopped, 1 refused to start, 2 bad
configuration, 75 the disk failed (law 7), 76 the other nodes know a newer data directory of this node (D12). Called by
`logyard serve`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

    from .catalog.join import Invitation
    from .config import NodeConfig
    from .node import Node
    from .tls import Door

EXIT_WAL_FAILED = 75
"""EX_TEMPFAIL of sysexits.h: a supervisor may start the node again on a repaired disk."""
SWITCH_INTERVAL_S = 5e-5
"""Keeps the WAL thread from starving beside a busy loop (docs/internals/hosting.md, "The interpreter lock")."""
EXIT_OUTDATED = 76
"""EX_PROTOCOL: to be started again only after an operator looked."""
STOP_GRACE_S = 10.0
"""After the parent is gone, how long a clean stop may take before the process ends itself."""


TRUSTING = "without [client_tls] every user of this machine is trusted as a client, administrative verbs included"


def start_audit() -> None:
    """Write who called administrative verbs to standard error, with the time, whatever else is logged."""
    audit = logging.getLogger("logyard.audit")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    audit.handlers[:] = [handler]
    audit.setLevel(logging.INFO)
    audit.propagate = False


def leaves(error: BaseException) -> list[BaseException]:
    """Return the plain exceptions inside nested groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def run_node(
    path: Path, *, until_eof: bool = False, invitation: Invitation | None = None, zone: str = "-"
) -> int:  # fmt: skip
    """Serve until stopped; return the exit code. `invitation`: an empty directory joins first; `zone`: where the node
    stands, unless `-`. Errors of the world become one line on standard error."""
    from logyard.protocol.errors import BadRequest, LogyardError, Outdated, WalFailed
    from logyard.protocol.verbs import text

    from .catalog.join import has_number, joined_config
    from .config import load_config, read_secret
    from .tls import open_doors

    try:
        if invitation is None and has_number(path, os.environ):
            config = load_config(path, os.environ)
        else:
            config = joined_config(path, os.environ, invitation)
        if zone != "-":
            text("zone").check(zone)
            if not config.catalog:
                raise BadRequest("--zone: nobody asks for it without a catalogue: set catalog = true in [node]")
            config = replace(config, zone=zone)
        warn_of_keys([door for door in open_doors(config) if door is not None])
        read_secret(config)
    except LogyardError as error:
        print(f"logyard serve: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadRequest) else 1
    try:
        run_loop(config, until_eof=until_eof)
    except BaseException as error:
        found = leaves(error)
        if any(isinstance(leaf, WalFailed) for leaf in found):
            print(f"logyard serve: {found[0]}", file=sys.stderr)
            return EXIT_WAL_FAILED
        if any(isinstance(leaf, Outdated) for leaf in found):
            print(f"logyard serve: {found[0]}", file=sys.stderr)
            return EXIT_OUTDATED
        if all(isinstance(leaf, KeyboardInterrupt) for leaf in found):
            return 0
        if not all(isinstance(leaf, (LogyardError, OSError)) for leaf in found):
            # A bug of ours: the log of the node is where its traceback belongs.
            import traceback

            traceback.print_exception(error, file=sys.stderr)
            return 70
        first = found[0]
        if isinstance(first, OSError) and str(first.filename).startswith(str(config.directory)):
            print(f"logyard serve: [node] directory: {first.filename}: {first.strerror}", file=sys.stderr)
        else:
            print(f"logyard serve: {first}", file=sys.stderr)
        return 1
    return 0


def warn_of_keys(doors: Sequence[Door]) -> None:
    """Say which private keys others may read. A node starts nevertheless: it did so far, and a renewal must not end a
    cluster."""
    for door in doors:
        if why := door.exposed:
            print(f"logyard serve: {why}", file=sys.stderr, flush=True)


def run_loop(config: NodeConfig, *, until_eof: bool) -> None:
    """Run one trio loop: the node, and one task for the end of standard input."""
    token: trio.lowlevel.TrioToken | None = None
    nodes: list[Node] = []
    stopping = early = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        if token is not None:
            soon(token, scope.cancel)

    def hang_up(*_: object) -> None:
        nonlocal early
        early = not nodes
        if token is not None and nodes:
            soon(token, reload)

    # From the first moment to the end of the process: whoever stops a node, or renews certificates, does not ask
    # whether it is just starting, recovering or stopping, and a signal that nobody takes would end it there.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, hang_up)
    import trio

    from logyard.engine.descriptors import raise_limit
    from logyard.protocol.errors import BadRequest

    from . import memory
    from .node import serve

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_audit()
    raise_limit()

    def reload() -> None:
        for node in nodes:
            try:
                doors = node.reload_tls()
            except BadRequest as error:
                print(f"logyard serve: the certificates stay as they were: {error}", file=sys.stderr, flush=True)
                continue
            said = "; ".join(door.told for door in doors) or "none: there is no [tls] and no [client_tls]"
            print(f"logyard serve: certificates for new connections: {said}", file=sys.stderr, flush=True)
            warn_of_keys(doors)

    scope = trio.CancelScope()

    async def main() -> None:
        nonlocal token
        token = trio.lowlevel.current_trio_token()
        if stopping:
            scope.cancel()
        with scope:
            async with trio.open_nursery() as nursery:
                await start(nursery)

    async def start(nursery: trio.Nursery) -> None:
        if until_eof:
            watch_input(scope.cancel)
        node: Node = await nursery.start(serve, config)
        nodes.append(node)
        if early:
            # It may have come behind the reading of the files.
            reload()
        if config.client_tls is None:
            print(f"logyard serve: {TRUSTING}", file=sys.stderr, flush=True)
        memory.begin()
        nursery.start_soon(memory.look_after)
        node.system.tell_memory(memory.grown, memory.shrunk)
        host = config.client_listen[0]
        metrics = f" metrics={config.metrics_listen[0]}:{node.metrics_port}" if config.metrics_listen else ""
        print(f"ready client={host}:{node.client_port} pid={os.getpid()}{metrics}", flush=True)

    trio.run(main)


def soon(token: trio.lowlevel.TrioToken, call: Callable[[], None]) -> None:
    """Call in the loop from outside of it, unless it has ended."""
    import trio

    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(call)


def watch_input(stop: Callable[[], None]) -> None:
    """Call `stop` in the loop when standard input ends; end the process if the loop does not follow in time."""
    import trio

    token = trio.lowlevel.current_trio_token()

    def wait_for_end() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        try:
            token.run_sync_soon(stop)
        except trio.RunFinishedError:
            return
        # The process is a child whose parent is gone: nobody else would end it if the loop hangs.
        threading.Timer(STOP_GRACE_S, os._exit, [1]).start()

    threading.Thread(target=wait_for_end, name="logyard-input", daemon=True).start()
