"""What `logyard etcd` runs: a node in a process of its own, and the gateway in this one.

The node ends with this process, also if it is killed (`local_cluster`). When the gateway serves, standard output gets
``ready url=URL pid=N`` and the log, on standard error, etcd's line. SIGTERM and SIGINT stop it cleanly, from the first
moment on: streams end, then the node. Exit codes: 0 stopped, 1 refused to start or the node died, 2 bad flags.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import trio

from logyard.client.aio import connect
from logyard.engine.disk.lock import lock_directory
from logyard.protocol.errors import BadRequest, DirectoryInUse, LogyardError
from logyard.service.config import make_secret
from logyard.service.daemon import leaves
from logyard.service.local_cluster import (
    ClusterFailed,
    LocalCluster,
    LocalNode,
    format_config,
    free_ports,
    probe_listening,
)
from logyard.service.signals import stop_signals

from .cluster import MEMBERS
from .compaction import keep_compacted
from .flags import Flags, native_place, parse_flags, place_of
from .gateway import Gateway, Limits, Member, number_of
from .serving import create_group, serve

TAKE_OVER_S = 15.0
"""A node whose launcher was killed needs a moment to stop."""
WATCH_S = 0.5
TELL_S, TELL_AGAIN_S = 0.5, 10.0
"""After so long without an answer of --servers, and again each time after that, the log says that it waits."""
ABANDON_S = 3.0
"""After the signal: a client that reads nothing holds its connection, and must not hold the process."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}

log = logging.getLogger("logyard.etcd")


class Lines(logging.Formatter):
    """A line of JSON each, with the fields that etcd's have."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        level = {"warning": "warn", "critical": "fatal"}.get(record.levelname.lower(), record.levelname.lower())
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"level": level, "ts": when, "logger": record.name, "msg": record.getMessage()}
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


def start_log(level: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.basicConfig(level=LEVELS.get(level, logging.CRITICAL), handlers=[handler], force=True)


def run_etcd(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve until stopped; return the exit code."""
    try:
        flags = parse_flags(arguments, environ)
    except BadRequest as error:
        print(f"logyard etcd: {error}", file=sys.stderr)
        return 2
    start_log(flags.level)
    # Whatever is written here and by the node is for this user alone.
    os.umask(0o077)
    for warning in flags.warnings:
        log.warning("%s", warning)
    try:
        trio.run(_run, flags)
    except BaseException as error:
        found = leaves(error)
        if all(isinstance(one, KeyboardInterrupt) for one in found):
            return 0
        if not isinstance(found[0], (LogyardError, ClusterFailed, OSError)):
            raise
        print(f"logyard etcd: {found[0]}", file=sys.stderr)
        return 1
    return 0


class Stop:
    """The end that a signal asks for. `starting`: what it cancels until the gateway serves; `node`: who ends with it;
    `ended`: no connection is left."""

    __slots__ = ("asked", "starting", "serving", "ended", "node")

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.starting = trio.CancelScope()
        self.serving = False
        self.ended = False
        self.node: LocalCluster | None = None

    def ask(self) -> None:
        """Stop in order; asking again changes nothing."""
        if self.asked.is_set():
            return
        self.asked.set()
        if self.serving:
            # A thread: what holds the loop then is not known.
            timer = threading.Timer(ABANDON_S, self._abandon)
            timer.daemon = True
            timer.start()
            return
        log.warning("stopped before it served")
        self.starting.cancel()
        for one in self.node.nodes.values() if self.node is not None else ():
            if (process := one.process) is not None:
                # A thread waits for what it says, and is not cancelled.
                process.terminate()

    def starts(self, node: LocalCluster) -> None:
        """Take note of a node that is started."""
        self.node = node

    def serves(self) -> None:
        """Take note that clients are served: their streams end in order from now on."""
        self.serving = True

    def end(self) -> None:
        """Take note that no connection is left."""
        self.ended = True

    def _abandon(self) -> None:
        """Stop the node in order, and go: the connections did not end."""
        if self.ended:
            return
        log.warning("a client that reads nothing is cut")
        if self.node is not None:
            self.node.stop()
        os._exit(0)


def check_free(flags: Flags) -> None:
    """Raise `ClusterFailed` when a client URL can't be listened at: before anything is started for it."""
    for url in flags.client_urls:
        host, port = place_of(url)
        try:
            probe_listening(host, port)
        except OSError as error:
            raise ClusterFailed(f"--listen-client-urls {url}: {error.strerror}") from None


@contextmanager
def own_directory(flags: Flags) -> Iterator[Path]:
    """Make --data-dir and lock it until the end, so that a second `logyard etcd` is refused at once and does not write
    over the node.toml of the first one's node. Raises `ClusterFailed`."""
    directory = Path(flags.data_dir).resolve()
    try:
        if any((directory / name).is_dir() for name in ("meta", "wal")):
            raise ClusterFailed(
                f"--data-dir {flags.data_dir} is the data directory of a node (it has meta or wal): serve it with "
                "`logyard serve`, or give another directory"
            )
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = lock_directory(str(directory), 0)
    except DirectoryInUse as error:
        raise ClusterFailed(f"--data-dir {error.message}") from None
    except OSError as error:
        raise ClusterFailed(f"--data-dir {flags.data_dir}: {error.strerror}") from None
    try:
        yield directory
    finally:
        os.close(lock)


