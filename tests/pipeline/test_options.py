"""Options: every wrong one is refused by name; the documented table is the code's."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.pipeline.errors import OptionError
from logyard.pipeline.options import (
    BATCH,
    EARLIEST,
    ELSEWHERE,
    LATEST,
    OPTIONS,
    STREAM,
    foreign_table,
    options_table,
    parse_loaded,
    parse_options,
)
from tests.source_tree import ROOT

HERE = {"servers": "127.0.0.1:4000", "subscribe": "a"}


def test_defaults() -> None:
    found = parse_options(HERE)
    assert found.servers == ("127.0.0.1:4000",) and found.names == ("a",) and found.path is None
    assert (found.starting, found.ending) == (EARLIEST, LATEST)
    reading = found.reading
    assert (reading.payloads, reading.verify, reading.gaps, reading.inline_bytes) == (False, False, False, 16 << 20)
    assert found.max_partition_bytes == 128 << 20 and found.min_partitions is None


def test_all_of_them_and_any_case() -> None:
    found = parse_options(
        {
            "SERVERS": "127.0.0.1:1, localhost:2", "subscribepattern": "a.*", "startingOffsets": '{"a": 5, "b": -1}',
            "endingoffsets": '{"a": 7}', "includePayload": "inline", "maxInlineBytes": "1m", "verify": "TRUE",
            "failOnDataLoss": "false", "minPartitions": "3", "maxPartitionBytes": "2GiB", "timeoutSeconds": "1.5",
            "tlsCa": "c", "tlsCertificate": "d", "tlsKey": "e",
        }
    )  # fmt: skip
    assert found.servers == ("127.0.0.1:1", "localhost:2") and found.names is None and found.pattern == "a.*"
    assert found.starting == {"a": 5, "b": -1} and found.ending == {"a": 7}
    assert found.reading.payloads and found.reading.verify and found.reading.gaps
    assert found.reading.inline_bytes == 1 << 20 and found.max_partition_bytes == 2 << 30
    assert found.timeout_s == 1.5 and found.tls_key == "e"
    ranges = parse_options({"servers": "h:1", "assign": '{"a": [1, 5], "b": [-2, -1]}'})
    assert ranges.assign == {"a": (1, 5), "b": (EARLIEST, LATEST)} and ranges.names == ("a", "b")
    assert parse_options({"servers": "h:1", "assign": '["x"]'}).assign == {"x": (EARLIEST, LATEST)}


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("startingOffset", HERE | {"startingOffset": "earliest"}),
        ("maxOffsetsPerTrigger", HERE | {"maxOffsetsPerTrigger": "10"}),
        ("servers", {"subscribe": "a"}),
        ("path", HERE | {"path": "."}),
        ("path", {"subscribe": "a", "path": "no-such-directory"}),
        ("servers", HERE | {"servers": "somewhere"}),
        ("servers", HERE | {"servers": ""}),
        ("subscribe", {"servers": "h:1"}),
        ("subscribe", HERE | {"subscribe": " , "}),
        ("subscribePattern", HERE | {"subscribePattern": ".*"}),
        ("subscribePattern", {"servers": "h:1", "subscribePattern": "("}),
        ("assign", {"servers": "h:1", "assign": "a,b"}),
        ("assign", {"servers": "h:1", "assign": '{"a": [1]}'}),
        ("assign", {"servers": "h:1", "assign": '{"a": [-1, 5]}'}),
        ("startingOffsets", HERE | {"startingOffsets": "latest"}),
        ("startingOffsets", HERE | {"startingOffsets": '{"a": "1"}'}),
        ("startingOffsets", HERE | {"startingOffsets": '{"a": -3}'}),
        ("startingOffsets", {"servers": "h:1", "assign": '{"a": [1, 5]}', "startingOffsets": "earliest"}),
        ("startingOffsets", HERE | {"startingOffsets": "earliest", "startingTimestamp": "5"}),
        ("endingOffsets", HERE | {"endingOffsets": '{"a": -2}'}),
        ("endingOffsets", HERE | {"endingOffsets": "earliest"}),
        ("endingOffsets", HERE | {"endingOffsets": "latest", "endingOffsetsByTimestamp": '{"a": 5}'}),
        ("startingTimestamp", HERE | {"startingTimestamp": "2026-01-01"}),
        ("startingOffsetsByTimestampStrategy", HERE | {"startingOffsetsByTimestampStrategy": "none"}),
        ("includePayload", HERE | {"includePayload": "true"}),
        ("maxInlineBytes", HERE | {"maxInlineBytes": "2g"}),
        ("maxInlineBytes", HERE | {"maxInlineBytes": "many"}),
        ("verify", HERE | {"verify": "1"}),
        ("failOnDataLoss", HERE | {"failOnDataLoss": "no"}),
        ("minPartitions", HERE | {"minPartitions": "0"}),
        ("maxPartitionBytes", HERE | {"maxPartitionBytes": "-1"}),
        ("timeoutSeconds", HERE | {"timeoutSeconds": "0"}),
        ("tlsKey", HERE | {"tlsCa": "a", "tlsCertificate": "b"}),
    ],
)  # fmt: skip
def test_a_wrong_one_is_named_first(option: str, given: dict[str, str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(given)
    assert str(caught.value).splitlines()[0].startswith(f"{option}: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("kafka.bootstrap.servers", "kafka.bootstrap.servers: there is no such option; here it is servers"),
        ("kafka.max.poll.records", "kafka.max.poll.records: there is no such option; there is no Kafka client behind"),
        ("includeheaders", "includeHeaders: there is no such option; what a record has beside its payload"),
        ("startingoffset", "startingoffset: there is no such option; is it startingOffsets?"),
        ("something", "something: there is no such option (Spark tells names in lower case); there are servers, path"),
    ],
)
def test_what_is_said_of_an_option_that_is_none(given: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(HERE | {given: "x"})
    assert str(caught.value).startswith(said)


def test_every_option_has_a_meaning_and_a_field() -> None:
    assert len({one.name.lower() for one in OPTIONS}) == len({one.field for one in OPTIONS}) == len(OPTIONS)
    assert all(one.doc.endswith(".") and "|" not in one.doc for one in OPTIONS)


def test_the_documented_table_is_this_one() -> None:
    page = Path(ROOT / "docs" / "guides" / "spark.md").read_text("utf-8")
    for kind in (BATCH, STREAM):
        assert options_table(kind) in page, f"docs/guides/spark.md: put in what options.options_table({kind!r}) gives"


def test_what_is_said_of_kafkas_options_stands_in_the_page_for_those_who_come_from_there() -> None:
    page = Path(ROOT / "docs" / "guides" / "from-kafka.md").read_text("utf-8")
    assert foreign_table() in page, "docs/guides/from-kafka.md: put in what options.foreign_table() gives"
    for name, why in ELSEWHERE.items():
        for kind in (BATCH, STREAM):
            with pytest.raises(OptionError) as caught:
                parse_options(HERE | {name.lower(): "x"}, kind)
            assert str(caught.value) == f"{name}: there is no such option; {why}"


def test_a_directory_alone_means_all_of_its_logs(tmp_path: Path) -> None:
    """As `load("DIR")` gives it."""
    assert parse_options({"path": str(tmp_path)}).pattern == ".*"
    assert parse_options({"path": str(tmp_path), "subscribe": "a"}).pattern is None


def test_a_stream_has_options_of_its_own() -> None:
    found = parse_options(HERE, STREAM)
    assert (found.starting, found.new_logs) == (LATEST, "earliest")
    assert (found.min_rows, found.max_partition_rows) == (1000, 250_000)
    given = {
        "startingOffsets": "earliest", "maxBytesPerTrigger": "5m", "minRowsPerLog": "7", "newLogs": "latest",
        "maxPartitionRows": "9", "consumer": "hints/spark/a", "minPartitions": "3", "failOnDataLoss": "false",
    }  # fmt: skip
    found = parse_options(HERE | given, STREAM)
    assert (found.starting, found.max_bytes, found.min_rows, found.new_logs) == (EARLIEST, 5 << 20, 7, "latest")
    assert (found.max_partition_rows, found.consumer, found.min_partitions) == (9, ("hints", "spark/a"), 3)
    assert parse_options(HERE | {"maxOffsetsPerTrigger": "10"}, STREAM).max_offsets == 10
    assert parse_options(HERE | {"startingOffsetsByTimestamp": '{"a": 5}'}, STREAM).starting == EARLIEST


@pytest.mark.parametrize(
    ("option", "given", "why"),
    [
        ("endingOffsets", HERE | {"endingOffsets": "latest"}, "use availableNow"),
        ("endingTimestamp", HERE | {"endingTimestamp": "5"}, "use availableNow"),
        ("endingOffsetsByTimestamp", HERE | {"endingOffsetsByTimestamp": '{"a": 5}'}, "use availableNow"),
        ("assign", {"servers": "h:1", "assign": '{"a": [1, 5]}'}, "startingOffsets"),
        ("path", {"path": ".", "subscribe": "a"}, "as a batch"),
        ("maxPartitionBytes", HERE | {"maxPartitionBytes": "1m"}, "maxPartitionRows"),
        ("maxTriggerDelay", HERE | {"maxTriggerDelay": "15m"}, "for ever under availableNow"),
        ("minOffsetsPerTrigger", HERE | {"minOffsetsPerTrigger": "5"}, "not together with a greatest one"),
        ("maxBytesPerTrigger", HERE | {"maxBytesPerTrigger": "5", "maxOffsetsPerTrigger": "5"}, "one limit"),
        ("maxOffsetsPerTrigger", HERE | {"maxOffsetsPerTrigger": "0"}, "above 0"),
        ("minRowsPerLog", HERE | {"minRowsPerLog": "x"}, "above 0"),
        ("newLogs", HERE | {"newLogs": "now"}, "earliest or latest"),
        ("consumer", HERE | {"consumer": "hints"}, "a KV group and a key"),
    ],
)  # fmt: skip
def test_what_a_stream_refuses(option: str, given: dict[str, str], why: str) -> None:
    with pytest.raises(OptionError, match=f"^{option}: .*{why}"):
        parse_options(given, STREAM)


@pytest.mark.parametrize(
    "option", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minRowsPerLog", "newLogs", "maxPartitionRows", "consumer"]
)
def test_a_batch_refuses_what_only_a_stream_has(option: str) -> None:
    with pytest.raises(OptionError, match=f"^{option}: "):
        parse_options(HERE | {option: "5"})


def test_a_load_refuses_what_is_wrong_in_both() -> None:
    """Spark says only later whether it is a stream."""
    assert parse_loaded(HERE | {"maxOffsetsPerTrigger": "5"}).max_offsets == 5
    assert parse_loaded(HERE | {"startingOffsets": "latest"}).starting == LATEST
    assert parse_loaded(HERE | {"endingOffsets": "latest"}).ending == LATEST
    with pytest.raises(OptionError, match=r"^endingOffsets: a stream has no end"):
        parse_loaded(HERE | {"endingOffsets": "latest", "maxOffsetsPerTrigger": "5"})
    with pytest.raises(OptionError, match=r"^startingOffsets: a JSON object is expected"):
        parse_loaded(HERE | {"startingOffsets": "soon"})
