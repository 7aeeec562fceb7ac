"""A node's configuration: node.toml, then the environment, checked as a whole before anything is started.

Every key has one home, the fields of `NodeConfig` and `engine.config.SystemConfig`; docs/config.md is printed from them
by `python -m logyard.service.config`. Unknown keys are refused with the nearest name. Without the TLS table of its
door, an address must be a loopback address. Read by `service.cli.root` for `logyard serve`; errors are `BadRequest`
naming the key.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from logyard.engine.config import GIB, KIB, MIB, SystemConfig, unknown_key
from logyard.engine.transport.proof import SECRET_BYTES_MIN, Secret
from logyard.protocol.errors import BadRequest
from logyard.protocol.tls import TlsConfig, is_loopback

Address: TypeAlias = tuple[str, int]
"""(host, port); a name is not resolved here."""

_TABLES = ("node", "peers", "clients", "tls", "client_tls", "machines", "limits")
_PREFIXES = {"LOGYARD_NODE_TLS_": "tls", **{f"LOGYARD_{name.upper()}_": name for name in _TABLES if name != "tls"}}
"""Of environment variables, and their tables. LOGYARD_TLS_... is what a client's certificate is given by."""
_TLS_KEYS = ("ca", "certificate", "key")
_PROOFS = ("required", "optional")
_SECRET_BYTES_MAX = 4096
_EVERYWHERE = ("0.0.0.0", "::")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_NODE_ID_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node. `peers` and `clients` map the other nodes' ids to their peer and client addresses, `machines` names to
    "module:Class"."""

    id: int = field(metadata={"meaning": "This node's number, 1 to 4294967295, never reused for another machine."})
    directory: Path = field(
        metadata={"meaning": "Where everything is kept; one process at a time. Relative to the file's own directory."}
    )
    name: str = field(default="", metadata={"meaning": "For people, in `logyard status`; node-ID when absent."})
    cluster: str = field(
        default="logyard", metadata={"meaning": "Peers and directories of another cluster are refused."}
    )
    client_listen: Address = field(
        default=("127.0.0.1", 7001),
        metadata={"meaning": "Where clients connect; port 0 takes a free one, not with `catalog`."},
    )
    client_address: Address | None = field(
        default=None,
        metadata={
            "meaning": "Where clients are sent, where that is not `client_listen`; needed where that is every address "
            "(`0.0.0.0`, `::`)."
        },
    )
    peer_listen: Address = field(
        default=("127.0.0.1", 7101),
        metadata={
            "meaning": "Where the other nodes connect. With `catalog` they are told so; where it is every address, the "
            "host that clients are sent to, with this port."
        },
    )
    metrics_listen: Address | None = field(
        default=None,
        metadata={"meaning": "Where Prometheus scrapes this node ([metrics](metrics.md)); nowhere when absent."},
    )
    peer_secret_file: Path | None = field(
        default=None,
        metadata={
            "meaning": "A secret that all nodes share, by which they know each other without TLS: the same file "
            "on each, readable by its owner alone ([operating](operating.md#the-nodes-secret)). Needed where "
            "`[peers]` are set without `[tls]`."
        },
    )
    peer_secret: str = field(
        default="required",
        metadata={
            "meaning": '`"optional"`: nodes that do not prove to know the secret may join as well, which is for an '
            "upgrade from a release that has none."
        },
    )
    writer_process: bool = field(
        default=True,
        metadata={
            "meaning": "Whether segments and payload migration are written by a process of their own, so that they "
            "take no time of the node's interpreter; otherwise by threads."
        },
    )
    catalog: bool = field(
        default=False,
        metadata={
            "meaning": "Whether this node takes part in the cluster's [catalogue](guides/cluster.md): set it on all "
            "nodes. Names of logs are then the cluster's, and creations and deletions need a majority of the "
            "catalogue's voters."
        },
    )
    peers: Mapping[int, Address] = field(default_factory=dict)
    clients: Mapping[int, Address] = field(default_factory=dict)
    tls: TlsConfig | None = None
    client_tls: TlsConfig | None = None
    machines: Mapping[str, str] = field(default_factory=dict)
    limits: SystemConfig = field(default_factory=SystemConfig)
    joined: int = 0
    """The number of a directory that became a node by joining; not a key."""
    zone: str = ""
    """Where it stands, by the command that starts it; not a key. Nothing: it does not say."""

    def __post_init__(self) -> None:
        if not 1 <= self.id <= _NODE_ID_MAX:
            raise BadRequest(f"node.id = {self.id}: must be between 1 and {_NODE_ID_MAX}", key="node.id")
        if not self.name:
            object.__setattr__(self, "name", f"node-{self.id}")
        for key in ("name", "cluster"):
            value = getattr(self, key)
            if not _NAME.fullmatch(value):
                raise BadRequest(
                    f'node.{key} = "{value}": must be 1 to 128 letters, digits, dots, dashes or underscores',
                    key=f"node.{key}",
                )
        for table in ("peers", "clients"):
            for node, address in getattr(self, table).items():
                key = f"{table}.{node}"
                if not 1 <= node <= _NODE_ID_MAX:
                    raise BadRequest(f"{key}: a node's number is between 1 and {_NODE_ID_MAX}", key=key)
                if node == self.id and table == "peers":
                    raise BadRequest(f"{key}: node {node} is this node; name only the others", key=key)
                self._require_safe(key, address, self._door(table))
        self._require_safe("node.client_listen", self.client_listen, "client_tls")
        if self.client_address is not None:
            self._require_safe("node.client_address", self.client_address, "client_tls")
        self._require_safe("node.peer_listen", self.peer_listen, "tls")
        if self.metrics_listen is not None and not is_loopback(self.metrics_listen[0]):
            key, host = "node.metrics_listen", self.metrics_listen[0]
            raise BadRequest(
                f"{key}: {host} is not a loopback address; metrics are plain HTTP, for this machine", key=key
            )
        told = {"peer_listen": self.peers or self.catalog, "client_listen": self.catalog}
        for name, wanted in told.items():
            if wanted and not getattr(self, name)[1]:
                key = f"node.{name}"
                raise BadRequest(
                    f"{key}: port 0 is any free one, and the other nodes have to know which: name it", key=key
                )
        if self.client_addresses[self.id][0] in _EVERYWHERE:
            key = "node.client_address"
            missing = " is missing" if self.client_address is None else ""
            raise BadRequest(f"{key}{missing}: say where clients find a node that listens on every address", key=key)
        if self.peer_secret not in _PROOFS:
            key = "node.peer_secret"
            raise BadRequest(f'{key} = "{self.peer_secret}": must be one of {", ".join(_PROOFS)}', key=key)
        if self.peers and self.tls is None and self.peer_secret_file is None:
            key = "node.peer_secret_file"
            raise BadRequest(
                f"{key} is missing: without TLS the nodes know each other by a secret. Add peer_secret_file = "
                '"peer.secret" to [node] on every node, with the same file: '
                "(umask 077; head -c 32 /dev/urandom | base64 > peer.secret)",
                key=key,
            )
        strangers = sorted(set(self.clients) - {self.id, *self.peers})
        if strangers:
            raise BadRequest(f"clients.{strangers[0]}: there is no such peer", key=f"clients.{strangers[0]}")

    @staticmethod
    def _door(table: str) -> str:
        return "tls" if table == "peers" else "client_tls"

    def _require_safe(self, key: str, address: Address, door: str) -> None:
        if getattr(self, door) is None and not is_loopback(address[0]):
            raise BadRequest(
                f"{key}: {address[0]} is not a loopback address; that needs TLS: set ca, certificate and "
                f"key in [{door}]",
                key=key,
            )

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes of the cluster, this one included, in order."""
        return tuple(sorted({self.id, *self.peers}))

    @property
    def client_addresses(self) -> dict[int, Address]:
        """Where clients find each node whose client address is known, this one included."""
        return {self.id: self.client_address or self.client_listen, **self.clients}


