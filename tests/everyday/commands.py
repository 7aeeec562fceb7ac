"""The part of the matrix that has no methods: the commands of the command line, and the paths of the gateway.

The call of a command's row gives its words and its standard input, that of a path's row the fields of its request.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from logyard.machines.log.command import APPEND

from .table import BAD, NO_LEASE, Row, either, kv, log, own, queue, topic


def text(data: bytes) -> str:
    """Bytes as the gateway takes them."""
    return b64encode(data).decode()


def words(*some: object, stdin: bytes | None = None) -> tuple[list[str], bytes | None]:
    """Of a command."""
    return [str(one) for one in some], stdin


TXN: bytes = b'{"compare": [["key", "version", ">", 0]], "then": [["put", "key", "v"]], "else": []}'
UNKNOWN_LEASE: Any = {"largest": NO_LEASE, "empty": NO_LEASE}


def no_catalog(*given: object) -> Row:
    """Of a command about a catalogue, which these clusters have not: tests/service/catalog has those that do."""
    return either(lambda f: words(*given), usual="refused", largest="refused", empty="refused")


COMMANDS: Mapping[str, Row] = {
    "append": log(lambda f: words(f.name_of("log"), "--whole", stdin=f.body), writes=True),
    "read": log(lambda f: words(f.name_of("log"), "--count", 3)),
    "retain": log(lambda f: words(f.name_of("log"), "--records", max(1, f.count))),
    "create": either(lambda f: words(f.fresh())),
    "list": either(lambda f: words()),
    "describe": either(lambda f: words(f.name_of("log"))),
    "leaders": either(lambda f: words(f.name_of("log"))),
    "members show": either(lambda f: words(f.name_of("log"))),
    "status": either(lambda f: words()),
    "scrub": either(lambda f: words()),
    "snapshot": either(lambda f: words(f.name_of("log"))),
    "compact": either(lambda f: words()),
    "transfer": either(lambda f: words(f.name_of("log"), "--to", f.follower())),
    "campaign": either(lambda f: words(f.name_of("log"), "--node", 1, "--wait", 0), usual="failed"),
    "kv create": either(lambda f: words(f.fresh())),
    "kv put": kv(lambda f: words(f.name_of("kv"), f.key.decode(), f.small.decode()), writes=True, empty=BAD),
    "kv get": kv(lambda f: words(f.name_of("kv"), f.key.decode()), empty=BAD),
    "kv txn": kv(lambda f: words(f.name_of("kv"), stdin=TXN), writes=True),
    "kv watch": kv(lambda f: words(f.name_of("kv"), "key", "--from", 1, "--count", 1)),
    "kv lease grant": kv(lambda f: words(f.name_of("kv"), f.seconds or 1), writes=True),
    "kv lease keepalive": kv(
        lambda f: words(f.name_of("kv"), f.lease or 1), writes=True, largest=NO_LEASE, empty=NO_LEASE
    ),
    "kv lease ttl": kv(lambda f: words(f.name_of("kv"), f.lease or 1), **UNKNOWN_LEASE),
    "kv lease list": kv(lambda f: words(f.name_of("kv"))),
    "kv lease revoke": kv(
        lambda f: words(f.name_of("kv"), f.lease or 1), writes=True, largest=NO_LEASE, empty=NO_LEASE
    ),
    "kv status": kv(lambda f: words(f.name_of("kv"))),
    "kv del": kv(lambda f: words(f.name_of("kv"), f.key.decode()), writes=True, empty=BAD),
    "kv compact": kv(lambda f: words(f.name_of("kv"), max(1, f.revision)), writes=True, largest="future_revision"),
    "queue create": either(lambda f: words(f.fresh())),
    "queue publish": queue(lambda f: words(f.name_of("queue"), "--whole", stdin=f.body), writes=True),
    "queue consume": queue(lambda f: words(f.name_of("queue"), "--count", 1), writes=True),
    "queue stats": queue(lambda f: words(f.name_of("queue"))),
    "queue purge": queue(lambda f: words(f.name_of("queue"), "--yes"), writes=True),
    "topic create": topic(lambda f: words(f.topic_name, "--partitions", 2)),
    "topic send": topic(lambda f: words(f.topic_name, "--key", "k", stdin=b"line\n"), full="unknown_topic"),
    "topic list": either(lambda f: words()),
    "topic describe": topic(lambda f: words(f.topic_name), full="unknown_topic"),
    "topic alter": topic(lambda f: words(f.topic_name, "--partitions", 3), full="unknown_topic"),
    "consume": topic(lambda f: words(f.topic_name, "--group", f.name, "--count", 1), full="unknown_topic"),
    "groups list": either(lambda f: words()),
    "groups describe": topic(lambda f: words(f.name), full="unknown_consumer_group"),
    "groups reset": topic(lambda f: words(f.name, f.topic_name), full="unknown_topic"),
    "groups delete": topic(lambda f: words(f.name, "--yes"), full="unknown_consumer_group"),
    "topic purge": topic(lambda f: words(f.topic_name, "--yes"), full="unknown_topic"),
    "topic delete": topic(lambda f: words(f.topic_name, "--yes")),
    "command": own(lambda f: words(f.name_of("own"), APPEND.hex(), "--hex"), writes=True),
    "query": own(lambda f: words(f.name_of("own"), f.question.hex(), "--hex")),
    "truncate": log(lambda f: words(f.name_of("log"), "--before", f.offset), largest="out_of_range"),
    "members add": either(lambda f: words(f.spare, "--node", 3)),
    "members remove": either(lambda f: words(f.spare, "--node", 3)),
    "members promote": either(lambda f: words(f.spare, "--node", 3), usual="failed"),
    "members replace": either(lambda f: words(f.spare, "--node", 2, "--with", 3)),
    "drain": either(lambda f: words("--node", 3)),
    "skip": either(lambda f: words(f.name_of("log"), "--index", 1, "--ordinal", 0), usual="refused"),
    "force-shrink": either(lambda f: words(f.name_of("log"), "--node", 1, "--yes-the-quorum-is-lost")),
    "nodes list": no_catalog(),
    "nodes invite": no_catalog(),
    "nodes drain": no_catalog(3),
    "nodes admit": no_catalog(3),
    "nodes declare-dead": no_catalog(3),
    "nodes remove": no_catalog(3),
    "nodes replace": no_catalog(3, "--with", 4),
    "cluster finalise": no_catalog(),
    "cluster recover": no_catalog("--yes-the-majority-is-lost"),
    "plan show": no_catalog(),
    "plan pause": no_catalog(),
    "plan resume": no_catalog(),
    "plan cancel": no_catalog(1),
    "forget": either(lambda f: words("--node", 2), usual="failed"),
    "delete": either(lambda f: words(f.spare, "--yes")),
}

NO_CLIENT: Mapping[str, str] = {
    "bench": "measures, with clusters of its own",
    "check": "reads a stopped directory",
    "demo": "runs a cluster of its own",
    "etcd": "serves; what it serves are the rows of its paths",
    "forks": "reads and changes a stopped directory",
    "readmit": "changes a stopped directory",
    "serve": "is a node",
    "spark": "is tried with Spark, in tests/pipeline",
    "tls": "makes certificates",
    "up": "runs a cluster",
}
"""Commands that are no clients of a cluster, by their first word, and why."""


def put_in_txn(f: Any) -> dict[str, Any]:
    """A transaction of one put."""
    return {"success": [{"request_put": {"key": text(f.key), "value": ""}}]}


REVISION_ERROR, LEASE_ERROR, REQUEST_ERROR, UNKNOWN = "11", "5", "3", "2"

PATHS: Mapping[str, Row] = {
    "/kv/put": kv(lambda f: {"key": text(f.key), "value": text(f.small)}, writes=True, empty=REQUEST_ERROR),
    "/kv/range": kv(lambda f: {"key": text(f.key)}, empty=REQUEST_ERROR),
    "/kv/txn": kv(
        lambda f: {"success": [{"request_put": {"key": text(f.key), "value": ""}}]}, writes=True, empty=REQUEST_ERROR
    ),
    "/lease/grant": kv(lambda f: {"TTL": int(f.seconds)}, writes=True),
    "/lease/keepalive": kv(lambda f: {"ID": f.lease}, writes=True),
    "/lease/timetolive": kv(lambda f: {"ID": f.lease, "keys": True}),
    "/kv/lease/timetolive": kv(lambda f: {"ID": f.lease}),
    "/lease/leases": kv(lambda f: {}),
    "/kv/lease/leases": kv(lambda f: {}),
    "/lease/revoke": kv(lambda f: {"ID": f.lease}, writes=True, largest=LEASE_ERROR, empty=LEASE_ERROR),
    "/kv/lease/revoke": kv(
        lambda f: {"ID": min(f.lease + 1, (1 << 63) - 1)}, writes=True, largest=LEASE_ERROR, empty=LEASE_ERROR
    ),
    "/watch": kv(lambda f: {"create_request": {"key": text(f.key or b"x")}}),
    "/kv/deleterange": kv(lambda f: {"key": text(f.key)}, writes=True, empty=REQUEST_ERROR),
    "/kv/compaction": kv(lambda f: {"revision": f.revision}, writes=True, largest=REVISION_ERROR, empty=REVISION_ERROR),
    "/lock/lock": kv(lambda f: {"name": text(b"lock")}, writes=True),
    "/lock/unlock": kv(lambda f: {"key": text(f.key)}, writes=True, empty=UNKNOWN),
    "/election/campaign": kv(lambda f: {"name": text(b"elected"), "value": text(f.small)}, writes=True),
    "/election/leader": kv(lambda f: {"name": text(b"elected")}, full=UNKNOWN),
    # Without the key that a campaign gave.
    "/election/proclaim": either(lambda f: {"value": text(f.small)}, usual=UNKNOWN),
    "/election/resign": either(lambda f: {}, usual=UNKNOWN),
    "/cluster/member/list": kv(lambda f: {}),
    "/maintenance/status": kv(lambda f: {}),
    "/maintenance/alarm": kv(lambda f: {}),
    "/maintenance/defragment": kv(lambda f: {}),
    "/auth/status": kv(lambda f: {}),
    "/auth/authenticate": either(lambda f: {}, usual="9"),
}
