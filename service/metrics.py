"""Every metric of a node, as one table: what `/metrics` shows, and docs/metrics.md, which is printed from it by
`python -m logyard.service.metrics`.

Values come from the node's own tables (`status.NodeStatus`): a scrape never asks a group, a thread or a disk, so it
answers while groups are stopped and disks hang. Groups are summed; only the TOP_GROUPS largest have a label of their
own, so ten thousand groups are not ten thousand label sets. Rendered by prometheus-client, served by `metrics_http`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import nlargest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from logyard.engine.log.location import SealedFile
    from logyard.engine.replica.member import Member

PREFIX = "logyard_"
TOP_GROUPS = 20
"""Groups with a label of their own: enough to find who fills a disk."""

Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
Read: TypeAlias = Callable[[Mapping[str, Any]], Samples]


class Metric(NamedTuple):
    """One metric: its name without prefix (a counter's gets `_total`), what it says, its labels, where it is read."""

    name: str
    kind: str
    text: str
    read: Read
    labels: tuple[str, ...] = ()


def field(*path: str, scale: float = 1.0) -> Read:
    """Return what reads the value at a path of the status."""

    def read(status: Mapping[str, Any]) -> Samples:
        value: Any = status
        for key in path:
            value = value[key]
        return [((), float(value) * scale)]

    return read


def by_key(key: str) -> Read:
    """Return what reads a mapping of the status: one sample a key, which is the label."""
    return lambda status: [((name,), float(value)) for name, value in sorted(status[key].items())]


def of_budget(key: str) -> Read:
    """Return what reads one column of the budget's stages."""
    return lambda status: [((stage,), float(value)) for stage, value in sorted(status["budget"][key].items())]


def by_peer(key: str, table: str = "peers") -> Read:
    """Return what reads one column of the peers' rows; their number is the label."""
    return lambda status: [((str(row["node"]),), float(row[key])) for row in status[table]]


def of_scrub(key: str) -> Read:
    """Return what reads one column of the scrub's kinds."""
    return lambda status: [((kind,), float(row[key])) for kind, row in sorted(status["scrub"]["kinds"].items())]


def live_bytes(status: Mapping[str, Any]) -> Samples:
    """Return live payload bytes by home."""
    yield ("wal",), float(status["wal_bytes_live"])
    yield ("generations",), float(status["generations_bytes_live"])


def dead_bytes(status: Mapping[str, Any]) -> Samples:
    """Return released payload bytes that still take space, by home."""
    yield ("wal",), float(status["wal_bytes_dead"])
    yield ("generations",), float(sum(one["total"] - one["live"] for one in status["generations"]))


def top_groups(status: Mapping[str, Any]) -> Samples:
    """Return the largest groups' bytes by kind."""
    for name, kinds in status["top_groups"].items():
        for kind, size in kinds.items():
            yield (name, kind), float(size)


def of_consumers(key: str) -> Read:
    """Return what reads one column of the consumer groups' partitions."""
    return lambda status: [
        ((row["group"], row["topic"], str(row["partition"])), float(row[key])) for row in status["consumers"]
    ]


METRICS = (
    Metric("groups", "gauge", "Groups with a member on this node.", field("groups")),
    Metric("groups_led", "gauge", "Members of this node that lead.", field("led")),
    Metric("groups_stopped", "gauge", "Members that damage or an exception stopped or halted.", field("stopped")),
    Metric("groups_halted", "gauge", "Of them, those that wait for an operator's skip.", field("halted")),
    Metric("groups_mending", "gauge", "Members that lost records and are brought up by others; they count for nothing"
           " yet.", field("damage", "mending")),
    Metric("groups_mended", "counter", "Members that are sound again after that.", field("damage", "mended")),
    Metric("payload_stretches_lost", "gauge", "Stretches of entries whose payloads lost their home here and are not"
           " back.", field("damage", "lost")),
    Metric("groups_active", "gauge", "Members that need the clock; the others are quiet.", field("active")),
    Metric("elections_won", "counter", "Leaderships that members of this node won.", field("elections")),
    Metric("leaderships_lost", "counter", "Leaderships of this node that ended.", field("leaderships_lost")),
    Metric("fdatasyncs", "counter", "Syncs of files; one serves every group that had something to write.",
           field("fdatasyncs")),
    Metric("disk_written_bytes", "counter", "Bytes written to files.", field("bytes_written")),
    Metric("wal_batches", "counter", "Batches of the write-ahead log: one sync each.",
           field("wal", "batches")),
    Metric("wal_written_bytes", "counter", "Entry bytes in those batches.", field("wal", "written_bytes")),
    Metric("wal_write_seconds", "counter", "Time spent in their writes and syncs.", field("wal", "write_s")),
    Metric("wal_sync_seconds", "gauge", "Moving average of one batch's write and sync.",
           field("wal", "sync_ms", scale=1e-3)),
    Metric("disk_slow", "gauge", "1: the disk is slow, leaderships move to nodes with faster ones.",
           field("disk", "slow")),
    Metric("disk_sync_seconds", "gauge", "Mean time of a sync over the window of disk_slow_for_ms, its bytes apart.",
           field("disk", "sync_ms", scale=1e-3)),
    Metric("leaderships_handed_over", "counter", "Leaderships offered to nodes with faster disks.",
           field("disk", "handed_over")),
    Metric("wal_stalled_seconds", "gauge", "For how long the oldest unfinished batch has been under way; 0: none is.",
           field("wal", "stalled_ms", scale=1e-3)),
    Metric("wal_queue_bytes", "gauge", "Waiting for a batch, and in the one under way.",
           field("wal", "queued_bytes")),
    Metric("wal_files", "gauge", "Files of the write-ahead log, spare ones included.", field("wal", "files")),
    Metric("wal_allocated_bytes", "gauge", "Their allocated bytes.", field("wal", "allocated_bytes")),
    Metric("budget_bytes", "gauge", "Held by a stage of back-pressure.", of_budget("bytes"), ("stage",)),
    Metric("budget_limit_bytes", "gauge", "What that stage may hold.", of_budget("limits"), ("stage",)),
    Metric("disk_full", "gauge", "1: the disk is full, ordinary writes are refused until there is room.",
           field("space", "full")),
    Metric("disk_free_bytes", "gauge", "Free on the disk of the data directory, as of the last second; -1: not known.",
           field("space", "free_bytes")),
    Metric("inflight_bytes", "gauge", "Commands received and not answered, all groups.", field("inflight_bytes")),
    Metric("busy", "counter", "Commands refused with busy, by the budget that was full.", by_key("busy"), ("cause",)),
    Metric("forks", "counter", "Replicas that left their group and held entries that its lineage has not: kept in "
           "forks/.", field("forks")),
    Metric("snapshots_taken", "counter", "Snapshots of groups taken here.", field("snapshots_taken")),
    Metric("snapshots_sent", "counter", "Snapshots sent to followers.", field("snapshots_sent")),
    Metric("snapshots_installed", "counter", "Snapshots installed from leaders.", field("snapshots_installed")),
    Metric("transfer_pieces", "counter", "Pieces pulled from other members for snapshots and repairs.",
           field("transfers", "pieces")),
    Metric("transfer_bytes", "counter", "Their bytes.", field("transfers", "bytes")),
    Metric("transfers_resumed", "counter", "Snapshots that went on where an earlier transfer had stopped.",
           field("transfers", "resumed")),
    Metric("pieces_served", "counter", "Pieces given to other members.", field("pieces_served")),
    Metric("repaired_entries", "counter", "Entries whose damaged or lost payload came back from a peer.",
           field("repaired_entries")),
    Metric("repairs_failed", "counter", "Damaged or lost payloads that no peer had.", field("repairs_failed")),
    Metric("scrubbed_bytes", "counter", "Bytes that the scrub read.", of_scrub("bytes"), ("kind",)),
    Metric("scrub_found", "counter", "Damages that it met.", of_scrub("found"), ("kind",)),
    Metric("scrub_repaired", "counter", "Of them, those that were whole again when its pass ended.",
           of_scrub("repaired"), ("kind",)),
    Metric("scrub_left", "gauge", "Damages of the last pass that are not repaired.", field("scrub", "left")),
    Metric("scrub_finished_seconds", "gauge", "When its last pass ended, since 1970; 0: never.",
           field("scrub", "finished_ms", scale=1e-3)),
    Metric("snapshot_bytes", "gauge", "Bytes of the newest snapshot of every group.", field("snapshot_bytes")),
    Metric("migrated_files", "counter", "Sealed WAL files emptied into generations.", field("migrated_files")),
    Metric("migrated_bytes", "counter", "Live payload bytes copied by that.", field("migrated_bytes")),
    Metric("writer_starts", "counter", "Writer processes started; each after the first followed one that died.",
           field("writer", "starts")),
    Metric("writer_jobs", "counter", "Jobs that they finished.", field("writer", "jobs")),
    Metric("writer_jobs_set_aside", "counter", "Jobs that killed them time and again; the status has the reasons.",
           field("writer", "poisoned")),
    Metric("storage_jobs_failed", "counter", "Storage jobs that failed by a defect; the status has the last one.",
           field("jobs", "failed")),
    Metric("storage_frozen", "gauge", "1: nothing is recycled or unlinked until the node is restarted.",
           lambda row: [((), float(bool(row["jobs"]["frozen"])))]),
    Metric("payload_live_bytes", "gauge", "Payload bytes that no release has named yet.", live_bytes, ("home",)),
    Metric("payload_dead_bytes", "gauge", "Released payload bytes that still take space, in sealed WAL files and in"
           " generations.", dead_bytes, ("home",)),
    Metric("payload_disk_bytes", "gauge", "Allocated bytes of everything that holds payloads.",
           field("payload_disk_bytes")),
    Metric("payload_cache_bytes", "gauge", "Payload bytes in the shared cache.", field("cache_bytes")),
    Metric("liveness_mismatches", "counter", "Ranges that a machine named as live after releasing them: its bug.",
           field("liveness_mismatches")),
    Metric("resident_bytes", "gauge", "Resident memory of the process.", field("memory_rss")),
    Metric("live_nodes", "gauge", "Nodes that renew their liveness, this one included.",
           lambda status: [((), float(len(status["live_nodes"])))]),
    Metric("peer_up", "gauge", "1: the link to that node stands.", by_peer("up"), ("peer",)),
    Metric("peer_live", "gauge", "1: that node renews its liveness.", by_peer("live"), ("peer",)),
    Metric("peer_outdated", "gauge", "1: that node's data directory was wiped or is an older copy; it is refused.",
           lambda status: [((str(row["node"]),), float(bool(row["outdated"]))) for row in status["peers"]], ("peer",)),
    Metric("peer_disk_sync_seconds", "gauge", "Mean time of a sync of that node's disk, as it says.",
           lambda status: [((str(row["node"]),), row["sync_us"] / 1e6) for row in status["peers"]], ("peer",)),
    Metric("peer_queued_bytes", "gauge", "Waiting for that node's sockets.", by_peer("queued"), ("peer",)),
    Metric("peer_sent_bytes", "counter", "Sent to that node.", by_peer("sent_bytes"), ("peer",)),
    Metric("listening_sessions", "gauge", "Sessions whose client listens on this node.", field("listening")),
    Metric("pushes_dropped", "counter", "Pushes for clients that were too slow.", field("pushes_dropped")),
    Metric("peer_dropped", "counter", "Messages to that node that a full queue dropped.", by_peer("dropped"),
           ("peer",)),
    Metric("follower_inflight_bytes", "gauge", "Entries sent to that node and not acknowledged, all groups.",
           by_peer("inflight_bytes", "followers"), ("peer",)),
    Metric("follower_pulling", "gauge", "1: that node is served only as it answers.",
           by_peer("pulling", "followers"), ("peer",)),
    Metric("consumer_lag_records", "gauge", "Records of a partition that a consumer group has not committed. Said by"
           " the node that leads the group's coordinator, of partitions with a copy there; the 1,000 that are furthest"
           " behind.", of_consumers("lag"), ("group", "topic", "partition")),
    Metric("consumer_offset", "gauge", "Up to where the group has committed it.", of_consumers("offset"),
           ("group", "topic", "partition")),
    Metric("group_bytes", "gauge", f"Of the {TOP_GROUPS} largest groups: live payload bytes in sealed WAL files (wal),"
           " the newest snapshot (snapshot), commands not yet answered (pending).", top_groups, ("group", "kind")),
)  # fmt: skip


def largest_groups(
    members: Iterable[Member], sealed: Iterable[SealedFile], count: int = TOP_GROUPS
) -> dict[str, dict[str, int]]:
    """Return the `count` groups with most bytes, largest first: bytes by kind. `sealed` WAL files say what is
    theirs."""
    wal: Counter[int] = Counter()
    for file in sealed:
        for uid, share in file.shares.items():
            wal[uid] += share.live
    rows = ((member.spec.name, wal[member.uid], member.snapshot_bytes, member.proposals.bytes) for member in members)
    best = nlargest(count, (row for row in rows if any(row[1:])), key=lambda row: sum(row[1:]))
    return {name: {"wal": in_wal, "snapshot": snapshot, "pending": pending} for name, in_wal, snapshot, pending in best}


def samples(
    status: Mapping[str, Any], members: Iterable[Member], sealed: Collection[SealedFile]
) -> Iterator[tuple[Metric, list[tuple[tuple[str, ...], float]]]]:
    """Yield every metric with its samples, from one look at the node: `NodeStatus.read`, its members that are awake,
    its sealed WAL files."""
    status = {
        **status,
        "top_groups": largest_groups(members, sealed),
        "wal_bytes_dead": sum(max(0, file.total - file.live) for file in sealed),
    }
    for metric in METRICS:
        yield metric, list(metric.read(status))


def render(status: Mapping[str, Any], members: Iterable[Member], sealed: Collection[SealedFile]) -> tuple[str, bytes]:
    """Return (content type, body) of a scrape, in the Prometheus text format; see `samples`."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class Node(Collector):
        def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
            for metric, found in samples(status, members, sealed):
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                shown = family(PREFIX + metric.name, metric.text, labels=metric.labels)
                for labels, value in found:
                    shown.add_metric(labels, value)
                yield shown

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Node())
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def metrics_reference() -> str:
    """Return the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Printed by `python -m logyard.service.metrics`; a test compares. Edit the table there. -->",
        "",
        'With `metrics_listen = "127.0.0.1:9464"` in the `[node]` table a node answers `GET /metrics` there in the',
        "Prometheus text format, and `GET /health` with 200. The address must be a loopback one: put a proxy with TLS",
        "before it for other machines. A scrape reads the node's own tables and never waits for a group or a disk.",
        "Counters begin at 0 with the process.",
        "",
        "| metric | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        name = f"{PREFIX}{metric.name}" + ("_total" if metric.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_reference())
