"""Export, import and digests on a real cluster, without a JVM: what goes out comes back, also after a kill."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from xxhash import xxh3_128_digest

from logyard.client.sync import Yard, connect_sync
from logyard.pipeline.errors import OptionError
from logyard.pipeline.jobs import export as exporting
from logyard.pipeline.jobs import manifest as manifests
from logyard.pipeline.jobs.digests import digest_logs, ranges_of
from logyard.pipeline.jobs.export import UNFINISHED, Export, export_parts, make_plan, plan_tasks, run_export
from logyard.pipeline.jobs.importing import Import, LogImport, run_import
from logyard.pipeline.jobs.manifest import FOOTER, ExportError, Part, folder_of, read_manifest
from logyard.pipeline.jobs.parts import is_whole, read_part
from logyard.pipeline.opening import open_source
from logyard.pipeline.schema import arrow_schema
from logyard.pipeline.sources import Reading, Wanted
from logyard.service.local_cluster import LocalCluster

from .here import Here

ODD = "..-_" + "x" * 124
LONG = bytes(range(256)) * (5 << 12)  # 5 MiB
RECORDS = [(b"m%d" % n, None if n % 9 == 4 else (b"%d " % n) * (n * 37 % 4000)) for n in range(150)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("jobs"), 1) as found:
        found.start()
        with connect_sync(found.addresses) as yard:
            fill(yard)
        yield found


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("second"), 1) as found:
        found.start()
        yield found


@pytest.fixture
def target(second: LocalCluster) -> Iterator[Yard]:
    """An empty yard."""
    with connect_sync(second.addresses) as yard:
        for row in yard.list():
            yard.delete(row["name"])
        yield yard


def fill(yard: Yard) -> None:
    yard.create_many(["plain", "cut", "empty", "hollow", ODD])
    for name in ("plain", "cut", "hollow", ODD):
        for at in range(0, 150, 25):
            yard.log(name).append_many(RECORDS[at : at + 25])
    yard.log("cut").truncate(60)
    yard.log("hollow").truncate(150)
    yard.log("plain").append(b"long", LONG)


def given(cluster: LocalCluster) -> dict[str, str]:
    return {"servers": ",".join(cluster.addresses), "subscribePattern": ".*"}


def job(cluster: LocalCluster, out: Path, **more: Any) -> Export:
    return Export(given(cluster), out, **more)


def servers(cluster: LocalCluster) -> dict[str, str]:
    return {"servers": ",".join(cluster.addresses)}


def spark() -> Any:
    return Here()


@pytest.mark.parametrize("payloads", ["column", "files"])
def test_an_export_comes_back_with_its_offsets_and_hashes(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, payloads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(exporting, "INLINE_BYTES", 1 << 20)
    out = tmp_path / "out"
    found = run_export(spark(), job(cluster, out, payloads=payloads, part_bytes=200_000))
    assert (found["logs"], found["rows"]) == (5, 151 + 90 + 150) and found["parts"] > 5
    file = next((out / "data" / folder_of("plain")).glob("*00.parquet"), None) or next(
        (out / "data" / folder_of("plain")).glob("*.parquet")
    )
    rows = parquet.read_table(file, partitioning=None).to_pylist()
    assert rows[0]["offset"] == 0 or rows[0]["meta"].startswith(b"m")
    assert any(path.stat().st_size == len(LONG) for path in out.rglob("*.payload"))
    back = run_import(spark(), Import(out, servers(second)))
    assert (back["ok"], back["appended"], back["compared"]) == (True, found["rows"], 0)
    assert digest_logs(spark(), given(second)) == digest_logs(spark(), given(cluster))
    bounds = {name: tuple(target.log(name).latest()) for name in ("plain", "cut", "empty", "hollow", ODD)}
    assert bounds == {"plain": (0, 151), "cut": (60, 150), "empty": (0, 0), "hollow": (150, 150), ODD: (0, 150)}
    assert target.log("plain").read(150).payload == LONG
    again = run_import(spark(), Import(out, servers(second)))
    assert (again["ok"], again["appended"], again["compared"]) == (True, 0, found["rows"])


def test_an_export_goes_on_after_a_kill(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, put, left = tmp_path / "out", exporting.PartWriter.put, [3]

    def dies(self: Any, rows: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return put(self, rows)

    monkeypatch.setattr(exporting.PartWriter, "put", dies)
    with pytest.raises(KeyboardInterrupt):
        run_export(spark(), job(cluster, out))
    with pytest.raises(ExportError, match="not finished"):
        read_manifest(out)
    monkeypatch.undo()
    with connect_sync(cluster.addresses) as yard:
        yard.create("later")
        yard.log("later").append(b"", b"later")
        found = run_export(spark(), job(cluster, out))
        yard.delete("later")
    assert 0 < found["parts_skipped"] < found["parts"] and found["logs"] == 5, "the ranges are the plan's"
    whole = run_export(spark(), job(cluster, tmp_path / "whole"))
    assert (found["rows"], found["digest"]) == (whole["rows"], whole["digest"])
    rest = run_export(spark(), job(cluster, out))
    assert rest["parts_skipped"] == rest["parts"] and rest["digest"] == whole["digest"]
    with pytest.raises(ExportError, match="something else"):
        run_export(spark(), job(cluster, out, payloads="none"))


def test_a_part_that_is_not_whole_is_written_again(cluster: LocalCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run_export(spark(), job(cluster, out))
    cut, other = sorted((out / "data").rglob("*.parquet"))[:2]
    cut.write_bytes(cut.read_bytes()[:-20])
    other.write_bytes(cut.read_bytes())
    again = run_export(spark(), job(cluster, out))
    assert again["parts_skipped"] == again["parts"] - 2 and again["digest"] == first["digest"]


@pytest.mark.parametrize("payloads", ["column", "files", "none"])
def test_a_part_that_is_damaged_behind_its_footer_is_written_again(
    cluster: LocalCluster, tmp_path: Path, payloads: str
) -> None:
    export = job(cluster, tmp_path, payloads=payloads)
    first = run_export(spark(), export)
    damaged = 1
    file = max((tmp_path / "data" / folder_of(ODD)).glob("*.parquet"))
    raw = bytearray(file.read_bytes())
    raw[20:60] = bytes(40)
    file.write_bytes(raw)
    if payloads == "files":
        max((tmp_path / "data" / folder_of("cut")).glob("*.payload")).unlink()
        damaged = 2
    again = run_export(spark(), export)
    assert again["parts_skipped"] == again["parts"] - damaged and again["digest"] == first["digest"]
    last = run_export(spark(), export)
    assert last["parts_skipped"] == last["parts"] and last["digest"] == first["digest"]


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)


@pytest.mark.parametrize("links", [True, False])
def test_two_runs_of_an_export_have_one_plan(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    export = job(cluster, tmp_path)
    ranges, plans = ranges_of, list[dict[str, Any]]()
    if not links:
        without_links(monkeypatch)

    def slow(options: Any) -> Any:
        found = ranges(options)
        monkeypatch.setattr(exporting, "ranges_of", ranges)
        plans.append(make_plan(export))
        return found

    monkeypatch.setattr(exporting, "ranges_of", slow)
    assert make_plan(export) == plans[0]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_without_links_who_writes_once_waits_for_who_is_about_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    path, replace, flock, waits = tmp_path / "plan.json", os.replace, fcntl.flock, threading.Event()

    def locks(descriptor: int, how: int) -> None:
        waits.set()
        flock(descriptor, how)

    def late(first: Path, then: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(fcntl, "flock", locks)
        others.append(pool.submit(manifests.write_once, path, "another"))
        assert waits.wait(30)
        replace(first, then)

    others: list[Future[bool]] = []
    monkeypatch.setattr(os, "replace", late)
    with ThreadPoolExecutor(1) as pool:
        assert manifests.write_once(path, "one")
    assert not others[0].result() and path.read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"assign": '{"plain": [3, 5]}'}, {"plain": (3, 5)}),
        ({"subscribe": "plain,cut", "startingOffsets": '{"plain": 140}', "endingOffsets": '{"cut": 70}'},
         {"plain": (140, 151), "cut": (60, 70)}),
        ({"subscribe": "cut", "startingOffsets": '{"cut": 0}', "failOnDataLoss": "false"}, {"cut": (60, 150)}),
        ({"subscribe": "plain", "startingTimestamp": "32503680000000", "startingOffsetsByTimestampStrategy": "latest"},
         {"plain": (151, 151)}),
        ({"subscribe": "plain", "endingTimestamp": "1"}, {"plain": (151, 151)}),
    ],
)  # fmt: skip
def test_an_export_has_the_ranges_that_its_options_say(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, more: dict[str, str],
    wanted: dict[str, tuple[int, int]],
) -> None:  # fmt: skip
    found = run_export(spark(), Export({**servers(cluster), **more}, tmp_path))
    assert found["rows"] == sum(end - first for first, end in wanted.values())
    assert {log.log: (log.start, log.end) for log in read_manifest(tmp_path)[1]} == wanted
    assert run_import(spark(), Import(tmp_path, servers(second)))["ok"]
    assert {name: tuple(target.log(name).latest()) for name in wanted} == wanted


def test_an_export_of_what_is_not_there_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^assign: there is no append log 'nope'"):
        run_export(spark(), Export({**servers(cluster), "assign": '{"nope": [0, 1]}'}, tmp_path))
    with pytest.raises(OptionError, match=r"^startingTimestamp: log 'plain' has no record"):
        run_export(
            spark(), Export({**servers(cluster), "subscribe": "plain", "startingTimestamp": "32503680000000"}, tmp_path)
        )
    assert not any(tmp_path.iterdir())


def test_a_log_with_nothing_to_compare_is_not_imported(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path
) -> None:
    run_export(spark(), Export({**servers(cluster), "subscribe": "plain,cut,hollow"}, tmp_path))
    target.create_many(["plain"], start=500)
    target.log("plain").append_many([(b"another", None)] * 5)
    target.create_many(["cut"], start=100)
    target.create_many(["hollow"])
    target.log("hollow").append_many([(b"another", None)] * 5)
    back = run_import(spark(), Import(tmp_path, servers(second)))
    assert not back["ok"] and back["appended"] == back["compared"] == 0 and back["passed_over"] == 151 + 40
    for found, said in zip(
        back["failures"], ("'cut' begins at 100", "'hollow' ends at 5", "'plain' begins at 500"), strict=True
    ):
        assert said in found
    # What was truncated since it was imported is told, and is no failure.
    for name in ("plain", "cut", "hollow"):
        target.delete(name)
    assert run_import(spark(), Import(tmp_path, servers(second)))["ok"]
    target.log("plain").truncate(30)
    back = run_import(spark(), Import(tmp_path, servers(second)))
    assert (back["ok"], back["compared"], back["passed_over"]) == (True, 121 + 90, 30)


def test_a_log_that_goes_while_it_is_compared_ends_no_import(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_export(spark(), Export({**servers(cluster), "subscribe": "plain,cut"}, tmp_path))
    assert run_import(spark(), Import(tmp_path, servers(second)))["ok"]
    plain = LogImport._compare
    changes: dict[str, Callable[[], object]] = {
        "plain": lambda: target.log("plain").truncate(30),
        "cut": lambda: target.delete("cut"),
    }

    def late(self: LogImport, end: int) -> None:
        changes.pop(self.part.log, int)()
        plain(self, end)

    monkeypatch.setattr(LogImport, "_compare", late)
    back = run_import(spark(), Import(tmp_path, servers(second)))
    (deleted,) = back["failures"]
    assert "'cut'" in deleted
    assert not back["ok"] and (back["compared"], back["appended"]) == (121, 0) and not changes


def test_an_export_that_was_killed_at_its_plan_begins_again(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manifests, "_written", dies)
    with pytest.raises(KeyboardInterrupt):
        run_export(spark(), job(cluster, tmp_path))
    monkeypatch.undo()
    (tmp_path / ".plan.json.0123.tmp").write_text("{")
    assert run_export(spark(), job(cluster, tmp_path))["logs"] == 5


@pytest.mark.parametrize("payloads", ["column", "files"])
def test_an_attempt_that_is_late_spoils_no_part(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, payloads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The first attempt of each part stops behind its first rows, another one writes all of it, and the first goes
    on."""
    put, begun = exporting.PartWriter.put, set[Wanted]()
    made = make_plan(job(cluster, tmp_path, payloads=payloads))
    tasks = plan_tasks(made, job(cluster, tmp_path, payloads=payloads))

    def stops(self: Any, rows: Any) -> Any:
        first = self.wanted not in begun
        begun.add(self.wanted)
        found = put(self, rows.slice(0, 1)) if first and rows.num_rows > 1 else None
        if found is None and first and rows.num_rows > 1:
            with closing(open_source(job(cluster, tmp_path, payloads=payloads).options)) as source:
                export = job(cluster, tmp_path, payloads=payloads)
                assert list(exporting.write_parts(export, str(made["export"]), source, [self.wanted]))
            return put(self, rows.slice(1))
        return put(self, rows)

    monkeypatch.setattr(exporting.PartWriter, "put", stops)
    for task in tasks:
        list(export_parts(job(cluster, tmp_path, payloads=payloads), str(made["export"]), task))
    monkeypatch.undo()
    left = tmp_path / "data" / folder_of("plain") / f".x{UNFINISHED}"
    left.write_bytes(b"of an attempt that was killed")
    found = run_export(spark(), job(cluster, tmp_path, payloads=payloads))
    assert found["parts_skipped"] == found["parts"] and not left.exists()
    assert run_import(spark(), Import(tmp_path, servers(second)))["ok"]
    assert digest_logs(spark(), given(second)) == digest_logs(spark(), given(cluster))


