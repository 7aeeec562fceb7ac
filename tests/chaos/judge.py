"""What must hold when the storm is over: nothing lost, nothing twice, nothing else than what was written, and all
members alike, in what they say, in what they keep and in the bytes themselves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from logyard.client.scans import audit_call
from logyard.client.sync import Yard
from logyard.protocol.errors import LogyardError
from tests.linearizability.check import Outcome, check

from .kv_load import Revisions
from .load import KVS, LOGS, NAMES, QUEUES, REGISTERS, RING, Journal, number_of

SETTLE_S = 60.0
PAUSE_S = 0.1
STEP_BYTES = 64 << 20
QUIET_DISK_BYTES = 48 << 20
"""What a node's payloads may still take when every log was emptied: WAL files in use, and the space of generations."""


def until(condition: Callable[[], str], patience_s: float = SETTLE_S) -> str:
    """Ask until `condition` has nothing to complain about; its last complaint after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            complaint = condition()
        except LogyardError as error:
            complaint = f"{error.code}: {error}"
        if not complaint or time.monotonic() > deadline:
            return complaint
        threading.Event().wait(PAUSE_S)


def settled(yard: Yard, names: Iterable[str] = NAMES) -> str:
    """Whether every member runs and has applied what the most advanced one had committed a moment ago."""
    names = list(names)
    nodes = yard.nodes()
    before = {row["name"]: 0 for node in nodes for row in yard.key_metrics(names, node)}
    for node in nodes:
        for row in yard.key_metrics(names, node):
            before[row["name"]] = max(before[row["name"]], row["commit"])
    for node in nodes:
        rows = {row["name"]: row for row in yard.key_metrics(names, node)}
        for name in names:
            if name not in rows:
                return f"{name} is not on node {node}"
            row = rows[name]
            if row["state"] not in ("running", "hibernating") or row["membership"] != "voter" or not row["leader"]:
                shown = {key: row[key] for key in ("state", "reason", "membership", "leader")}
                return f"{name} on node {node} is {shown}"

    def applied() -> str:
        for node in nodes:
            for row in yard.key_metrics(names, node):
                if row["applied"] < before[row["name"]]:
                    return f"{row['name']} on node {node} has applied {row['applied']} of {before[row['name']]}"
        return ""

    return until(applied, 20)


def scrubbed(yard: Yard) -> str:
    """Have every node scrub its whole disk; say when that does not end."""
    wanted = {node: row["wanted"] for node, row in yard.scrub(start=True).items()}

    def passed() -> str:
        rows = yard.scrub()
        late = {node: rows[node] for node, pass_ in wanted.items() if rows[node]["passes"] < pass_}
        return f"a scrub does not end: {late}" if late else ""

    before = -1
    while complaint := until(passed):
        read = sum(row["pass_bytes"] for row in yard.scrub().values())
        if read == before:
            # It is not slow, on a disk with much to read and others on it: it stands.
            return complaint
        before = read
    return ""


def false_alarms(rows: Mapping[int, Any], rotten: int) -> list[str]:
    """Return what the last scrubs called damaged on disks that are sound: all but that of node `rotten`."""
    found = []
    for node, row in rows.items():
        damaged = sum(kind["found"] for kind in row["last"].values())
        if node != rotten and (damaged or row["error"]):
            found.append(f"a scrub of node {node}: {damaged} damaged, {row['error'] or row['findings']}")
    return found


def linearizable(journal: Journal, model: str, path: Path) -> Outcome:
    """One model's history, also written to `path`."""
    lines = [json.dumps(row) for row in journal.rows[model]]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return check(lines, model)


