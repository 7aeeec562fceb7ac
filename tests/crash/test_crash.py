"""The model of a file system by itself, and a few hundred crash states; `python -m tests.crash` tries more."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logyard.engine.recovery import inspect
from logyard.engine.recovery.rebuild import Image
from logyard.machines.log import AppendLog
from logyard.service.embedded import open_system

from . import agree
from . import run as run_module
from .events import CREATE, RENAME, SIZE, SYNC, SYNC_DIRECTORY, THROUGH, UNLINK, WRITE, Event
from .run import has_bodies, judge_node, run
from .states import SECTOR, Model, crash_states
from .trace import available, read_trace
from .verify import Expected, judge, judge_notes
from .wal import Story
from .workload import CONFIG, Script, body


def after(*events: Event) -> Model:
    model = Model()
    for event in events:
        model.take(event)
    return model


def outcomes(model: Model, count: int = 300) -> set[tuple[tuple[str, bytes | None], ...]]:
    draw = random.Random(1)
    return {tuple(sorted(model.state(draw, 0.5).items())) for _ in range(count)}


def test_what_was_synced_stays_and_the_rest_may_go_name_and_bytes_alike() -> None:
    made = [Event(CREATE, "f"), Event(WRITE, "f", 0, b"a"), Event(WRITE, "f", 1, b"b")]
    assert outcomes(after(*made)) == {
        (),
        *((("f", content),) for content in (b"", b"a", b"\0b", b"ab")),
    }
    assert outcomes(after(*made, Event(SYNC, "f", 3))) == {(), (("f", b"ab"),)}
    assert outcomes(after(*made, Event(SYNC, "f", 2), Event(SYNC_DIRECTORY, ".", 4))) == {
        (("f", b"a"),),
        (("f", b"ab"),),
    }
    assert outcomes(after(*made[:1], Event(SYNC_DIRECTORY, ".", 1), made[1], Event(THROUGH, "f", 2))) == {
        (("f", b"a"),)
    }


def test_a_rename_is_whole_and_a_removal_may_come_back() -> None:
    base = [Event(CREATE, "f"), Event(WRITE, "f", 0, b"x"), Event(SYNC, "f", 2), Event(SYNC_DIRECTORY, ".", 3)]
    assert outcomes(after(*base, Event(RENAME, "f", 0, b"g"))) == {(("f", b"x"),), (("g", b"x"),)}
    assert outcomes(after(*base, Event(UNLINK, "f"))) == {(("f", b"x"),), ()}


def test_writes_are_torn_at_sectors_and_sizes_are_lost() -> None:
    model = after(Event(CREATE, "f"), Event(SYNC_DIRECTORY, ".", 1), Event(WRITE, "f", 0, b"x" * 3 * SECTOR))
    found = {dict(one)["f"] for one in outcomes(model)}
    assert b"\0" * SECTOR + b"x" * 2 * SECTOR in found and b"x" * SECTOR in found and len(found) == 8
    model = after(Event(CREATE, "f"), Event(SYNC_DIRECTORY, ".", 1), Event(SIZE, "f", 9))
    assert {dict(one)["f"] for one in outcomes(model)} == {b"", bytes(9)}


def test_the_kernels_record_is_read_also_where_threads_interrupt_each_other(tmp_path: Path) -> None:
    root = str(tmp_path)

    def hexed(text: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in text.encode())

    file = f"4<{hexed(root + '/f')}>"
    lines = [
        f'7  openat(AT_FDCWD<{hexed("/")}>, "{hexed(root + "/f")}", O_RDWR|O_CREAT|O_CLOEXEC, 0600) = {file}',
        f'7  pwrite64({file}, "{hexed("abc")}", 3, 5 <unfinished ...>',
        f"8  fdatasync({file} <unfinished ...>",
        "7  <... pwrite64 resumed>) = 3",
        "8  <... fdatasync resumed>) = 0",
        f"7  fdatasync({file}) = 0",
    ]
    (tmp_path / "trace").write_text("\n".join(lines))
    assert read_trace(tmp_path / "trace", root, root + ".marks") == [
        Event(CREATE, "f"),
        Event(WRITE, "f", 5, b"abc"),
        # The write had not ended when this one began.
        Event(SYNC, "f", 1),
        Event(SYNC, "f", 3),
    ]


def test_the_judge_knows_what_was_lost_doubled_or_made_up() -> None:
    want = Expected()
    want.asked, want.acknowledged = {"log": {1, 2, 3}}, {"log": {0: 1, 1: 2}}
    want.start_least, want.start_most = {"log": 0}, {"log": 1}
    one, two, three, other = (body(number) for number in (1, 2, 3, 9))
    assert judge("log", 0, [one, two], want, None) == judge("log", 1, [two, three], want, None) == []
    assert "2 was acknowledged" in judge("log", 0, [one], want, None)[0]
    assert "twice" in judge("log", 0, [one, two, two], want, None)[0]
    assert "nobody appended" in judge("log", 0, [one, two, other], want, None)[0]
    assert "begins at" in judge("log", 2, [], want, None)[0]
    assert "first recovery" in judge("log", 0, [one, two, three], want, 2)[0]


def test_the_judge_knows_that_a_deleted_name_is_made_anew() -> None:
    want = Expected()
    for what in ("create", "delete"):
        for when in ("do", "done"):
            want.take(json.dumps({when: what, "log": "a"}).encode())
    assert want.gone == want.leaving == {"a"}
    want.take(b'{"do": "create", "log": "a"}')
    assert not want.made | want.leaving | want.gone, "it may be there or not"
    want.take(b'{"done": "create", "log": "a"}')
    assert want.made == {"a"} and not want.leaving | want.gone


def test_a_log_that_does_not_sync_is_caught(tmp_path: Path) -> None:
    """The states tell a log that keeps its promise from one that does not."""
    story = Story(tmp_path / "story", 5, 12)
    honest = [story.judge(state, done, begun, tmp_path / "one") for state, done, begun in story.cases(5, 3)]
    assert len(honest) > 10 and not any(honest)
    story.events = [event for event in story.events if event.kind != SYNC or not event.path.endswith(".wal")]
    story.since = sum(event.kind == CREATE for event in story.events)
    found = [story.judge(state, done, begun, tmp_path / "one") for state, done, begun in story.cases(5, 3)]
    assert any("acknowledged" in what for what in found)


def test_what_is_found_is_kept_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other files come and go beside it."""

    def verify(state: dict[str, bytes | None], want: Expected, place: Path) -> list[str]:
        place.mkdir()
        (place / "left").write_text("x")
        return ["broken"]

    monkeypatch.setattr(run_module, "verify", verify)
    (tmp_path / "trace").touch()
    assert judge_node(tmp_path, {}, Expected()) == "broken"
    (tmp_path / "trace").unlink()
    assert judge_node(tmp_path, {}, Expected()) == "broken"
    assert len(list(tmp_path.glob("wrong-*/left"))) == 2


