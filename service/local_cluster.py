"""A cluster of real node processes on this machine, for development, the demo, the bench and tests.

Every node lives in `directory/node-N`: node.toml, data, log.txt. Ports and ids are written once and used again, so a
directory can be started, killed and started any number of times. Nodes end with this process, also if it is killed:
each holds the reading end of a pipe as its standard input. All calls block; a trio caller uses a thread.
"""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from logyard.protocol.tls import TlsConfig

from .config import make_secret

READY_S = 60.0
STOP_S = 20.0
LOG_TAIL_LINES = 8
COPY_BYTES = 65_536
READY = re.compile(rb"^ready .*\n", re.MULTILINE)
"""The line that says that a node serves."""
NODE_VARIABLES = ("LOGYARD_NODE_", "LOGYARD_PEERS_", "LOGYARD_CLIENTS_", "LOGYARD_CLIENT_TLS_")
CLUSTER = "local"
CLIENT = "local"
"""The name of the client whose certificate a cluster with TLS comes with."""


LOOK_S = 0.5
PORTS, PORTS_TRIED = (10_000, 32_768), 100
"""Where ports are drawn from that nobody named: below those of connections that leave, by Linux's default."""
CRASHED = 70
"""The exit code of a node that met a bug of ours; the other codes say that it must not run."""


class ClusterFailed(Exception):
    """A node did not start or stop as it should; the message ends with the last lines of its log."""


