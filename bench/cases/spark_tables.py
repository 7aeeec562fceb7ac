"""The tables case of `logyard bench spark`: JSON records of logs to a Delta table of 100 partitions, beside Spark's own
Parquet sink over the same stream."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .spark_rounds import Ground, alternating, took

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = 53_000
LOGS = 10
SHOPS = 100
FRAME = 1000
SCHEMA = "time string, shop string, user string, amount double, n long, note string"


def tables_case(ground: Ground) -> dict[str, Any]:
    """Measure the seconds of both, and how they compare."""
    given = {**ground.servers, "subscribePattern": "commits-.*"}
    if "tables" not in ground.filled:
        ground.filled.add("tables")
        fill(ground)
    places = ground.directory / "tables"
    found = alternating({
        "ours": lambda: took(lambda: delta(ground, given, places / f"delta-{ground.number()}")),
        "parquet": lambda: took(lambda: parquet(ground, given, places / f"parquet-{ground.number()}")),
    })  # fmt: skip
    shutil.rmtree(places)
    ours, null = found["ours"], found["parquet"]
    return {
        "tables_s": round(ours.wall_s, 2), "tables_parquet_s": round(null.wall_s, 2),
        "tables_ratio": round(null.wall_s / ours.wall_s, 3), "tables_cpu_ratio": round(null.cpu_s / ours.cpu_s, 3),
    }  # fmt: skip


def delta(ground: Ground, given: dict[str, str], out: Path) -> None:
    """Run the job to a table that is new."""
    from logyard.pipeline.jobs.tables import Tables, run_tables

    done = run_tables(ground.spark, Tables(given, "commits", out))
    assert (done["rows_written"], done["rows_rejected"]) == (RECORDS, 0), done


def parquet(ground: Ground, given: dict[str, str], out: Path) -> None:
    """Run the same stream through `from_json` into Parquet files of the same partitions."""
    stream = ground.spark.readStream.format("logyard").options(**given, includePayload="inline")
    parsed = stream.option("startingOffsets", "earliest").load().selectExpr(
        "log as _log", "offset as _offset", f"from_json(cast(payload as string), '{SCHEMA}') as row"
    )  # fmt: skip
    rows = parsed.selectExpr("_log", "_offset", "row.*", "substring(row.time, 1, 13) as _hour")
    writing = rows.writeStream.format("parquet").partitionBy("shop", "_hour").option("path", str(out / "table"))
    writing.option("checkpointLocation", str(out / "point")).trigger(availableNow=True).start().awaitTermination()


def fill(ground: Ground) -> None:
    """Append the records, and store the table's rules."""
    yard = ground.yard
    names = [f"commits-{number}" for number in range(LOGS)]
    yard.create_many(names)
    for number, name in enumerate(names):
        for first in range(0, RECORDS // LOGS, FRAME):
            yard.log(name).append_many(list(records(number, first, min(first + FRAME, RECORDS // LOGS))))
    yard.create("tables", machine="kv")
    kv = yard.kv("tables")
    kv.put(b"tables/commits/schema", b'{"user": "string", "amount": "double", "n": "long", "note": "string"}')
    kv.put(b"tables/commits/dimensions", b'["shop"]')


def records(log: int, first: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield JSON records of about 250 bytes."""
    for n in range(first, end):
        time = f"2026-11-23T09:{n % 60:02}:{log:02}Z"
        row = {
            "time": time,
            "shop": f"shop-{(n * LOGS + log) % SHOPS:03}",
            "user": f"user-{n}",
            "amount": n / 8,
            "n": n,
        }
        yield b"", json.dumps({**row, "n": n, "note": f"{n:>120}"}).encode()
