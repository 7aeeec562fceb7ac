"""The rest of the gateway: members, maintenance, version, health. Used by `app`.

Each gateway writes what it is reached by into a group of its own (`MEMBERS`), so that every one knows all; nothing of
that is in the revisions of the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from logyard.client import kv_requests
from logyard.client.kv import KV
from logyard.protocol.kv import KeyValue

from .gateway import Gateway, Member, number_of
from .leases import revision_of
from .words import NO_LEADER, UNIMPLEMENTED, GatewayError, Message, Schema, choice, flag, string

SERVER_VERSION = "3.5.16"
"""The etcd whose paths and answers these are; clients choose their path by it."""
CLUSTER_VERSION = "3.5.0"
MEMBERS = "etcd-members"

NOTHING = Schema()
MEMBER_LIST = Schema(linearizable=flag)
ALARM = Schema(action=choice("GET", "ACTIVATE", "DEACTIVATE"))
AUTHENTICATE = Schema(name=string, password=string)


async def announce(kv: KV, member: Member) -> None:
    """Let the others know, unless they do."""
    said = json.dumps([member.peer_urls, member.client_urls]).encode()
    found = await kv.get(member.name.encode())
    if found is None or found.value != said:
        await kv.put(member.name.encode(), said)


async def known(kv: KV, consistency: str, node: int | None) -> list[Member]:
    """Return all that have announced themselves, in order of their names."""
    return [_member(one) for one in (await kv.range(prefix=True, consistency=consistency, node=node)).kvs]


def _member(one: KeyValue) -> Member:
    peers, clients = json.loads(one.value)
    return Member(one.key.decode(), tuple(peers), tuple(clients))


async def member_list(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Return every member, as it has announced itself, and those that the command line names."""
    consistency, node = ("linearizable", None) if asked.flag("linearizable") else await gateway.reach()
    # For the term of the header.
    await revision_of(gateway, consistency, node)
    found = {one.name: one for one in gateway.named}
    for one in await known(gateway.members, consistency, node):
        if not found.get(one.name, Member("")).client_urls:
            found[one.name] = one
    rows: list[dict[str, Any]] = []
    for name in sorted(found):
        one = found[name]
        row: dict[str, Any] = {"ID": str(number_of(gateway.token, name)), "name": name}
        lists: Mapping[str, Sequence[str]] = {"peerURLs": one.peer_urls, "clientURLs": one.client_urls}
        rows.append(row | {key: list(urls) for key, urls in lists.items() if urls})
    return {"header": gateway.header.at(0), "members": rows}


async def status(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Return size, leader and log of the group below; without a quorum, as the node beside this gateway sees them."""
    consistency, node = await gateway.reach()
    numbers = await gateway.run(kv_requests.status(), consistency=consistency, node=node)
    found = await gateway.describe(node)
    index, applied, leader = found.get("last", 0), found.get("applied", 0), found.get("leader", 0)
    size = str(numbers["history_bytes"])
    fields = {
        "dbSize": size, "leader": str(gateway.id_of(leader)) if leader else "", "raftIndex": str(index or ""),
        "raftTerm": str(gateway.header.term or ""), "raftAppliedIndex": str(applied or ""), "dbSizeInUse": size,
    }  # fmt: skip
    kept: dict[str, Any] = {name: value for name, value in fields.items() if value not in ("", "0")}
    if not leader:
        kept["errors"] = [NO_LEADER]
    return {"header": gateway.header.at(numbers["revision"]), "version": SERVER_VERSION, **kept}


async def alarm(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Return no alarm: a full disk says so with every write, and nothing has to be lifted afterwards."""
    if asked.number("action") == 1:
        raise GatewayError(UNIMPLEMENTED, "logyard: alarms are not set by hand")
    return {"header": gateway.header.at(await revision_of(gateway, *await gateway.reach()))}


async def defragment(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Rewrite what is mostly dead, on every node."""
    await gateway.kv.yard.compact()
    return {"header": gateway.header.at(await revision_of(gateway))}


async def auth_status(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Answer that it was never enabled."""
    return {"header": gateway.header.at(await revision_of(gateway)), "authRevision": "1"}


async def not_enabled(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Answer who asks for a token as etcd does on a server without users."""
    raise GatewayError(9, "etcdserver: authentication is not enabled")
