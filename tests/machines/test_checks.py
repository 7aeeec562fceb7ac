"""The checkers that users import: a sound machine passes them, and each fault is found and named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from logyard.engine.machine import (
    Append,
    Applied,
    Batch,
    Context,
    Frame,
    Machine,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
)
from logyard.machines.kv import KV
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, retain_command
from logyard.machines.mux import Mux
from logyard.machines.queue import Queue
from logyard.machines.registry import create_machine
from logyard.protocol.frame import produce_command
from logyard.testing import (
    Command,
    EndSession,
    Entry,
    Parted,
    Refused,
    Rehearsal,
    Step,
    Upgrade,
    Wait,
    check_deterministic,
    check_restore,
)
from tests.source_tree import ROOT

from . import faulty

SCRIPT: list[Step] = [
    *(Command(b"add %s" % word, (100 * number,)) for number, word in enumerate(b"one two three four five".split(), 1)),
    Command(b"list", (5,)),
    Command(b"add two", (50,)),
    Entry((Command(b"drop one"), Command(b"drop nobody", (7,)), Command(b"add six", (8,)))),
    Command(b"later 500 three", (1,)),
    Command(b"later 200 four"),
    Wait(300),
    Upgrade(2),
    Command(b"twice seven", (3,)),
    Wait(10_000),
    Command(b"list"),
    Command(b"watch 9"),
    EndSession(8),
    EndSession(9),
    Command(b"add eight", (1,)),
]


def office() -> Machine:
    return Mux({1: KV, 2: KV})


def test_a_sound_machine_passes() -> None:
    check_deterministic(faulty.Sound, SCRIPT)
    run = check_restore(faulty.Sound, SCRIPT)
    assert run.machine.words == {"eight": [run.index, 0]} and list(run.live.values()) == [1]  # type: ignore[attr-defined]
    assert run.now == Rehearsal(faulty.Sound).now + 10_300


def test_a_machine_may_print() -> None:
    check_deterministic(faulty.Talking, SCRIPT)


@pytest.mark.parametrize("make", [faulty.Unordered, faulty.UnorderedState, faulty.Addressed])
def test_what_differs_between_processes_is_found(make: type[Machine]) -> None:
    with pytest.raises(Parted) as caught:
        check_deterministic(make, SCRIPT)
    assert {"Unordered": [5], "UnorderedState": [1, 2, 3]}.get(make.__name__, [0]).count(caught.value.step)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (faulty.Forgetful, "step 1: replies and effects of a restored machine differ"),
        (faulty.Leaking, "neither released nor in live_refs"),
        (faulty.Careless, r"released, and still in live_refs \(they are gone\): \[Position\(index=3, ordinal=0\)\]"),
        (faulty.Ahead, r"index 7: released up to Position\(index=102, ordinal=0\), which is not written yet"),
        (faulty.Shared, "changed an older snapshot"),
        (faulty.Hasty, "that was refused"),
    ],
)
def test_what_a_restart_would_show_is_found(make: type[Machine], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_restore(make, SCRIPT)


def test_what_can_not_be_found_by_another_process_is_refused() -> None:
    class Local(faulty.Sound):
        pass

    with pytest.raises(ValueError, match="inside of a function"):
        check_deterministic(Local, SCRIPT)


def test_a_machine_that_raises_in_its_process_says_why() -> None:
    with pytest.raises(RuntimeError, match="not enough values"):
        check_deterministic(faulty.Sound, [Command(b"")])


def test_a_program_s_own_machine_is_found_by_its_file(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "from tests.machines.faulty import Unordered\n"
        "from logyard.testing import Command, check_deterministic\n"
        "class Mine(Unordered):\n    pass\n"
        "if __name__ == '__main__':\n"
        "    check_deterministic(Mine, [Command(b'add %d' % n) for n in range(20)] + [Command(b'list')])\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "step 20: replies and effects in two processes differ" in done.stderr, done.stderr


def test_a_rehearsal_tells_what_happened() -> None:
    run = Rehearsal(faulty.Sound)
    assert run.command(b"add a", 100) == b"1" and run.command(b"add a", 50) == b"2"
    assert run.effects(Release) == [Release((1, 0), (1, 1))] and list(run.live.values()) == [50]  # type: ignore[arg-type]
    with pytest.raises(Reject):
        run.command(b"drop b")
    run.command(b"later 60 a")
    assert run.wait(59) == [] and [seen.index for seen in run.wait(1)] == [5] and not run.live
    run.check()


def test_the_append_log_passes() -> None:
    steps: list[Step] = [Upgrade(2), Command(retain_command(60_000, 0, 0))]
    for number in range(60):
        steps += [
            Command(APPEND, (100, 5000)),
            Entry((Command(produce_command(7, number // 2 + 1), (9,)), Command(b"?", (3,)), Command(APPEND, (1,)))),
            Wait(5_000 if number % 7 else 70_000),
        ]
    # The payload of a frame that only says something lives until the log's start passes it.
    run = check_restore(AppendLog, steps, check_live=False)
    assert run.machine.start > 150  # type: ignore[attr-defined]
    check_deterministic(AppendLog, steps)


class First(faulty.Sound):
    """Looks at an entry's first frame, as if there always were one."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        assert frames[0].records
        return Batch([b""] * len(frames), [Release(Position(context.index, 0), Position(context.index + 1, 0))])


