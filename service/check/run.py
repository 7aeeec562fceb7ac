"""`logyard check DIR`: verifies a stopped node's directory, its bytes and the invariants of storage.

Invariant: nothing in the directory is touched, not even a lock file made, unless `repair` is asked for; and a repair
only removes what a start would remove or write again. The reading is done by a process of its own (`process`),
because a bad page of a memory map kills its reader. Called by `service.cli.root` and `service.demo.run`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logyard.engine.disk.door import Disk
from logyard.payloads.verify import DEADLY
from logyard.pipeline.directory.lock import held
from logyard.pipeline.directory.report import DAMAGE, Progress
from logyard.protocol.errors import BadRequest, LogyardError, WrongIdentity


def check_directory(
    path: str | os.PathLike[str],
    repair: bool = False,
    progress: Progress | None = None,
    machines: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Verify the data directory `path` of a node that is stopped. BLOCKING.

    Returns plain values: `ok` (no damage), `path`, `node`, `cluster`, `epoch`, `groups` (name, uid, snapshot, last,
    floor of each), `findings` (severity damage, warning, unknown or healed; kind, group, path within the directory,
    message), `counts` of what was verified, `orphans` and, after a repair, which of them were `removed`. `progress` is
    called with (stage, done, total). `machines`: of the operator's own, by name, each "module:Class"; a group whose
    machine is not at hand has findings `unknown`. Raises `DirectoryInUse` while a process has the directory,
    `WrongIdentity` for a newer format, `BadRequest` for a machine that can't be loaded.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise LogyardError(f"{directory} is not a directory")
    with held(directory, exclusive=repair):
        fields = _read(directory, progress, dict(machines or {}))
        complete = fields.pop("complete")
        removed: list[str] = []
        if repair and complete:
            removed = _remove(directory, fields["orphans"])
    damaged = any(finding["severity"] == DAMAGE for finding in fields["findings"])
    return {"ok": not damaged, "path": str(directory), **fields, "removed": removed}


def _read(directory: Path, progress: Progress | None, machines: dict[str, str]) -> dict[str, Any]:
    """Return the report of a reading process. One that dies inside a map is started again without that map."""
    skip: list[str] = []
    while True:
        fields, inside, code, errors = _process(directory, skip, progress, machines)
        if fields is not None:
            return fields
        # A map that can't be read kills by one of these; what ends the process otherwise says nothing of the map.
        if code not in DEADLY or not inside or inside in skip:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise LogyardError(f"the process that reads {directory} ended ({how}): {errors[-2000:]}")
        skip.append(inside)


def _process(
    directory: Path, skip: list[str], progress: Progress | None, machines: dict[str, str]
) -> tuple[dict[str, Any] | None, str, int, str]:
    """Return (report or None, the map it was inside when it ended, exit code, its standard error)."""
    where = str(directory.absolute())
    command = [sys.executable, "-m", "logyard.service.check.process", where, json.dumps(machines), *skip]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in sys.path)}
    fields: dict[str, Any] | None = None
    inside = ""
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                line = json.loads(text)
                if "inside" in line:
                    inside = line["inside"]
                elif "progress" in line:
                    if progress is not None:
                        progress(*line["progress"])
                elif "report" in line:
                    fields = line["report"]
                else:
                    code, message = line["error"]
                    raise {kind.code: kind for kind in (WrongIdentity, BadRequest)}.get(code, LogyardError)(message)
        errors.seek(0)
        return fields, inside, process.returncode, errors.read()


def _remove(directory: Path, orphans: list[str]) -> list[str]:
    """Remove what nobody needs; names are durable when this returns."""
    disk = Disk()
    for orphan in orphans:
        path = directory / orphan
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            disk.unlink(str(path))
        disk.sync_directory(str(path.parent))
    return orphans
