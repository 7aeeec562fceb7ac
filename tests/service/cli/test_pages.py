"""`logyard read` gives the records of one log, and none of another that is made under its name meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from logyard.client.log import POLL_BYTES
from logyard.client.sync import Yard, connect_sync
from logyard.protocol.errors import UnknownGroup
from logyard.service.cli import logs
from logyard.service.cli.logs import pages
from logyard.service.cli.payloads import complete, write_payload
from logyard.service.local_cluster import LocalCluster

ANOTHER = "another one has its name"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    directory: Path = tmp_path_factory.mktemp("yard")
    with LocalCluster(directory, 1) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as found:
            yield found


def made(yard: Yard, body: bytes, count: int, **arguments: Any) -> None:
    """Make the log "l" of `count` records with that body, in place of one that is there."""
    if yard.list():
        yard.delete("l")
    yard.create("l", **arguments)
    if count:
        keys = [b"%d" % number for number in range(count)] if arguments else None
        yard.log("l").append_many([(b"", body)] * count, keys=keys)


def reading(yard: Yard, stop: int | None = None, bodies: bool = True) -> Iterator[tuple[Any, Any]]:
    return pages(yard, "l", None, stop, None, False, None, bodies)


def test_records_of_several_pages(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PAGE_RECORDS", 2)
    made(yard, b"a", 3)
    found = reading(yard)
    assert next(found)[0].payload == b"a"
    made(yard, b"b", 3)
    # It looks for so long whether the one that it reads is there again.
    monkeypatch.setattr(yard, "timeout", 3.0)
    with pytest.raises(UnknownGroup, match=ANOTHER):
        for record, _ in found:
            assert record.payload == b"a"


@pytest.mark.parametrize("bodies", [True, False])
def test_payloads_that_did_not_come_along(yard: Yard, bodies: bool) -> None:
    made(yard, b"", 0)
    yard.log("l").append_stream(b"", [b"a" * POLL_BYTES, b"a"])
    record, page = next(reading(yard, bodies=bodies))
    assert record.view is None and record.left_out is bodies
    made(yard, b"", 0)
    yard.log("l").append_stream(b"", [b"b" * POLL_BYTES, b"b"])
    with pytest.raises(UnknownGroup, match=ANOTHER):
        if bodies:
            complete(yard.log("l"), record, page, preview=False)
        else:
            write_payload(yard.log("l"), record, page, BytesIO())


def test_a_keyed_log_is_read_up_to_its_end_and_no_further(yard: Yard) -> None:
    """So many records of one may reach far behind it, for others gave way."""
    made(yard, b"a", 3, compact="key")
    yard.log("l").append_many([(b"", b"b")] * 2, keys=[b"0", b"1"])
    assert [record.offset for record, _ in reading(yard)] == [2, 3, 4]
    assert [record.offset for record, _ in reading(yard, stop=4)] == [2, 3]
    assert [record.offset for record, _ in reading(yard, stop=2)] == []