class Later(First):
    """The same, once it has state."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        if not self.count and not frames:
            return Batch(())
        self.count += 1
        return super().apply_batch(context, frames)

    def snapshot(self) -> Sections:
        return {"count": str(self.count).encode()}

    def restore(self, sections: Sections) -> None:
        self.count = int(sections["count"])


def test_a_machine_that_can_not_take_an_empty_batch_is_found() -> None:
    with pytest.raises(IndexError):
        Rehearsal(First)
    run = Rehearsal(Later)
    run.step(Refused())
    run.command(b"x", 5)
    with pytest.raises(IndexError):
        run.step(Refused(3))
    with pytest.raises(IndexError):
        check_restore(Later, [Command(b"x"), Command(b"x")])


class Wordy(Mux):
    """Says with text what is none."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        return Applied("done") if command == b"reply" else Applied(b"", [Append("later")])  # type: ignore[arg-type]


class Reuser(faulty.Sound):
    """Says all that it says with one buffer."""

    out = bytearray(1)

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        self.out[:] = command.upper()
        return Applied(self.out, [Append(self.out)] if command.islower() else ())  # type: ignore[arg-type]


def test_a_buffer_that_is_used_again_changes_no_reply_that_was_given() -> None:
    run = Rehearsal(Reuser)
    (seen, *later) = run.step(Entry((Command(b"a"), Command(b"b"))))
    assert seen.replies == (b"A", b"B") and [one.replies for one in later] == [(b"A",), (b"B",)]


def test_a_reply_and_an_effect_that_are_none_are_found() -> None:
    for command, why in [(b"reply", "reply is a str, not bytes"), (b"effect", "is no effect")]:
        with pytest.raises(TypeError, match=why):
            Rehearsal(lambda: Wordy({1: KV})).command(command)


@pytest.mark.parametrize("make", [AppendLog, KV, Queue, lambda: create_machine("log", {"compact": "key"}), office])
def test_every_machine_takes_entries_of_which_nothing_is_shown(make: Callable[[], Machine]) -> None:
    steps: list[Step] = [Refused(), Command(b"\0", (7,)), Refused(3), Wait(10_000), Refused(2)]
    run = check_restore(make, steps, check_live=False)
    shown = [seen for seen in run.seen if not seen.replies]
    assert len(shown) == 3 and all(type(one) is Release for seen in shown for one in seen.effects)


def test_a_log_keeps_the_holes_of_an_entry_that_shows_nothing() -> None:
    run = Rehearsal(AppendLog)
    run.step(Refused(3))
    assert isinstance(run.machine, AppendLog) and run.machine.holes == [(1, 0, 0)]
