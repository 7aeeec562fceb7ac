"""The demo of the pipeline: the yard that `service.demo.run` leaves, exported, imported into a second yard, audited.

Nothing is taken on trust: both yards' logs are read back and their digests compared log by log, over the network and
from the stopped directories, and every copy of every payload is audited in both ways. Called by `logyard spark demo`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.output import Output, bytes_text
from ..local_cluster import LocalCluster
from .run import DemoSettings, Steps, home, run_demo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NODES = 3
ROWS = (
    ("logs", "logs", "count"), ("records", "rows", "count"), ("payload", "payload_bytes", "bytes"),
    ("Parquet files", "parts", "count"), ("Parquet", "file_bytes", "bytes"),
    ("records appended to the second yard", "appended", "count"),
    ("logs with equal digests, of both yards", "equal", "count"),
    ("copies audited", "copies", "count"), ("payload units hashed", "units", "count"),
    ("payload bytes hashed", "bytes_hashed", "bytes"),
    ("problems", "problem_count", "count"), ("total time", "seconds", "seconds"),
)  # fmt: skip


DATA = ("first", "second", "export")


def run_demo_spark(settings: DemoSettings, spark: SparkSession, output: Output) -> dict[str, Any]:
    """Run everything; return plain figures. Raises what a step raises."""
    from logyard.pipeline.jobs.audit import run_audit
    from logyard.pipeline.jobs.digests import digest_logs
    from logyard.pipeline.jobs.export import Export, run_export
    from logyard.pipeline.jobs.importing import Import, run_import

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(home(settings.directory, "logyard-demo-spark-", DATA))
        first, second, out = (directory / name for name in DATA)
        demo = run_demo(settings._replace(directory=first), output)
        steps = Steps(output)
        stack.enter_context(steps.progress)
        audits: dict[str, dict[str, Any]] = {}
        digests: dict[str, Mapping[str, Any]] = {}
        with running(first, steps, "start the first yard") as cluster:
            given = options(cluster)
            with steps.step("export to Parquet"):
                exported = run_export(spark, Export(given, out))
            with running(second, steps, "start a second yard") as other:
                with steps.step("import into the second yard"):
                    imported = run_import(spark, Import(out, servers(other)))
                with steps.step("read both yards, compare hashes"):
                    digests |= {"first": digest_logs(spark, given), "second": digest_logs(spark, options(other))}
                for name, one in (("first", cluster), ("second", other)):
                    with steps.step(f"audit the {name} yard, running"):
                        audits[f"{name}, running"] = run_audit(spark, options(one))
        for name, path in (("first", first), ("second", second)):
            with steps.step(f"audit the {name} yard, stopped"):
                audits[f"{name}, stopped"] = run_audit(spark, {"path": str(path)})
        with steps.step("read the stopped directories"):
            digests["stopped"] = digest_logs(spark, {"path": str(second), "subscribePattern": ".*"})
        with steps.step("plot"):
            plots = plot(directory, digests["first"], audits)
        fields = report(demo, exported, imported, digests, audits)
    fields |= {
        "plots": [str(path) for path in plots], "step_seconds": {**steps.seconds, "demo": demo["seconds"]},
        "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip
    return fields


@contextlib.contextmanager
def running(directory: Path, steps: Steps, what: str) -> Iterator[LocalCluster]:
    """Run a cluster in a directory; it is stopped in order at the end."""
    with LocalCluster(directory, NODES) as cluster:
        with steps.step(what):
            cluster.start()
        yield cluster
        cluster.stop()


def servers(cluster: LocalCluster) -> dict[str, str]:
    """Return where a cluster is, as an option of the data source."""
    return {"servers": ",".join(cluster.addresses)}


def options(cluster: LocalCluster) -> dict[str, str]:
    """Return the data source's options for all of its logs."""
    return {**servers(cluster), "subscribePattern": ".*"}


