"""etcd's command line and environment, as far as they mean something here.

Flags are read as etcd reads them: ``--flag=value``, ``--flag value``, one dash or two, and ``ETCD_FLAG`` in the
environment, which a flag overrides. What is known to etcd but means nothing here, and what nobody knows, becomes a
warning. Used by `launcher`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from logyard.protocol.errors import BadRequest
from logyard.protocol.tls import is_loopback

NATIVE_OFFSET = 1000
"""A node's own client port, counted from its peer port: the other nodes' gateways know it by that."""
LEVELS = ("debug", "info", "warn", "error", "dpanic", "panic", "fatal")
OURS = frozenset({
    "name", "data-dir", "listen-client-urls", "advertise-client-urls", "listen-peer-urls",
    "initial-advertise-peer-urls", "initial-cluster", "initial-cluster-state", "initial-cluster-token",
    "auto-compaction-mode", "auto-compaction-retention", "max-txn-ops", "max-request-bytes",
    "watch-progress-notify-interval", "experimental-watch-progress-notify-interval", "snapshot-count",
    "heartbeat-interval", "election-timeout", "log-level", "servers", "group", "cors", "host-whitelist",
    "peer-secret-file",
})  # fmt: skip
SWITCHES = frozenset({
    "force-new-cluster", "enable-v2", "enable-pprof", "strict-reconfig-check", "pre-vote", "client-cert-auth",
    "peer-client-cert-auth", "auto-tls", "peer-auto-tls", "debug", "unsafe-no-fsync", "enable-grpc-gateway",
    "experimental-initial-corrupt-check", "experimental-enable-lease-checkpoint", "socket-reuse-port",
    "socket-reuse-address", "enable-log-rotation", "initial-election-tick-advance",
})  # fmt: skip
"""Flags of etcd that need no value."""
WORDLESS = frozenset({"logger", "log-outputs", "strict-reconfig-check", "enable-grpc-gateway", "pre-vote"})
"""What they ask for is what happens anyway."""
REFUSED = frozenset({
    "config-file", "cert-file", "key-file", "trusted-ca-file", "client-cert-auth", "auto-tls", "peer-cert-file",
    "peer-key-file", "peer-trusted-ca-file", "peer-client-cert-auth", "peer-auto-tls", "discovery", "discovery-srv",
    "force-new-cluster",
})  # fmt: skip
"""To go on without them would be unsafe, or another cluster than the one that is meant."""
PROGRESS_S, PROGRESS_S_MIN = 600.0, 0.1
"""Between two notifications of a quiet watch, as etcd has it: where nothing or 0 is asked for, and at least."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Place(NamedTuple):
    """Host and port of a URL."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What was asked for. `cluster`: peer URL by name, of all nodes; `servers`: a cluster that is there already.
    Compaction is by `retention` seconds or, with `by_revision`, revisions; 0: none."""

    name: str = "default"
    data_dir: str = "default.etcd"
    client_urls: tuple[str, ...] = ("http://127.0.0.1:2379",)
    advertised: tuple[str, ...] = ()
    peer_url: str = ""
    cluster: Mapping[str, str] = field(default_factory=dict)
    is_new: bool = True
    token: str = "etcd-cluster"
    token_given: bool = False
    retention: float = 0.0
    by_revision: bool = False
    txn_operations: int = 128
    request_bytes: int = 1_572_864
    progress_s: float = PROGRESS_S
    lease_s_min: int = 2
    request_s: float = 7.0
    limits: Mapping[str, int] = field(default_factory=dict)
    level: str = "info"
    servers: tuple[str, ...] = ()
    group: str = "etcd"
    peer_secret_file: str = ""
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def served_hosts(self) -> list[str]:
        """Hosts that requests may name: those of the client URLs, and those that were listed."""
        urls = (*self.client_urls, *self.advertised)
        return [*self.hosts, *(urlsplit(url).hostname or "" for url in urls)]

    @property
    def names(self) -> list[str]:
        """Of all nodes; a node's number is its place, from 1 on."""
        return sorted(self.cluster) or [self.name]

    @property
    def binds(self) -> list[str]:
        """Where clients are served."""
        return [str(place_of(url)) for url in self.client_urls]