def load_config(path: Path, environ: Mapping[str, str]) -> NodeConfig:
    """Read node.toml and lay the environment over it. Raises `BadRequest`, which names the file and the key."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadRequest(f"{path}: can't read the configuration: {reason}", path=str(path)) from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path}: not valid TOML: {error}", path=str(path)) from error
    try:
        return build_config(tables, environ, path.parent)
    except BadRequest as error:
        raise BadRequest.told(f"{path}: {error}", {**error.details, "path": str(path)}) from error


def build_config(tables: Mapping[str, object], environ: Mapping[str, str], root: Path) -> NodeConfig:
    """Check and combine parsed tables and the environment; a relative directory counts from `root`."""
    merged: dict[str, dict[str, object]] = {name: {} for name in _TABLES}
    for name, table in tables.items():
        if name not in merged:
            raise unknown_key(f"[{name}]", [f"[{known}]" for known in _TABLES])
        if not isinstance(table, dict):
            raise BadRequest(f"{name}: must be a table, [{name}]", key=name)
        merged[name].update(table)
    for variable, text in environ.items():
        place = _place_of(variable)
        if place is not None:
            merged[place[0]][place[1]] = text

    values: dict[str, Any] = {}
    known = _node_keys()
    for key, value in merged["node"].items():
        if key not in known:
            raise unknown_key(key, known, "[node]")
        values[key] = _node_value(key, value, root)
    for key in known:
        if key not in values and _required(key):
            raise BadRequest(
                f"node.{key} is missing: set it in [node] or as LOGYARD_NODE_{key.upper()}", key=f"node.{key}"
            )
    for name in ("peers", "clients"):
        values[name] = {
            _node_number(name, key): _address(f"{name}.{key}", value) for key, value in merged[name].items()
        }
    for name in ("tls", "client_tls"):
        values[name] = _tls(name, merged[name], root) if merged[name] else None
    values["machines"] = {name: _machine(name, place) for name, place in merged["machines"].items()}
    values["limits"] = SystemConfig.from_mapping(merged["limits"])
    return NodeConfig(**values)


def _node_keys() -> list[str]:
    return [entry.name for entry in fields(NodeConfig) if "meaning" in entry.metadata]


def _required(key: str) -> bool:
    return any(entry.name == key and entry.default is MISSING for entry in fields(NodeConfig))


def _place_of(variable: str) -> tuple[str, str] | None:
    """Return ("limits", "tick_ms") for LOGYARD_LIMITS_TICK_MS. Other LOGYARD_ variables (the client's, say) are not
    ours."""
    for prefix, table in _PREFIXES.items():
        if variable.startswith(prefix):
            return table, variable.removeprefix(prefix).lower()
    return None


def _node_value(key: str, value: object, root: Path) -> object:
    if key == "id":
        return _node_number("node.id", value)
    if key in ("writer_process", "catalog"):
        return _switch(key, value)
    if not isinstance(value, str):
        raise BadRequest(f"node.{key} = {value!r}: must be text in quotes", key=f"node.{key}")
    if key.endswith("_listen"):
        return _address(f"node.{key}", value, listen=True)
    if key == "client_address":
        return _address(f"node.{key}", value)
    if key in ("directory", "peer_secret_file"):
        if not value:
            what = "directory" if key == "directory" else "file"
            raise BadRequest(f'node.{key} = "": must name a {what}', key=f"node.{key}")
        return _path(f"node.{key}", value, root)
    return value


def read_secret(config: NodeConfig) -> Secret | None:
    """Return what the nodes share where they do not speak TLS. Raises `BadRequest` for a file that others may read, or
    that holds no secret."""
    path = config.peer_secret_file
    if path is None or config.tls is not None:
        return None
    key = "node.peer_secret_file"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise BadRequest(f"{key}: can't read {path}: {error.strerror}", key=key) from None
    if mode & 0o077:
        raise BadRequest(f"{key}: {path} may be read by others than its owner: chmod 600 {path}", key=key)
    if not SECRET_BYTES_MIN <= len(text) <= _SECRET_BYTES_MAX:
        raise BadRequest(f"{key}: {path} has {len(text)} bytes; a secret has {SECRET_BYTES_MIN} at least", key=key)
    return Secret(text, config.peer_secret == "required")


def make_secret(path: Path) -> None:
    """Write a new secret for the nodes of a cluster, readable by its owner alone; one that is there stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        # Whole or not at all, also where several nodes make it at once.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)


def _path(key: str, value: str, root: Path) -> Path:
    """Return a path, relative to `root`; ``~`` is a home."""
    try:
        return root / Path(value).expanduser()
    except RuntimeError as error:
        raise BadRequest(f"{key} = {value!r}: there is no such home directory", key=key) from error


def _switch(key: str, value: object) -> bool:
    """Return true or false; as text where it comes from the environment."""
    known = {"true": True, "false": False, True: True, False: False}
    if not isinstance(value, str | bool) or value not in known:
        raise BadRequest(f"node.{key} = {value!r}: must be true or false", key=f"node.{key}")
    return known[value]


def _node_number(where: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise BadRequest(f"{where}: {value!r} is not a node's number", key=where)


def _address(key: str, value: object, *, listen: bool = False) -> Address:
    """Split "host:port" or "[ipv6]:port"; only a listener may ask for port 0."""
    wrong = BadRequest(f'{key} = {value!r}: must be "host:port", for instance "127.0.0.1:7001"', key=key)
    if not isinstance(value, str):
        raise wrong
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise wrong
    if not host or not colon or not (port.isascii() and port.isdigit()):
        raise wrong
    number = int(port)
    if not (0 if listen else 1) <= number <= 65_535:
        raise BadRequest(f'{key} = "{value}": a port is between 1 and 65535', key=key)
    return host, number


def _tls(table: str, given: Mapping[str, object], root: Path) -> TlsConfig:
    """Return one door's three files; all or none of them."""
    for key, value in given.items():
        if key not in _TLS_KEYS:
            raise unknown_key(key, list(_TLS_KEYS), f"[{table}]")
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{table}.{key} = {value!r}: must name a file", key=f"{table}.{key}")
    missing = [key for key in _TLS_KEYS if key not in given]
    if missing:
        raise BadRequest(
            f"{table}.{missing[0]} is missing: ca, certificate and key go together", key=f"{table}.{missing[0]}"
        )
    return TlsConfig(**{key: _path(f"{table}.{key}", str(given[key]), root) for key in _TLS_KEYS})


def _machine(name: str, place: object) -> str:
    key = f"machines.{name}"
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{key}: a name is 1 to 128 letters, digits, dots, dashes or underscores", key=key)
    if not isinstance(place, str) or not _PLACE.fullmatch(place):
        raise BadRequest(f'{key} = {place!r}: must be "module:Class"', key=key)
    return place


def config_reference() -> str:
    """Return the text of docs/config.md, from the fields themselves."""
    lines = [
        "# Configuration",
        "",
        "<!-- Printed by `python -m logyard.service.config`; a test compares. Edit the fields, not this file. -->",
        "",
        "A node reads one TOML file, `logyard serve --config node.toml`. Each key can also be given by an",
        "environment variable, which wins over the file: `LOGYARD_` + table + `_` + key, in capitals:",
        "`LOGYARD_NODE_ID=2`, `LOGYARD_PEERS_2=127.0.0.1:7102`, `LOGYARD_LIMITS_WAL_FILE_BYTES=16777216`. An unknown",
        "key, table or variable of these tables is refused. Without TLS all addresses must be loopback addresses.",
        "",
        "```toml",
        *_EXAMPLE.strip().splitlines(),
        "```",
        "",
        "## [node]",
        "",
        "| key | default | meaning |",
        "| --- | --- | --- |",
    ]
    for entry in fields(NodeConfig):
        if "meaning" in entry.metadata:
            lines.append(f"| `{entry.name}` | {_shown_default(entry.default)} | {entry.metadata['meaning']} |")
    lines += [
        "",
        "## [peers] and [clients]",
        "",
        "One key for each *other* node, its number in quotes: `[peers]` says where this node dials it, `[clients]`",
        "where clients are sent when that node leads. `[clients]` may name this node too, in place of",
        "`client_address`.",
        "",
        "## [tls] and [client_tls]",
        "",
        "TLS 1.3 with certificates on both sides: `[tls]` for the other nodes, `[client_tls]` for clients. Each has",
        "three keys, all or none, that name PEM files, relative to the file's own directory; both may name the same.",
        "Their variables are `LOGYARD_NODE_TLS_CA` and so on, and `LOGYARD_CLIENT_TLS_CA` and so on. SIGHUP reads the",
        "files again, for new connections ([operating.md](operating.md#tls)).",
        "",
        "| key | meaning |",
        "| --- | --- |",
        "| `ca` | The CA that the other side's certificate must be signed by. |",
        "| `certificate` | This node's, with its chain; it names the cluster and the node. |",
        "| `key` | The key to it, without a password. |",
        "",
        "## [machines]",
        "",
        'Machines of your own by name, each `"module:Class"`; the module must be found by the Python that runs the',
        "node. Every node needs the same ones. A group's arguments become keyword arguments of the class, and a name",
        "is for good ([writing a machine](guides/writing-a-machine.md)). Clients name machines, never modules.",
        "",
        "## [limits]",
        "",
        'Each limit has its unit in its name. Sizes may be written as numbers or as text: `"64 MiB"`. Reaching a limit',
        "makes callers wait or answers `busy`; nothing is dropped silently.",
        "",
        "| key | default | from | to | why |",
        "| --- | --- | --- | --- | --- |",
    ]
    defaults = SystemConfig()
    for entry in fields(SystemConfig):
        numbers: tuple[float, ...] = (getattr(defaults, entry.name), entry.metadata["low"], entry.metadata["high"])
        shown = [_shown(entry.name, number) for number in numbers]
        lines.append(f"| `{entry.name}` | {' | '.join(shown)} | {entry.metadata['reason']} |")
    return "\n".join(lines) + "\n"


_EXAMPLE = """
[node]
id = 1
directory = "data"
cluster = "orders"
client_listen = "127.0.0.1:7001"
peer_listen = "127.0.0.1:7101"
peer_secret_file = "peer.secret"

[peers]
"2" = "127.0.0.1:7102"
"3" = "127.0.0.1:7103"

[clients]
"2" = "127.0.0.1:7002"
"3" = "127.0.0.1:7003"

[limits]
wal_file_bytes = "64 MiB"
tick_ms = 50
"""


def _shown_default(value: object) -> str:
    if value is MISSING:
        return "required"
    if isinstance(value, tuple):
        return f'`"{value[0]}:{value[1]}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if value else ""


def _shown(name: str, value: float) -> str:
    if "_bytes" in name and isinstance(value, int):
        for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
            if value and value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    sys.stdout.write(config_reference())