def report(
    demo: Mapping[str, Any], exported: Mapping[str, Any], imported: Mapping[str, Any],
    digests: Mapping[str, Mapping[str, Any]], audits: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the figures. `ok` needs every goal."""
    first = digests["first"]
    equal = sum(all(other.get(log) == digest for other in digests.values()) for log, digest in first.items())
    goals = {
        "the demo reached its goals": bool(demo["ok"]),
        "everything was exported": exported["ok"] and exported["logs"] == len(first),
        "everything was imported": imported["ok"] and imported["rows"] == exported["rows"],
        "every hash of both yards is equal": equal == len(first) == len(digests["second"]) == len(digests["stopped"]),
        **{f"audit of the yard: {name}": bool(one["ok"]) for name, one in audits.items()},
    }
    problems = [f"{name}: {text}" for name, one in audits.items() for text in one["problems"]]
    problems += [f"demo: missed: {goal}" for goal, reached in demo["goals"].items() if not reached]
    problems += [f"demo: {text}" for text in demo["problems"]]
    return {
        "ok": all(goals.values()), "goals": goals, "logs": exported["logs"], "rows": exported["rows"],
        "payload_bytes": exported["payload_bytes"], "parts": exported["parts"], "file_bytes": exported["file_bytes"],
        "appended": imported["appended"], "equal": equal, "copies": sum(one["copies"] for one in audits.values()),
        "units": sum(one["units"] for one in audits.values()),
        "bytes_hashed": sum(one["bytes"] for one in audits.values()), "digest": exported["digest"],
        "amplification": {name: one["amplification"] for name, one in audits.items()},
        "worker_peak_bytes": max(one["worker_peak_bytes"] for one in audits.values()),
        "problem_count": len(problems) + len(imported["failures"]), "problems": [*imported["failures"], *problems],
    }  # fmt: skip


def plot(directory: Path, digests: Mapping[str, Any], audits: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Draw two pictures: bytes by the size of logs; live and dead bytes by file and generation."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    made = []
    sizes = sorted(digest.payload_bytes for digest in digests.values())
    edges = [0] + [1 << power for power in range(10, 41, 2)]
    bars = [
        (low, sum(size for size in sizes if low <= size < high))
        for low, high in zip(edges, [*edges[1:], 1 << 62], strict=True)
    ]
    last = max((number for number, (_, total) in enumerate(bars) if total), default=0)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.bar([bytes_text(low) for low, _ in bars[: last + 1]], [total / 2**20 for _, total in bars[: last + 1]])
    axes.set(title=f"Payload of {len(sizes)} logs", xlabel="log's payload, from", ylabel="MiB, all logs of that size")
    made.append(directory / "bytes-by-log-size.png")
    figure.savefig(made[-1])
    pyplot.close(figure)
    names, live, dead = [], [], []
    for yard in ("first", "second"):
        for path, one in audits[f"{yard}, stopped"]["files"].items():
            names.append(f"{yard} {short(path)}")
            live.append(one["live"] / 2**20)
            dead.append((one["stored"] - one["live"]) / 2**20)
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.25 * len(names)), layout="constrained")
    axes.barh(names, live, label="live")
    axes.barh(names, dead, left=live, label="dead")
    axes.invert_yaxis()
    axes.set(title="Payload bytes by WAL file and generation", xlabel="MiB")
    axes.legend()
    made.append(directory / "live-and-dead-bytes.png")
    figure.savefig(made[-1])
    pyplot.close(figure)
    return made


def short(path: str) -> str:
    """Return a file of a node, for an axis."""
    node, folder, name = path.split("/")[:3]
    return f"{node} {name if folder == 'payloads' else 'wal ' + (name.removesuffix('.wal').lstrip('0') or '0')}"


def show_demo_spark(fields: Mapping[str, Any], output: Output) -> None:
    """Show the table, goals that were missed, problems, and where the plots are."""
    shown: Mapping[str, Callable[[Any], str]] = {
        "count": lambda value: f"{value:,}", "bytes": bytes_text, "seconds": lambda value: f"{value:.1f} s",
    }  # fmt: skip
    output.table(
        "logyard spark demo", ("what", "figure"), [(name, shown[unit](fields[key])) for name, key, unit in ROWS]
    )
    for goal, reached in fields["goals"].items():
        if not reached:
            output.say(f"MISSED: {goal}")
    for problem in fields["problems"][:20]:
        output.say(f"  {problem}")
    for path in fields["plots"]:
        output.say(path)
    if fields["ok"]:
        output.say("Both yards, the export and every copy hold the same payloads.")