def parse_flags(arguments: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Return the flags; raise `BadRequest` for what can't be done."""
    given, warnings = _given(arguments, environ)
    refused = sorted(name for name in REFUSED & given.keys() if given[name].lower() not in ("", "false"))
    if refused:
        raise BadRequest(f"--{refused[0]} is not supported by logyard etcd")
    for name in sorted(given.keys() - OURS - WORDLESS - REFUSED):
        known = name in SWITCHES or name in ("quota-backend-bytes", "wal-dir", "max-snapshots", "max-wals")
        warnings.append(f"--{name} {'means nothing here' if known else 'is unknown'} and is ignored")
    name = given.get("name", "default")
    cluster = _cluster(given.get("initial-cluster", ""))
    if cluster and name not in cluster:
        raise BadRequest(f"--initial-cluster does not name --name={name}")
    client_urls = _urls(given, "listen-client-urls", ("http://127.0.0.1:2379",))
    peer_urls = _urls(given, "listen-peer-urls", (cluster[name],) if cluster else ())
    state = given.get("initial-cluster-state", "new")
    if state not in ("new", "existing"):
        raise BadRequest(f"--initial-cluster-state is new or existing, not {state!r}")
    mode = given.get("auto-compaction-mode", "periodic")
    if mode not in ("periodic", "revision"):
        raise BadRequest(f"--auto-compaction-mode is periodic or revision, not {mode!r}")
    level = given.get("log-level", "info")
    if level not in LEVELS:
        raise BadRequest(f"--log-level is one of {', '.join(LEVELS)}, not {level!r}")
    progress = given.get("watch-progress-notify-interval", given.get("experimental-watch-progress-notify-interval"))
    return Flags(
        name=name,
        data_dir=given.get("data-dir") or f"{name}.etcd",
        client_urls=client_urls,
        advertised=tuple(_split(given.get("advertise-client-urls", ""))),
        peer_url=peer_urls[0] if peer_urls else "",
        cluster=cluster,
        is_new=state == "new",
        token=given.get("initial-cluster-token", "etcd-cluster"),
        token_given="initial-cluster-token" in given,
        retention=_retention(mode, given.get("auto-compaction-retention", "0")),
        by_revision=mode == "revision",
        txn_operations=_number(given, "max-txn-ops", 128),
        request_bytes=_number(given, "max-request-bytes", 1_572_864),
        progress_s=max(PROGRESS_S_MIN, _seconds("watch-progress-notify-interval", progress or "0s") or PROGRESS_S),
        lease_s_min=_lease_s_min(given),
        # As etcd has it.
        request_s=5 + 2 * _number(given, "election-timeout", 1000) / 1000,
        limits=_limits(given),
        level=level,
        servers=tuple(_split(given.get("servers", ""))),
        group=given.get("group", "etcd"),
        peer_secret_file=given.get("peer-secret-file", ""),
        cors=tuple([origin.rstrip("/") for origin in _split(given.get("cors", ""))]),
        hosts=tuple(_split(given.get("host-whitelist", ""))),
        warnings=tuple(warnings),
    )


def _given(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return values by flag, the environment's and then the command line's; and warnings."""
    given: dict[str, str] = {}
    for variable, value in environ.items():
        if variable.startswith("ETCD_") and value:
            given[variable[5:].lower().replace("_", "-")] = value
    warnings: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            warnings.append(f"{word!r} is no flag and is ignored")
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            if name in SWITCHES:
                value = "true"
            elif waiting and not waiting[0].startswith("-"):
                value = waiting.pop(0)
            elif name in OURS:
                raise BadRequest(f"--{name} needs a value")
        given[name] = value
    # An empty value is none: that is how scripts pass what they do not set.
    return {name: value for name, value in given.items() if value}, warnings


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _urls(given: Mapping[str, str], name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(_split(given.get(name, ""))) or default
    for url in found:
        try:
            place_of(url)
        except BadRequest as error:
            raise BadRequest(f"--{name}: {error}") from None
    return found


def place_of(url: str) -> Place:
    """Return where a URL says to listen. Raises `BadRequest` unless it is plain HTTP on this machine's loopback."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.path not in ("", "/"):
        raise BadRequest(f"{url!r} is no URL like http://127.0.0.1:2379")
    if parts.scheme != "http":
        raise BadRequest(f"{url}: only http is served")
    host = "127.0.0.1" if host == "localhost" else host
    if not is_loopback(host):
        raise BadRequest(f"{url}: without TLS, clients and peers are served on a loopback address only")
    return Place(host, port)


def native_place(peer_url: str) -> Place:
    """Return where the node of a cluster behind a peer URL serves logyard's own clients."""
    host, port = place_of(peer_url)
    return Place(host, port + NATIVE_OFFSET if port + NATIVE_OFFSET < 65536 else port - NATIVE_OFFSET)


def _cluster(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _split(text):
        name, equals, url = part.partition("=")
        if not equals or not name:
            raise BadRequest("--initial-cluster is NAME=URL,NAME=URL")
        place_of(url)
        if name in found:
            raise BadRequest(f"--initial-cluster names {name} twice: one peer URL a node")
        found[name] = url
    return found


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not 0 < int(text) < 1 << 40:
        raise BadRequest(f"--{name} is a positive number, not {text!r}")
    return int(text)


def _lease_s_min(given: Mapping[str, str]) -> int:
    """Return what etcd has: one and a half election timeouts, in whole heartbeats, then in whole seconds."""
    heartbeat = _number(given, "heartbeat-interval", 100)
    heartbeats = _number(given, "election-timeout", 1000) // heartbeat
    return max(1, math.ceil(3 * heartbeats // 2 * heartbeat / 1000))


def _seconds(name: str, text: str) -> float:
    parts = _DURATION.findall(text)
    if "".join("".join(part) for part in parts) != text:
        raise BadRequest(f"--{name} is a duration like 10m or 1h30m, not {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _retention(mode: str, text: str) -> float:
    """Return seconds (a plain number means hours) or revisions."""
    if text.isdecimal():
        return float(text) if mode == "revision" else 3600.0 * int(text)
    if mode == "revision":
        raise BadRequest(f"--auto-compaction-retention is a number of revisions, not {text!r}")
    return _seconds("auto-compaction-retention", text)


def _limits(given: Mapping[str, str]) -> dict[str, int]:
    """Return the node's limits that flags ask for, as near as they may be."""
    found: dict[str, int] = {}
    if "snapshot-count" in given:
        found["snapshot_entries"] = max(16, _number(given, "snapshot-count", 0))
    if "heartbeat-interval" in given or "election-timeout" in given:
        interval = min(10_000, max(10, _number(given, "heartbeat-interval", 100)))
        timeout = min(600_000, _number(given, "election-timeout", 1000))
        found |= {"liveness_interval_ms": interval, "liveness_timeout_ms": max(50, 3 * interval, timeout)}
    return found
