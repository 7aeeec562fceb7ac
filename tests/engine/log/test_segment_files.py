"""The segment files of a node, alone: a file goes when nobody needs it, and behind the rows that named it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.log.meta_rows import SegmentRun
from logyard.engine.log.segment_files import SegmentFiles
from logyard.engine.replica.member import Member
from logyard.protocol.errors import NoSpace

from ..quiesce.doubles import LAST, member_of


class Bench:
    """Two segments of one group, whose snapshot covers the first; `commits` are the members whose rows were stored,
    and whether both files were there."""

    def __init__(self, directory: Path) -> None:
        self.member = member_of(set())
        self.commits: list[tuple[set[Member], list[bool]]] = []
        self.error: Exception | None = None
        self.looked = 0
        self.files = SegmentFiles(
            directory,
            Disk(),
            {self.member.uid: self.member},
            lambda number: False,
            lambda member: False,
            self.look,
            None,
            cast(Any, SimpleNamespace(has=lambda uid, index: False)),
        )
        for number, run in ((3, SegmentRun(1, LAST, 3)), (4, SegmentRun(LAST + 1, LAST + 9, 4))):
            self.files.path(number).parent.mkdir(exist_ok=True)
            self.files.path(number).touch()
            self.files.adopt(number, {self.member.uid})
            self.member.add_segment(run)

    def look(self) -> None:
        self.looked += 1

    def present(self) -> list[bool]:
        return [self.files.path(number).exists() for number in (3, 4)]

    async def commit(self, members: Collection[Any]) -> None:
        if self.error is not None:
            raise self.error
        self.commits.append((set(members), self.present()))


@pytest.mark.parametrize("how", ["released", "left"])
async def test_a_segment_goes_behind_the_row_that_names_it_no_more(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path)
    if how == "left":
        bench.member.keep_runs([run for run in bench.member.segments if run.segment != 3])
        bench.files.leave(bench.member, 3)
    else:
        bench.files.release(3)
    assert bench.looked == 1 and bench.files.users == {4: {bench.member.uid}}
    assert [run.segment for run in bench.member.segments] == [4]
    bench.error = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.files.remove_unused(bench.commit)
    assert bench.present() == [True, True], "its row says still that it is there"
    bench.error = None
    await bench.files.remove_unused(bench.commit)
    assert bench.commits == [({bench.member}, [True, True])] and bench.present() == [False, True]
    await bench.files.remove_unused(bench.commit)
    assert len(bench.commits) == 1


async def test_a_segment_stays_that_the_log_needs_and_a_member_that_went_is_not_stored(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.files.release(4)
    assert bench.files.users[4] and not bench.looked
    bench.files.release(3)
    bench.files.forget(bench.member)
    await bench.files.remove_unused(bench.commit)
    assert bench.commits == [(set(), [True, True])] and bench.present() == [False, True]


async def test_a_segment_stays_of_which_one_run_of_two_is_of_no_use(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.member.keep_runs([SegmentRun(1, LAST, 4), SegmentRun(LAST + 1, LAST + 9, 4)])
    bench.files.shed(bench.member)
    assert bench.member.segments == [SegmentRun(LAST + 1, LAST + 9, 4)] and bench.files.users[4]
    await bench.files.remove_unused(bench.commit)
    assert bench.present()[1], "the other run names it"
