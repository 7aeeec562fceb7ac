"""How an empty directory becomes a node: by an invitation, from a node that is in the cluster already.

What it became stands in a file of its directory (`places.joined`), written and synced before the first start, so that
the next start is that node whatever its command says. The directory's number is drawn and synced before it is told, so
a join that was cut off is the same one when it is tried again. Called by `daemon`. BLOCKING.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from logyard.engine.disk.door import Disk
from logyard.protocol.errors import BadRequest, Refused
from logyard.protocol.wire import JOINS

from ..config import Address, NodeConfig, load_config
from .places import address, joined

PLACEHOLDER = {"LOGYARD_NODE_ID": str(2**32 - 1)}
"""Until the cluster has given a number: no node of the file's [peers] has this one."""


class Invitation(NamedTuple):
    """Whom to ask ("host:port", a client address), and with what; `replaces`: whose members to take, or 0."""

    server: str
    token: str = ""
    replaces: int = 0
    zone: str = "-"


def has_number(path: Path, environ: Mapping[str, str]) -> bool:
    """Return whether a configuration says which node it is of."""
    try:
        table = tomllib.loads(path.read_text("utf-8")).get("node", {})
    except (OSError, ValueError):
        return True  # `load_config` says what is wrong with it.
    return "id" in table or "LOGYARD_NODE_ID" in environ


def joined_config(path: Path, environ: Mapping[str, str], invitation: Invitation | None) -> NodeConfig:
    """Return the configuration of a node that joins, or has joined. Raises `BadRequest`, `Refused`."""
    config = load_config(path, {**environ, **PLACEHOLDER})
    file = joined(Path(config.directory))
    told = _read(file)
    if not told.get("node"):
        if invitation is None:
            raise BadRequest(
                f"{path}: node.id is missing: set it, or let this directory join with --join", key="node.id"
            )
        told = _join(config, file, told, invitation)
    nodes = [(int(node), peer, client) for node, peer, client in told["nodes"]]
    peers: dict[int, Address] = {node: address(peer) for node, peer, _ in nodes if peer}
    clients: dict[int, Address] = {node: address(client) for node, _, client in nodes if client and node in peers}
    return replace(
        config, id=int(told["node"]), name="", cluster=str(told["cluster"]), catalog=True,
        joined=int(told["directory"]), peers={**peers, **config.peers}, clients={**clients, **config.clients},
    )  # fmt: skip


def said(config: NodeConfig) -> dict[str, Any]:
    """Return what a node says of where it is: its addresses, as others reach it, and its zone."""
    client = config.client_addresses[config.id]
    host, port = config.peer_listen
    if host in ("0.0.0.0", "::"):
        host = client[0]
    found: dict[str, Any] = {"peer": f"{host}:{port}", "client": f"{client[0]}:{client[1]}"}
    if config.zone:
        found["zone"] = config.zone
    return {**found, "directory": config.joined} if config.joined else found


def _join(config: NodeConfig, file: Path, told: Mapping[str, Any], invitation: Invitation) -> dict[str, Any]:
    from logyard.client.sync import Yard

    if (Path(config.directory) / "meta").exists():
        raise Refused(f"{config.directory} is a node's already, and has never joined: --join is for an empty directory")
    number = int(told.get("directory", 0)) or int.from_bytes(os.urandom(7), "little") | 1
    _write(file, {"directory": number})
    places = said(config)
    # Not `connect_sync`, which asks for the nodes first: who shows a node's certificate may only ask to join.
    with Yard([invitation.server], tls=config.client_tls, features=JOINS) as yard:
        found = yard.join(
            invitation.token.encode(), number, places["peer"], places["client"], invitation.zone, invitation.replaces
        )
    answer = {"directory": number, **found}
    _write(file, answer)
    return answer


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file}: can't be read: {error}") from error
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file, durable on return."""
    disk, fresh = Disk(), f"{file}.new"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk.unlink(fresh)
    disk.write_file(fresh, [json.dumps(content).encode()])
    disk.publish(fresh, str(file))