class Verdict:
    """Findings of the final examination."""

    def __init__(self, yard: Yard, journal: Journal, revisions: Mapping[str, Revisions]) -> None:
        self.yard = yard
        self.revisions = revisions
        self.journal = journal
        self.lost: list[str] = []
        self.violations: list[str] = []

    def examine(self) -> None:
        """Everything, while nobody writes."""
        for name in (*LOGS, RING):
            contents = {node: self.content(name, node) for node in self.yard.nodes()}
            first = next(iter(contents.values()))
            for node, found in contents.items():
                if found != first:
                    self.violations.append(f"{name}: node {node} has another content than the first node")
            self.judge_log(name, *first)
        for name in KVS:
            self.judge_kv(self.revisions[name])
        for name in (*REGISTERS, *KVS, *QUEUES):
            # What follows up on the last commands (history that shrinks, a timer) may still be under way somewhere.
            if until(lambda name=name: self.unequal(name), SETTLE_S):  # type: ignore[misc]
                self.violations.append(f"{name}: the members' states differ")
        self.scrub()
        self.audit()
        for node, status in self.yard.statuses().items():
            for key in ("liveness_mismatches", "stopped", "halted"):
                if status[key]:
                    self.violations.append(f"node {node}: {key} = {status[key]}")

    def unequal(self, name: str) -> str:
        """Whether the members' states differ."""
        log = self.yard.log(name)
        states = {log.query(b"", node=node, consistency="local") for node in self.yard.nodes()}
        return "" if len(states) == 1 else "they differ"

    def judge_kv(self, seen: Revisions) -> None:
        """Every member has the keys that the watched changes add up to, at those revisions, with the right bytes."""
        expected = seen.replayed()
        kv = self.yard.kv(seen.name)
        for node in self.yard.nodes():
            found: dict[str, tuple[int, int]] = {}
            for one in kv.range(b"", prefix=True, node=node).kvs:
                number = seen.served(one)
                found[one.key.decode()] = number or 0, one.mod_revision
            if expected is None:
                self.violations.append(f"{seen.name}: watchers saw only {len(seen.whole)} revisions")
                return
            if found != expected:
                different = sorted(key for key, _ in found.items() ^ expected.items())
                self.violations.append(f"{seen.name} on node {node}: not what watchers saw: {different[:10]}")

    def content(self, name: str, node: int) -> tuple[int, dict[int, int | None]]:
        """A member's whole log: its start, and the id at each offset."""
        log = self.yard.log(name)
        start, end = log.latest(node=node, consistency="local")[:2]
        found: dict[int, int | None] = {}
        at = start
        while at < end:
            page = log.poll(at, max_records=500, node=node, consistency="local")
            rows = list(page)
            if not rows:
                self.violations.append(f"{name} on node {node}: nothing at {at} of {start} to {end}")
                break
            for record in rows:
                if record.offset != at:
                    self.violations.append(f"{name} on node {node}: {record.offset} follows {at - 1}")
                place, at = record.offset, record.offset + 1
                body = log.read_body(place, 0, record.size, node=node) if record.left_out else record.payload
                found[place] = number_of(bytes(body or b""))
        return start, found

    def judge_log(self, name: str, start: int, found: dict[int, int | None]) -> None:
        """Acknowledged records are at their place, refused ones nowhere, none is there twice."""
        places: dict[int, int] = {}
        for offset, number in found.items():
            if number is None:
                self.violations.append(f"{name} at {offset}: wrong bytes")
            elif number in self.journal.refused:
                self.violations.append(f"{name} at {offset}: {number} was refused")
            elif number in places:
                self.violations.append(f"{name}: {number} is at {places[number]} and at {offset}")
            else:
                places[number] = offset
        for (log, offset), number in {**self.journal.seen, **self.journal.acknowledged}.items():
            if log == name and offset >= start and found.get(offset) != number:
                self.lost.append(
                    f"{name} at {offset}: {number} was acknowledged or served, {found.get(offset)} is there"
                )

    def scrub(self) -> None:
        """Let every node read all that lies on its disk: damage that nobody has met is met now, and mended."""
        if complaint := scrubbed(self.yard):
            self.violations.append(complaint)

    def audit(self) -> None:
        """Every live byte of every member, read from its own disk: counts and hashes must agree. What a scrub found may
        still be on its way from a peer."""
        for name in NAMES:
            if complaint := until(lambda name=name: self.audit_group(name)):  # type: ignore[misc]
                self.violations.append(complaint)

    def audit_group(self, name: str) -> str:
        """What is wrong with a group's members."""
        uid = self.yard.describe(name)["uid"]
        wrong: list[str] = []
        rows = {node: self.audited(name, uid, node, wrong) for node in self.yard.nodes()}
        if not wrong and len({tuple(sorted(row.items())) for row in rows.values()}) != 1:
            wrong.append(f"{name}: live sets or payload hashes differ: {rows}")
        return "; ".join(wrong)

    def audited(self, name: str, uid: int, node: int, wrong: list[str]) -> dict[str, Any]:
        """The sums of one member."""
        sums: dict[str, Any] = {"units": 0, "bytes": 0, "digest": 0}
        index = offset = 0
        while True:
            step = self.yard.run(audit_call(node, name, uid, index, offset, STEP_BYTES), 60)
            sums["units"] += step.units
            sums["bytes"] += step.bytes
            sums["digest"] = (sums["digest"] + step.digest) % (1 << 128)
            if step.missing or step.corrupt or step.mismatches:
                wrong.append(
                    f"{name} on node {node}: {step.missing} missing, {step.corrupt} corrupt,"
                    f" {step.mismatches} mismatches: {'; '.join(step.problems)}"
                )
            if not step.next:
                return sums
            index, offset = step.next, step.offset

    def shrink(self) -> dict[int, int]:
        """Empty the logs and the KV groups (the queues are empty); what every node's payloads take then."""
        for name in (*LOGS, RING):
            self.yard.log(name).truncate(self.yard.log(name).latest()[1])
        for name in KVS:
            self.yard.kv(name).compact(self.yard.kv(name).delete(b"", prefix=True).revision)

        def small() -> str:
            self.yard.snapshot()
            self.yard.compact()
            found = {node: row["payload_disk_bytes"] for node, row in self.yard.statuses().items()}
            return "" if max(found.values()) <= QUIET_DISK_BYTES else f"disk use does not come back: {found}"

        if complaint := until(small, 30):
            self.violations.append(complaint)
        return {node: row["payload_disk_bytes"] for node, row in self.yard.statuses().items()}