def node_of(flags: Flags, directory: Path) -> LocalCluster:
    """Return this node, its configuration written from the flags. The native ports of one without peers are any free
    ones."""
    names = flags.names
    nodes: list[LocalNode] = []
    for number, name in enumerate(names, 1):
        if flags.cluster:
            peer = flags.peer_url if name == flags.name else flags.cluster[name]
            client, place = str(native_place(flags.cluster[name])), str(place_of(peer))
        else:
            client, place = (f"127.0.0.1:{port}" for port in free_ports(2))
        nodes.append(LocalNode(number, directory, client, place))
    mine = nodes[names.index(flags.name)]
    token = re.sub(r"[^A-Za-z0-9._-]", "_", flags.token)[:100] or "etcd"
    if token != flags.token:
        token += f"-{number_of(flags.token):x}"
    secret = peer_secret(flags) if len(nodes) > 1 else None
    try:
        mine.config_path.write_text(format_config(mine, nodes, token, flags.limits, secret=secret), encoding="utf-8")
    except OSError as error:
        raise ClusterFailed(f"--data-dir: {mine.config_path}: {error.strerror}") from None
    found = LocalCluster(directory, 1)
    found.nodes = {mine.node_id: mine}
    return found


def peer_secret(flags: Flags) -> Path:
    """Return the file by which the nodes of a cluster know each other: all are on this machine, and usually one
    user's."""
    if flags.peer_secret_file:
        return Path(flags.peer_secret_file).resolve()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        path = Path(state).expanduser() / "logyard" / "etcd-peer.secret"
        make_secret(path)
    except (OSError, RuntimeError) as error:
        raise BadRequest(f"no place for the secret that the nodes share ({error}): --peer-secret-file FILE") from None
    return path


async def start_node(node: LocalCluster) -> None:
    """Start it; if the one that ran here before is about to stop, wait for that."""
    deadline = trio.current_time() + TAKE_OVER_S
    (number,) = node.nodes
    told = False
    while True:
        # At once and on the loop: what is started has to be known, or nobody stops it.
        node.spawn(number)
        try:
            await trio.to_thread.run_sync(node.wait_ready, number)
            return
        except ClusterFailed as error:
            await trio.lowlevel.checkpoint_if_cancelled()
            if "in use by" not in str(error) or trio.current_time() > deadline:
                raise
            if not told:
                log.warning("%s: waiting up to %g s for its end", str(error).splitlines()[-1], TAKE_OVER_S)
                told = True
        await trio.sleep(WATCH_S)


async def _run(flags: Flags) -> None:
    stop = Stop()
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, stop)
        with stop.starting:
            await _start(flags, stop)
        nursery.cancel_scope.cancel()


async def _start(flags: Flags, stop: Stop) -> None:
    log.warning("every user of this machine is trusted: the gateway asks for no certificate")
    check_free(flags)
    if flags.servers:
        await _serve(flags, flags.servers, stop)
        return
    with own_directory(flags) as directory, node_of(flags, directory) as node:
        stop.starts(node)
        await start_node(node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_node, node)
            await _serve(flags, node.addresses, stop)
            nursery.cancel_scope.cancel()


async def _watch_node(node: LocalCluster) -> None:
    while True:
        await trio.sleep(WATCH_S)
        for number, code in node.exited().items():
            raise ClusterFailed(f"the node ended with code {code}:\n{node.nodes[number].log_tail()}")


async def _tell_waiting(servers: Sequence[str], connected: trio.Event) -> None:
    wait = TELL_S
    while True:
        with trio.move_on_after(wait):
            await connected.wait()
            return
        log.warning("none of --servers %s answers yet", ",".join(servers))
        wait = TELL_AGAIN_S


async def _serve(flags: Flags, servers: Sequence[str], stop: Stop) -> None:
    number = next(iter(stop.node.nodes)) if stop.node is not None else 0
    connected = trio.Event()
    async with trio.open_nursery() as waiting:
        if flags.servers:
            waiting.start_soon(_tell_waiting, servers, connected)
        async with connect(servers) as yard, trio.open_nursery() as nursery:
            connected.set()
            named = tuple([Member(name, (flags.cluster[name],)) for name in flags.names]) if flags.cluster else ()
            limits = Limits(
                flags.request_bytes, flags.txn_operations, flags.progress_s, flags.lease_s_min, flags.request_s
            )
            gateway = Gateway(
                yard.kv(flags.group), yard.kv(MEMBERS), name=flags.name, token=flags.token, by_token=flags.token_given,
                node=number, named=named, limits=limits,
                origins=flags.cors, hosts=flags.served_hosts,
            )  # fmt: skip
            # The first name of a new cluster makes them; a cluster that is there, whoever comes first.
            await create_group(yard, flags.group, flags.is_new and number in (0, 1))
            peer = flags.cluster.get(flags.name, flags.peer_url)
            member = Member(flags.name, (peer,) if peer else (), flags.advertised)
            urls = await nursery.start(serve, gateway, flags.binds, member, stop.asked.wait)
            stop.serves()
            if flags.retention:
                nursery.start_soon(keep_compacted, gateway, flags.retention, flags.by_revision)
            log.info("ready to serve client requests")
            print(f"ready url={urls[0]} pid={os.getpid()}", flush=True)
            await gateway.ended.wait()
            stop.end()
            nursery.cancel_scope.cancel()


async def _stop_on_signal(stop: Stop, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(*stop_signals()) as signals:
        task_status.started()
        async for _ in signals:
            stop.ask()
