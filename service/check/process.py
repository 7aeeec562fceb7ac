"""The process that reads a directory for `service.check.run`: `python -m logyard.service.check.process DIR MACHINES
[SKIP...]`; MACHINES is the JSON object of machines of the operator's own.

Invariant: it writes nothing but lines of JSON to standard output. A bad page of a memory map kills a process without an
exception; so each map is announced before it is read, and whoever started this one knows which killed it. SKIP are
maps (paths relative to DIR) to leave alone. Called by `service.check.run.check_directory`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logyard.engine.recovery.incarnation import MARK
from logyard.engine.recovery.inspect import Facts
from logyard.machines.registry import create_machine
from logyard.pipeline.directory.files import Segments, check_wal, rings_of, users_of
from logyard.pipeline.directory.generations import Generations
from logyard.pipeline.directory.groups import check_group
from logyard.pipeline.directory.meta import read_meta
from logyard.pipeline.directory.payloads import check_payloads
from logyard.pipeline.directory.report import Report, lacks
from logyard.protocol.errors import Corrupt, LogyardError

from ..fork_files import fork_files, read_fork
from ..own_machines import MachineFactory, machine_factory

Tell = Callable[[dict[str, Any]], None]


def inspect(directory: Path, skip: frozenset[str], tell: Tell, make: MachineFactory = create_machine) -> dict[str, Any]:
    """Read everything, change nothing. Returns the report's fields. `make`: a machine, by name and arguments. Raises
    `WrongIdentity` for newer formats."""
    report = Report(
        lambda stage, done, total: tell({"progress": [stage, done, total]}), lambda path: tell({"inside": path})
    )
    if not (directory / "meta").is_dir() and not (directory / "wal").is_dir():
        report.damage("directory", "this is no data directory: it has neither meta nor wal")
        return {
            **report.fields(),
            "node": 0,
            "cluster": "",
            "epoch": 0,
            "groups": [],
            "complete": False,
            "directory": 0,
            "written": 0,
            "peers": {},
        }
    failure = directory / MARK
    if failure.exists():
        text = f"the last process here ended because the disk failed: {failure.read_text('utf-8', 'replace')[:500]}"
        report.warning("disk_failed", text, path=MARK)
    facts = Facts()
    with report.guarded("meta", path="meta"):
        facts.complete = False
        facts = read_meta(directory, skip, report)
    wal = check_wal(directory, facts, report)
    segments = Segments(directory, report)
    generations = Generations(directory, facts, skip, report)
    groups: list[dict[str, Any]] = []
    try:
        segments.verify(users_of(facts, wal), facts)
        segments.rings.verify(rings_of(facts, wal), facts, segments.bad)
        generations.verify(facts)
        for position, uid in enumerate(sorted(facts.groups)):
            report.progress("groups", position, len(facts.groups))
            name = facts.name(uid)
            if uid in facts.deleted:
                continue
            with report.guarded("group", group=name):
                group = check_group(uid, facts, wal, segments, generations.homes.get(uid, ()), report, make)
                check_payloads(group, directory, wal, segments, generations, facts, report)
                snapshot = group.snapshot.index if group.snapshot is not None else 0
                row = {"name": name, "uid": f"{uid:016x}", "snapshot": snapshot, "last": group.last}
                groups.append({**row, "floor": group.floor})
        for uid in generations.homes.keys() - facts.groups.keys():
            text = "homes of a group that has no definition"
            report.warning("payload_homes", text, path="meta", group=facts.name(uid))
        check_forks(directory, report)
    finally:
        generations.close()
        segments.close()
    report.finish()
    return {
        **report.fields(), "node": facts.node, "cluster": facts.cluster, "epoch": facts.epoch, "groups": groups,
        "directory": facts.directory, "written": min(wal.written, facts.claimed),
        "peers": {str(node): list(origin) for node, origin in facts.peers.items()},
        "complete": facts.complete,
    }  # fmt: skip


def check_forks(directory: Path, report: Report) -> None:
    """Read what was kept of replicas that went: nobody else has it."""
    for file in fork_files(directory):
        path = str(file.relative_to(directory))
        with report.guarded("fork", path=path):
            try:
                read_fork(file)
            except Corrupt as error:
                where = f"at byte {error.details['offset']}"
                text = f"{where}: what was kept of a replica that went is damaged, and no other node has it"
                report.damage("fork", text, path=path)


def main(arguments: list[str]) -> int:
    """Write one JSON object a line: progress, the map being read, and at last the report or the error that ended it.
    What a machine of one's own prints goes to standard error."""
    words = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=words)

    directory, machines, *skip = arguments
    try:
        tell({"report": inspect(Path(directory), frozenset(skip), tell, machine_factory(json.loads(machines)))})
    except (LogyardError, OSError, MemoryError) as error:
        if lacks(error):
            text = f"{directory} was not judged, for want of something here: {type(error).__name__}: {error}"
            tell({"error": [LogyardError.code, text]})
        elif isinstance(error, LogyardError):
            tell({"error": [error.code, str(error)]})
        else:
            raise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