def test_equal_states_are_tried_once() -> None:
    events = [Event(CREATE, "f"), Event(WRITE, "f", 0, b"x"), Event(WRITE, "f", 0, b"x"), Event(SYNC, "f", 3)]
    states = [state for _, state in crash_states(events, 1, 20)]
    assert sorted(states, key=str) == [{"f": b""}, {"f": b"x"}, {}]


@pytest.mark.long
@pytest.mark.skipif(not available(), reason="no strace that may trace: not run")
def test_a_start_and_a_reader_of_the_stopped_directory_agree_on_crash_states() -> None:
    found = run(states=30, wal_states=0, seed=3, steps=6)
    assert found.node_states == 30 and found.violations == []


def test_the_judge_knows_what_a_system_group_lost_or_made_up() -> None:
    assert judge_notes([b"1", b"2", b"4"], {1, 2, 3, 4}, {1: 1, 2: 2}) == []
    assert "2 was acknowledged" in judge_notes([b"1"], {1, 2}, {2: 2})[0]
    assert "nobody wrote" in judge_notes([b"9"], {1}, {})[0]
    assert "not in order" in judge_notes([b"2", b"1"], {1, 2}, {})[0]
    assert "not in order" in judge_notes([b"1", b"1"], {1, 2}, {})[0]


async def test_where_they_do_not_agree_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_system(tmp_path / "data", CONFIG) as system:
        log = await system.start_group("log", AppendLog())
        await log.append(b"", b"body")
    look = partial(agree.disagreements, tmp_path / "data", tmp_path / "copy", CONFIG)
    assert await look() == []

    def image_of(*arguments: Any) -> Image:
        image = inspect.image_of(*arguments)
        image.log.truncate(image.log.last_index)
        image.floor += 1
        return image

    monkeypatch.setattr(agree, "image_of", image_of)
    assert [one.split(":")[1] for one in await look()] == [" commit", " log", " floor"]


def test_what_lies_beside_the_rows_is_drawn_apart_from_all_else(tmp_path: Path) -> None:
    """A seed of before goes through the same steps."""
    scripts = [Script(tmp_path, seed, -1) for seed in range(20)]
    assert {script.beside for script in scripts} == {False, True}
    assert [script.draw.random() for script in scripts] == [random.Random(seed).random() for seed in range(20)]
    assert has_bodies({"payloads": None, "payloads/gen-0000000001/bodies": b"x"})
    assert not has_bodies({"payloads/gen-0000000001/bodies": b"", "payloads/gen-0000000001/data.mdb": b"x"})


@pytest.mark.skipif(not available(), reason="no strace that may trace: not run")
@pytest.mark.long
def test_crash_states_with_large_bodies_beside_the_rows() -> None:
    found = run(states=60, wal_states=0, seed=901, steps=8, around="payloads/")
    assert found.node_states == 60 and found.violations == [] and found.door_differs == []
    assert found.with_bodies > 20


@pytest.mark.skipif(not available(), reason="no strace that may trace: not run")
@pytest.mark.long
def test_crash_states_of_a_whole_node() -> None:
    """Also: the disk door saw what the kernel saw."""
    found = run(states=150, wal_states=300, seed=11, steps=8)
    assert found.node_states == 150 and found.wal_states == 300 and found.traced
    assert found.violations == [] and found.door_differs == []
    assert found.wraps, "the ring of a system group is full more than once in these lives"