class LocalNode:
    """One node process. `process` is None while it is not running; `pids` lists every process it ever had;
    `log_start` is where the last one's words begin in the log, `followed`: what it prints goes there."""

    __slots__ = ("client_address", "directory", "followed", "log_start", "node_id", "peer_address", "pids", "process")

    def __init__(self, node_id: int, directory: Path, client_address: str, peer_address: str) -> None:
        self.node_id = node_id
        self.directory = directory
        self.client_address = client_address
        self.peer_address = peer_address
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self.log_start = 0
        self.followed = False

    @property
    def config_path(self) -> Path:
        """The node's node.toml."""
        return self.directory / "node.toml"

    @property
    def data(self) -> Path:
        """The node's data directory."""
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        """What the node writes to standard error, and prints, all starts in one file."""
        return self.directory / "log.txt"

    def run(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start its process."""
        assert self.process is None
        with self.log_path.open("ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches only us; we stop the nodes in order.
                env=environment,
            )
        self.pids.append(self.process.pid)

    def follow(self, heard: bytes) -> None:
        """Put what it printed, and all that it prints from now on, into its log: a pipe that nobody reads would hold
        it up."""
        assert self.process is not None and self.process.stdout is not None
        words = self.process.stdout, self.log_path.open("ab", buffering=0), heard
        threading.Thread(target=copy, args=words, name="logyard-words", daemon=True).start()
        self.followed = True

    def forget(self) -> None:
        """Close our ends of an ended process's pipes; the one that is followed is closed at its end."""
        assert self.process is not None
        for stream in (self.process.stdin, None if self.followed else self.process.stdout):
            if stream is not None:
                stream.close()
        self.process, self.followed = None, False

    def log_tail(self) -> str:
        """Return the last lines of the last start in the log, for an error message."""
        if not self.log_path.exists():
            return "(no log)"
        with self.log_path.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(empty log)"


def copy(stream: IO[bytes], log: IO[bytes], heard: bytes) -> None:
    """Write what was heard, and the rest of a pipe, to a log; close both at its end."""
    with stream, log:
        while True:
            # On a full disk its words are lost; it goes on.
            with suppress(OSError):
                log.write(heard)
            heard = os.read(stream.fileno(), COPY_BYTES)
            if not heard:
                return


def probe_listening(host: str, port: int) -> None:
    """Raise `OSError` when nothing can be served at an address now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Return loopback ports that are free now: consecutive from `first`, or any. Those are not of the kernel's range
    for connections that leave: between this and a node that listens, one of these may take it."""
    sockets = []
    try:
        for number in range(count):
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(probe)
            try:
                if first:
                    # A node that ended a moment ago leaves connections behind, which are in nobody's way.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", first + number))
                else:
                    _bind_any(probe)
            except OSError as error:
                port = (first or 0) + number
                raise ClusterFailed(f"port {port} is in use: {error.strerror}; choose another with --port") from error
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def _bind_any(probe: socket.socket) -> None:
    """Bind to a drawn port. Not with SO_REUSEADDR: sockets that do not listen yet would share one."""
    draw = random.SystemRandom()
    for _ in range(PORTS_TRIED):
        try:
            probe.bind(("127.0.0.1", draw.randrange(*PORTS)))
            return
        except OSError:
            continue
    probe.bind(("127.0.0.1", 0))


def format_config(
    node: LocalNode,
    nodes: Sequence[LocalNode],
    cluster: str,
    limits: Mapping[str, object],
    tls: TlsConfig | None = None,
    secret: Path | None = None,
    catalog: bool = False,
) -> str:
    """Return the text of a node's node.toml. `tls`: the files of both of its doors; `secret`: what its peers share
    without; `catalog`: it takes part in one, and others may join."""
    others = [other for other in nodes if other is not node]
    lines = [
        "[node]",
        f"id = {node.node_id}",
        f'name = "node-{node.node_id}"',
        f'cluster = "{cluster}"',
        f"directory = {json.dumps(str(node.data))}",
        f'client_listen = "{node.client_address}"',
        f'peer_listen = "{node.peer_address}"',
        *secret_lines(secret if (others or catalog) and tls is None else None),
        *(["catalog = true"] if catalog else []),
        "",
        "[peers]",
        *(f'"{other.node_id}" = "{other.peer_address}"' for other in others),
        "",
        "[clients]",
        *(f'"{other.node_id}" = "{other.client_address}"' for other in others),
        "",
        *(line for table in ("tls", "client_tls") for line in tls_lines(table, tls)),
        "[limits]",
        *(f"{key} = {json.dumps(value)}" for key, value in limits.items()),
    ]
    return "\n".join(lines) + "\n"


def secret_lines(secret: Path | None) -> list[str]:
    """Return the line of [node] that names the file."""
    return [] if secret is None else [f"peer_secret_file = {json.dumps(str(secret))}"]


def tls_files(directory: Path, stem: str) -> TlsConfig:
    """Return where `certificates.issue` puts a holder's files."""
    certificate = directory / f"{stem}.pem"
    return TlsConfig(ca=directory / "ca.pem", certificate=certificate, key=directory / f"{stem}-key.pem")


def tls_lines(table: str, tls: TlsConfig | None) -> list[str]:
    """Return one door's table."""
    if tls is None:
        return []
    return [
        f"[{table}]",
        *(f"{key} = {json.dumps(str(getattr(tls, key)))}" for key in ("ca", "certificate", "key")),
        "",
    ]


class LocalCluster:
    """Nodes 1 to `count` below `directory`. Use as a context manager: leaving it stops every node."""

    def __init__(
        self,
        directory: Path,
        count: int = 3,
        *,
        first_port: int | None = None,
        limits: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        tls: bool = False,
        catalog: bool = False,
    ) -> None:
        assert count >= 1
        self.directory = directory.resolve()
        self.count = count
        self.first_port = first_port
        self.limits = dict(limits or {})
        self.environment = dict(environment or {})
        self.tls = tls
        self.catalog = catalog
        self.nodes: dict[int, LocalNode] = {}
        self.options: dict[int, Sequence[str]] = {}
        """More of a node's command line."""

    @property
    def addresses(self) -> list[str]:
        """Client addresses of all nodes, in order of their ids."""
        return [node.client_address for node in self.nodes.values()]

    @property
    def secret(self) -> Path:
        """What the nodes of a cluster without TLS share."""
        return self.directory / "peer.secret"

    @property
    def client_tls(self) -> TlsConfig | None:
        """The files of a client, for a cluster whose nodes speak TLS."""
        files = tls_files(self.directory / "tls", f"client-{CLIENT}")
        return files if Path(files.certificate).exists() else None

    @property
    def pids(self) -> list[int]:
        """The running processes' ids, in order of node ids."""
        return [node.process.pid for node in self.nodes.values() if node.process]

    def prepare(self) -> None:
        """Write the configurations, or read those that are there."""
        names = [f"node-{number}" for number in range(1, self.count + 1)]
        written = [name for name in names if (self.directory / name / "node.toml").exists()]
        surplus = self.directory / f"node-{self.count + 1}" / "node.toml"
        if (written and len(written) < self.count) or surplus.exists():
            raise ClusterFailed(f"{self.directory} holds a cluster of another size; give its --nodes or another --dir")
        if written:
            for name in names:
                self.read_node(self.directory / name)
            if self.count > 1:
                self.add_secret()
            return
        ports = free_ports(2 * self.count, self.first_port)
        for number in range(1, self.count + 1):
            client, peer = ports[number - 1], ports[self.count + number - 1]
            directory = self.directory / f"node-{number}"
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.nodes[number] = LocalNode(number, directory, f"127.0.0.1:{client}", f"127.0.0.1:{peer}")
        everyone = list(self.nodes.values())
        if self.tls:
            from .certificates import issue

            issue(self.directory / "tls", CLUSTER, self.nodes, [CLIENT])
        for node in everyone:
            files = tls_files(self.directory / "tls", f"node-{node.node_id}") if self.tls else None
            text = format_config(node, everyone, CLUSTER, self.limits, files, self.secret, self.catalog)
            node.config_path.write_text(text, encoding="utf-8")
        if (self.count > 1 or self.catalog) and not self.tls:
            make_secret(self.secret)

    def add_secret(self) -> None:
        """Give the nodes of a directory that a release without secrets wrote one."""
        for node in self.nodes.values():
            text = node.config_path.read_text(encoding="utf-8")
            table = tomllib.loads(text)
            if "tls" not in table and "peer_secret_file" not in table["node"]:
                make_secret(self.secret)
                (line,) = secret_lines(self.secret)
                node.config_path.write_text(text.replace("[node]\n", f"[node]\n{line}\n", 1), encoding="utf-8")

    def read_node(self, directory: Path) -> None:
        """Take a node's id and addresses from its node.toml."""
        try:
            table = tomllib.loads((directory / "node.toml").read_text(encoding="utf-8"))["node"]
            node = LocalNode(int(table["id"]), directory, table["client_listen"], table["peer_listen"])
        except (KeyError, ValueError, OSError) as error:
            raise ClusterFailed(f"{directory / 'node.toml'} is not a configuration of ours: {error}") from error
        self.nodes[node.node_id] = node

    def spawn(self, node_id: int) -> None:
        """Start one node's process without waiting for it."""
        node = self.nodes[node_id]
        command = [sys.executable, "-m", "logyard.service.cli", "serve", "--until-eof"]
        command += ["--config", str(node.config_path), *self.options.get(node_id, ())]
        # Limits may come from our environment; what names one node must not reach three.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(NODE_VARIABLES)}
        node.run(command, {**inherited, **self.environment})

    def wait_ready(self, node_id: int, timeout_s: float = READY_S) -> None:
        """Wait until the node says that it serves; raise `ClusterFailed` if it ends or takes too long."""
        node = self.nodes[node_id]
        process = node.process
        assert process is not None and process.stdout is not None
        deadline = time.monotonic() + timeout_s
        heard = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (ready := READY.search(heard)) is None:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ClusterFailed(f"node {node_id} was not ready after {timeout_s:g} s:\n{node.log_tail()}")
                more = os.read(process.stdout.fileno(), 4096)
                if not more:
                    code = process.wait()
                    node.forget()
                    raise ClusterFailed(f"node {node_id} ended with code {code} at start:\n{node.log_tail()}")
                heard += more
        node.follow(heard[: ready.start()] + heard[ready.end() :])

    def start(self) -> None:
        """Prepare, start all nodes at once and wait for all."""
        if not self.nodes:
            self.prepare()
        # One that runs has said that it is ready, and does not say it again.
        started = [node_id for node_id, node in self.nodes.items() if node.process is None]
        for node_id in started:
            self.spawn(node_id)
        for node_id in started:
            self.wait_ready(node_id)

    def kill9(self, *node_ids: int) -> None:
        """Send SIGKILL: the nodes get no chance to write anything more. All of `node_ids` at once."""
        targets = [self.nodes[node_id] for node_id in node_ids]
        for node in targets:
            assert node.process is not None
            node.process.send_signal(signal.SIGKILL)
        for node in targets:
            assert node.process is not None
            node.process.wait()
            node.forget()

    def restart(self, node_id: int) -> None:
        """Start a node again on its directory, wait until it serves."""
        self.spawn(node_id)
        self.wait_ready(node_id)

    def join(self, node_id: int, token: str, by: str, *more: str) -> None:
        """Start a node on an empty directory that joins by an invitation, asking the node at client address `by`; wait
        until it serves. The cluster must be about to give it this number."""
        client, peer = free_ports(2)
        directory = self.directory / f"node-{node_id}"
        directory.mkdir(exist_ok=True, mode=0o700)
        node = self.nodes[node_id] = LocalNode(node_id, directory, f"127.0.0.1:{client}", f"127.0.0.1:{peer}")
        lines = [
            "[node]", f"directory = {json.dumps(str(node.data))}", f'client_listen = "{node.client_address}"',
            f'peer_listen = "{node.peer_address}"', *secret_lines(None if self.tls else self.secret), "",
        ]  # fmt: skip
        if self.tls:
            from .certificates import issue

            issue(self.directory / "tls", CLUSTER, [node_id], [])
            files = tls_files(self.directory / "tls", f"node-{node_id}")
            lines += [line for table in ("tls", "client_tls") for line in tls_lines(table, files)]
        node.config_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.environment["LOGYARD_TOKEN"] = token
        self.options[node_id] = ("--join", by, *more)
        self.spawn(node_id)
        self.wait_ready(node_id)

    def exited(self) -> dict[int, int]:
        """Return the nodes whose process ended by itself, with the exit code (negative: a signal)."""
        found = {}
        for node_id, node in self.nodes.items():
            if node.process is not None:
                code = node.process.poll()
                if code is not None:
                    found[node_id] = code
        return found

    def stop(self) -> dict[int, int]:
        """Send SIGTERM to all, SIGKILL to those that do not follow within STOP_S; return exit codes by node."""
        return stopped([node for node in self.nodes.values() if node.process is not None])

    def end(self, node_id: int) -> int:
        """Send SIGTERM to one, SIGKILL if it does not follow; return its exit code."""
        return stopped([self.nodes[node_id]])[node_id]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def stopped(running: Sequence[LocalNode]) -> dict[int, int]:
    """End these nodes' processes in order; return exit codes by node."""
    for node in running:
        assert node.process is not None
        node.process.terminate()
    deadline = time.monotonic() + STOP_S
    codes = {}
    for node in running:
        assert node.process is not None
        try:
            codes[node.node_id] = node.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
            codes[node.node_id] = node.process.wait()
        node.forget()
    return codes


class KeptUp:
    """The nodes of a running cluster, seen to: one that ends does not end the others. `restart_after` seconds later
    it starts again (0: never), unless it said that it must not run: a start would say the same.

    `ended`: (node, exit code) of each end, `down`: those that are down, with their last code.
    """

    def __init__(self, cluster: LocalCluster, restart_after: float, say: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.ended: list[tuple[int, int]] = []
        self.down: dict[int, int] = {}
        self._restart_after = restart_after
        self._say = say
        self._due: dict[int, float] = {}

    @property
    def all_down(self) -> bool:
        """Whether nothing runs, and nothing will."""
        return len(self.down) == len(self.cluster.nodes) and not self._due

    def look(self) -> bool:
        """See who ended, start who is due; False when all are down for good."""
        now = time.monotonic()
        for node_id, code in self.cluster.exited().items():
            self._ended(node_id, code, now)
        for node_id in [node_id for node_id, due in self._due.items() if due <= now]:
            del self._due[node_id]
            try:
                self.cluster.restart(node_id)
            except ClusterFailed as error:
                self._say(str(error))
                if self.cluster.nodes[node_id].process is None:
                    self._say(f"node {node_id} stays down")
                    continue
            del self.down[node_id]
            process = self.cluster.nodes[node_id].process
            self._say(f"node {node_id} runs again, pid {process.pid if process is not None else 0}")
        return not self.all_down

    def _ended(self, node_id: int, code: int, now: float) -> None:
        node = self.cluster.nodes[node_id]
        node.forget()
        self.ended.append((node_id, code))
        self.down[node_id] = code
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        if self._restart_after and (code < 0 or code == CRASHED):
            self._due[node_id] = now + self._restart_after
            then = f"it starts again in {self._restart_after:g} s"
        else:
            then = f"it stays down; start it with: logyard serve --config {node.config_path}"
        self._say(f"node {node_id} {how}; {then} (its log: {node.log_path})")
