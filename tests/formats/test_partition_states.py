"""What was written before partitions could end is read as it was, and goes on in the newer versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.groups import Groups
from logyard.machines.log import AppendLog
from logyard.protocol.topics import (
    adopt_command,
    keyed_append_command,
    section_answer,
    section_question,
    topic_of,
)

from .partition_states import GROUPS, LOG, MADE, TOPICS, groups, log, topics

KINDS: dict[Path, Any] = {LOG: AppendLog, TOPICS: TopicsAlone, GROUPS: Groups}


def written(path: Path) -> dict[str, bytes]:
    """What a file holds, as it is written now: answers were one section before they lay in shards."""
    sections = {name: bytes(data) for name, data in msgpack.unpackb(path.read_bytes())}
    if "answers" in sections:
        sections["answers-0"] = sections.pop("answers")
    return sections


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_the_golden_bytes(path: Path) -> None:
    assert MADE[path]().snapshot() == written(path)


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_they_are_read_and_go_on(path: Path) -> None:
    sections = {name: bytes(data) for name, data in msgpack.unpackb(path.read_bytes())}
    found = KINDS[path]()
    found.restore(sections)
    assert found.snapshot() == written(path)
    older = 4 if path == LOG else 1
    found.upgrade(older, older + 1)
    again = KINDS[path]()
    again.restore(found.snapshot())
    assert again.snapshot() == found.snapshot()


def test_what_a_newer_version_begins_with() -> None:
    assert log().partition is not None and log().end == 3
    newer = log()
    newer.upgrade(4, 5)
    assert newer.partition is not None and (newer.partition.joined, newer.partition.ended) == (0, False)
    assert newer.partition.told() == log().partition.told()  # type: ignore[union-attr]
    group = groups().groups["g"]
    assert sorted(group.members) == [1, 2] and group.parts[1, 0].offset == 100 and group.parts[1, 2].owner == 0
    assert not groups().ends and groups().groups["h"].parts[1, 0].offset == 5
    told = topics().query(section_question("list", {}))
    assert [topic_of(row).state for row in section_answer(told)[1]] == ["live", "adding", "making", "deleting"]


def test_version_4_answers_the_commands_of_version_5_as_it_always_did() -> None:
    more = log(4, [adopt_command(9, 3, []), keyed_append_command(9, 3)])
    assert more.end == log().end + 1 and [at for at, _, _ in more.holes[-1:]] == [8]