def test_two_attempts_at_once_do_not_mix_their_bytes(cluster: LocalCluster, tmp_path: Path) -> None:
    export = job(cluster, tmp_path)
    made = make_plan(export)
    (wanted,) = (one for task in plan_tasks(made, export) for one in task if one.log == "plain")
    with closing(open_source(export.options)) as source:
        rows = pyarrow.Table.from_batches(list(source.read([wanted], export.options.reading))).combine_chunks()
        (batch,) = rows.to_batches()
        first, second = (exporting.PartWriter(export, str(made["export"]), source, wanted) for _ in range(2))
        for writer in (first, second):
            assert writer.put(batch.slice(0, 10)) is None
        for writer in (first, second):
            part = writer.put(batch.slice(10))
            assert part is not None and sum(1 for _ in read_part(tmp_path, part, 0)) == 151


def test_an_import_goes_on_after_a_kill_and_stores_nothing_twice(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_export(spark(), job(cluster, out))
    sent, frames = LogImport._sent, [0]

    def dies(self: LogImport, offsets: range, count: int) -> None:
        frames[0] += 1
        if frames[0] == 3:
            raise KeyboardInterrupt  # It was appended, and nobody noted it.
        sent(self, offsets, count)

    monkeypatch.setattr(LogImport, "_sent", dies)
    with pytest.raises(KeyboardInterrupt):
        run_import(spark(), Import(out, servers(second)))
    monkeypatch.undo()
    back = run_import(spark(), Import(out, servers(second)))
    assert back["ok"] and back["compared"] > 0 and back["appended"] + back["compared"] == back["rows"]
    assert digest_logs(spark(), given(second)) == digest_logs(spark(), given(cluster))


def test_two_imports_at_once_store_everything_once(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_export(spark(), job(cluster, out))
    send, busy = LogImport._send, [False]

    def overtaken(self: LogImport, frame: Any) -> None:
        if not busy[0]:
            busy[0] = True
            run_import(spark(), Import(out, servers(second)))
        send(self, frame)

    monkeypatch.setattr(LogImport, "_send", overtaken)
    back = run_import(spark(), Import(out, servers(second)))
    assert back["ok"] and back["compared"] > 0
    assert digest_logs(spark(), given(second)) == digest_logs(spark(), given(cluster))


def test_a_log_that_differs_is_named_and_the_others_are_imported(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_export(spark(), job(cluster, out))
    target.create_many(["plain", "cut"])
    target.log("plain").append(b"m0", b"another")
    back = run_import(spark(), Import(out, servers(second)))
    assert not back["ok"] and len(back["failures"]) == 2
    assert "log 'cut' ends at 0, its records begin at 60" in back["failures"][0]
    assert "log 'plain': its record 0 is not the export's" in back["failures"][1]
    assert target.log(ODD).latest() == (0, 150)
    with pytest.raises(ExportError, match="no log 'nope'"):
        run_import(spark(), Import(out, servers(second), logs=("nope",)))


@pytest.mark.parametrize("made", [{"machine": "kv"}, {"machine": "queue"}, {"compact": "key"}])
def test_what_takes_no_records_is_named_and_the_others_are_imported(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, made: dict[str, Any]
) -> None:
    run_export(spark(), job(cluster, tmp_path))
    target.create("plain", **made)
    back = run_import(spark(), Import(tmp_path, servers(second)))
    (failure,) = back["failures"]
    assert failure.startswith("log 'plain': ") and back["appended"] == 90 + 150
    target.delete("plain")
    assert run_import(spark(), Import(tmp_path, servers(second)))["ok"]


@pytest.mark.parametrize("what", ["payload", "manifest", "part", "file", "gone"])
def test_a_damaged_export_is_refused(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "out"
    run_export(spark(), job(cluster, out, payloads="files" if what in ("file", "gone") else "column"))
    if what == "manifest":
        lines = (out / "manifest.jsonl").read_text().splitlines()
        (out / "manifest.jsonl").write_text("\n".join(lines[:-1]))
        with pytest.raises(ExportError, match="cut short"):
            run_import(spark(), Import(out, servers(second)))
        return
    path = max((out / "data" / folder_of("cut")).iterdir(), key=lambda one: one.stat().st_size)
    if what == "part":
        other = next((out / "data" / folder_of(ODD)).glob("*.parquet"))
        path.write_bytes(other.read_bytes())
    elif what == "gone":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    back = run_import(spark(), Import(out, servers(second)))
    assert not back["ok"] and len(back["failures"]) == 1 and str(path.parent) in back["failures"][0]


@pytest.mark.parametrize("column", ["payload_file", "payload_size", "kind", "meta", "offset"])
def test_a_part_without_a_column_is_named_and_written_again(
    cluster: LocalCluster, second: LocalCluster, target: Yard, tmp_path: Path, column: str
) -> None:
    export = job(cluster, tmp_path)
    first = run_export(spark(), export)
    path = next((tmp_path / "data" / folder_of(ODD)).glob("*.parquet"))
    kept = {FOOTER: parquet.read_metadata(path).metadata[FOOTER]}
    table = parquet.read_table(path, partitioning=None).drop_columns([column])
    parquet.write_table(table.replace_schema_metadata(kept), path)
    back = run_import(spark(), Import(tmp_path, servers(second)))
    (failure,) = back["failures"]
    assert str(path) in failure and column in failure and back["appended"] == 151 + 90
    again = run_export(spark(), export)
    assert again["parts_skipped"] == again["parts"] - 1 and again["digest"] == first["digest"]
    assert run_import(spark(), Import(tmp_path, servers(second)))["ok"]


@pytest.mark.parametrize("payloads", ["column", "none"])
@pytest.mark.parametrize("error", [pyarrow.ArrowNotImplementedError, TypeError, struct.error])
def test_a_part_that_arrow_can_not_read_is_written_again(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], payloads: str
) -> None:
    """As with a bit of a footer that is another: it may be a type that nobody knows."""

    def fails(*_: object) -> Any:
        raise error("no such type")

    export = job(cluster, tmp_path, payloads=payloads)
    made = str(make_plan(export)["export"])
    for task in plan_tasks(make_plan(export), export):
        (part, *_) = [Part(**result["part"]) for result in export_parts(export, made, task)]
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fails)
    assert not is_whole(tmp_path, part, payloads != "none")
    with pytest.raises(ExportError, match=rf"{folder_of(part.log)}.*: no such type"):
        list(read_part(tmp_path, part, 0))


def test_the_plan_and_the_manifest_are_plain(cluster: LocalCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run_export(spark(), job(cluster, out, payloads="none"))
    header, logs = read_manifest(out)
    assert header["payloads"] == "none" and [log.log for log in logs] == sorted(log.log for log in logs)
    assert json.loads((out / "plan.json").read_text())["export"] == header["export"] == found["export"]
    with pytest.raises(ExportError, match="no payloads"):
        run_import(spark(), Import(out, {"servers": "127.0.0.1:1"}))
    (out / "data" / "x").mkdir()
    with pytest.raises(ExportError, match="not empty"):
        run_export(spark(), job(cluster, out / "data"))


class Stub:
    """A source that answers with these offsets of log "a", a batch each."""

    def __init__(self, *batches: Sequence[int]) -> None:
        self.batches = batches

    def read(self, _: Sequence[Wanted], reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        for offsets in self.batches:
            bodies = [b"%d" % offset for offset in offsets]
            yield pyarrow.RecordBatch.from_pylist(
                [{"log": "a", "offset": offset, "index": offset, "term": 1, "timestamp": 0, "kind": "record",
                  "meta": b"", "payload_size": len(body), "payload_hash": xxh3_128_digest(body), "payload": body}
                 for offset, body in zip(offsets, bodies, strict=True)],
                arrow_schema(reading.payloads),
            )  # fmt: skip

    def close(self) -> None:
        """There is nothing to close."""


def test_each_part_has_its_own_records_where_an_answer_has_several_ranges_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Export({"path": str(tmp_path), "subscribePattern": ".*"}, tmp_path)
    wanted = [Wanted("a", 1, 0, 10), Wanted("a", 1, 10, 20)]
    source = Stub([*range(5), *range(10, 20)], range(5, 10))
    monkeypatch.setattr(exporting, "open_source", lambda _: source)
    parts = [Part(**result["part"]) for result in export_parts(export, "mine", wanted)]
    found = {part.first: [row.offset for row in read_part(tmp_path, part, 0)] for part in parts}
    assert found == {0: [*range(10)], 10: [*range(10, 20)]}
    again, other = export_parts(export, "mine", wanted)
    assert again["skipped"] == other["skipped"] == 1


@pytest.mark.parametrize("payloads", ["column", "none"])
def test_a_part_with_records_of_another_range_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payloads: str
) -> None:
    """As an earlier build wrote them, with a digest of what is in them."""
    export = Export({"path": str(tmp_path), "subscribePattern": ".*"}, tmp_path, payloads=payloads)
    wanted, reading = Wanted("a", 1, 0, 10), export.options.reading
    (batch,) = Stub([*range(5), *range(10, 15)]).read([wanted], reading)
    spoiled = exporting.PartWriter(export, "mine", open_source(export.options), wanted).put(batch)
    assert spoiled is not None and exporting.existing(export, "mine", wanted) is not None
    if payloads == "column":
        with pytest.raises(ExportError, match="record 10 is where record 5 belongs"):
            list(read_part(tmp_path, spoiled, 0))
    monkeypatch.setattr(exporting, "open_source", lambda _: Stub(range(10)))
    (again,) = export_parts(export, "mine", [wanted])
    (last,) = export_parts(export, "mine", [wanted])
    assert (again["skipped"], last["skipped"]) == (0, 1)


def test_a_part_is_only_taken_for_its_own_export_and_range(tmp_path: Path) -> None:
    export, wanted = Export({"path": "x"}, tmp_path), Wanted("plain", 1, 3, 5)
    path = tmp_path / exporting.path_of(wanted)
    path.parent.mkdir(parents=True)
    mine = Part("mine", "plain", 1, 3, 5, "f", rows=2)

    def found(part: Part, rows: int = 2) -> Part | None:
        table = pyarrow.table({"offset": list(range(rows))})
        parquet.write_table(table.replace_schema_metadata({FOOTER: json.dumps(part._asdict())}), path)
        return exporting.existing(export, "mine", wanted)

    assert found(mine) == mine._replace(bytes=path.stat().st_size)
    for other in (
        mine._replace(export="another"), mine._replace(log="cut"), mine._replace(first=2), mine._replace(end=6),
        mine._replace(rows=3),
    ):  # fmt: skip
        assert found(other) is None, other
    assert found(mine, rows=1) is None, "a file with fewer rows than it says"
    assert found(mine._replace(rows=1), rows=1) is None, "and one that is short and says so"
