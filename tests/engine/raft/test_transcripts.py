"""Transcripts: tests/data/raft/*.txt say what one core answers to a script of inputs. Readable, and the reader's
first examples.

A line at the margin is a command, indented lines below it are what came of it. `REWRITE=1 pytest
tests/engine/raft/test_transcripts.py` writes the files anew from what the core does; read the difference before you
keep it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from logyard.engine.entry import COMMANDS, CONFIGURATION, NOOP
from logyard.engine.raft.core import Change, Configuration, Raft, RaftLog, Ready
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.messages import APPEND, NAMES, Message, describe
from logyard.engine.raft.progress import STATE_NAMES
from logyard.engine.raft.state import ROLE_NAMES
from logyard.protocol.errors import LogyardError

from .network import UID, command, encode, entries_of, make

DATA = Path(__file__).parents[2] / "data" / "raft"
KINDS = {COMMANDS: "", NOOP: "(no-op)", CONFIGURATION: "(configuration)"}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


class Script:
    """One core under a script. Every command gives lines; a change of the state is told at their end."""

    def __init__(self) -> None:
        self.raft: Raft | None = None
        self.handed: list[Ready] = []
        self.state = ""

    def run(self, line: str) -> list[str]:
        verb, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            lines = getattr(self, f"do_{verb}")(*plain, **named) or []
        except LogyardError as error:
            lines = [f"{type(error).__name__}: {error}"]
        assert self.raft is not None
        self.raft.check()
        state = self.describe()
        if state != self.state:
            lines.append(f"= {state}")
            self.state = state
        return lines

    def describe(self) -> str:
        raft = self.raft
        assert raft is not None
        log = raft.log
        parts = [
            ROLE_NAMES[raft.role],
            f"term {raft.term} vote {raft.vote} leader {raft.leader}",
            f"last {log.last_index}@{log.last_term} stable {log.stable} commit {raft.commit}",
        ]
        if raft.mend is not None:
            parts.append("damaged")
        if raft.is_quiet:
            parts.append("quiet")
        for node, progress in raft.progress.items():
            parts.append(f"[{node} {STATE_NAMES[progress.state]} {progress.match}/{progress.next}]")
        return " ".join(parts)

    def core(self) -> Raft:
        assert self.raft is not None, "the script starts with `new`"
        return self.raft

    def do_new(
        self, node: str = "1", voters: str = "1,2,3", learners: str = "", terms: str = "", snapshot: str = "0@0",
        term: str = "0", vote: str = "0", commit: str = "0", damage: str = "0", lost: str = "",
    ) -> None:  # fmt: skip
        index, snapshot_term = map(int, snapshot.split("@"))
        log = RaftLog(index, snapshot_term, entries=entries_of(*numbers(terms), first=index + 1))
        self.raft = make(
            int(node), numbers(voters), learners=numbers(learners), log=log, term=max(int(term), log.last_term),
            vote=int(vote), commit=int(commit),
        )  # fmt: skip
        if damage != "0":
            self.raft.mend = Mend(int(damage), bool(lost))

    def do_tick(self, count: str = "1") -> None:
        for _ in range(int(count)):
            self.core().tick()

    def do_campaign(self, transfer: str = "") -> None:
        self.core().campaign(bool(transfer))

    def do_propose(self, text: str = "") -> None:
        raft = self.core()
        raft.propose(command(raft.log.last_index + 1, raft.term, text.encode()))

    def do_read(self, context: str) -> None:
        self.core().read(int(context))

    def do_transfer(self, node: str) -> None:
        self.core().transfer(int(node))

    def do_change(self, kind: str, node: str) -> list[str]:
        return [f"index {self.core().propose_membership(Change(kind, int(node)))}"]

    def do_joint(self, *steps: str, leave: str = "auto") -> list[str]:
        """Steps are kind:node or kind:node:target."""
        parts = [step.split(":") for step in steps]
        changes = [Change(kind, *map(int, numbers)) for kind, *numbers in parts]
        return [f"index {self.core().propose_membership(changes, auto_leave=leave == 'auto')}", self.members()]

    def do_leave(self) -> list[str]:
        return [f"index {self.core().leave_joint()}", self.members()]

    def do_force(self) -> list[str]:
        return [f"index {self.core().force_shrink()}", self.members()]

    def do_may_lead(self, answer: str) -> None:
        self.core().may_lead = answer == "yes"

    def do_members(self) -> list[str]:
        return [self.members()]

    def members(self) -> str:
        configuration = self.core().configuration
        parts = [f"voters {configuration.voters}"]
        for name in ("learners", "outgoing", "promotable", "demoted", "auto_leave"):
            if value := getattr(configuration, name):
                parts.append(f"{name} {value}")
        return " ".join(parts)

    def do_step(
        self, kind: str, *, sender: str, term: str, at: str = "0@0", entries: str = "", commit: str = "0",
        context: str = "0", last: str = "0", reject: str = "", voters: str = "", outgoing: str = "",
    ) -> None:  # fmt: skip
        index, _, log_term = at.partition("@")
        message = Message(
            NAMES.index(kind), UID, self.core().node, int(sender), int(term), int(index), int(log_term or 0),
            int(commit), int(context), bool(reject), None, 0, int(last),
        )  # fmt: skip
        if message.kind == APPEND:
            message.entries = entries_of(*numbers(entries), first=message.index + 1)
            if voters:
                configuration = Configuration(tuple(numbers(voters)), (), tuple(numbers(outgoing)))
                message.entries.append(encode(message.index + 1, int(term), CONFIGURATION, configuration.encode()))
            message.first = message.index + 1
            message.last = message.index + len(message.entries)
        self.core().step(message)

    def do_dead(self, node: str) -> None:
        live = self.core().live
        assert isinstance(live, set)
        live.discard(int(node))
        self.core().on_liveness()

    def do_alive(self, node: str) -> None:
        live = self.core().live
        assert isinstance(live, set)
        live.add(int(node))
        self.core().on_liveness()

    def do_reset(self, node: str) -> None:
        self.core().on_link_reset(int(node))

    def do_install(self, at: str, voters: str = "1,2,3") -> list[str]:
        index, term = map(int, at.split("@"))
        took = self.core().install_snapshot(index, term, Configuration(tuple(numbers(voters))))
        return ["installed" if took else "not needed"]

    def do_sent(self, node: str, index: str, outcome: str) -> None:
        self.core().snapshot_sent(int(node), int(index), outcome == "ok")

    def do_compact(self, index: str) -> None:
        log = self.core().log
        term = log.term(int(index))
        assert term is not None
        log.compact(int(index), term)

    def do_applied(self, index: str) -> None:
        self.core().on_applied(int(index))

    def do_stop(self) -> None:
        self.core().stop()

    def do_persisted(self) -> None:
        ready = self.handed.pop(0)
        assert ready.token is not None
        self.core().on_persisted(*ready.token)

    def do_ready(self) -> list[str]:
        ready = self.core().ready()
        if ready is None:
            return ["nothing"]
        lines = []
        if ready.truncated:
            lines.append(f"truncated from {ready.truncated}")
        if ready.hard_state is not None:
            term, vote = ready.hard_state
            lines.append(f"hard state term {term} vote {vote}")
        for entry in ready.entries:
            lines.append(f"entry {entry.index}@{entry.term} {KINDS[entry.kind]}".rstrip())
        if ready.role_changed:
            lines.append("role or leader changed")
        lines += [f"send {describe(message)}" for message in ready.messages]
        lines += [f"after {describe(message)}" for message in ready.after]
        lines += [f"read {context} at {index}" for context, index in ready.reads]
        lines += [f"failed read {context}" for context in ready.failed_reads]
        lines.append(f"commit {ready.commit}")
        if ready.token is not None:
            self.handed.append(ready)
        return lines


def play(text: str) -> str:
    """The transcript of the commands in `text`, comments and empty lines kept."""
    script = Script()
    found = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        found.append(line)
        if line and not line.startswith("#"):
            found += [f"    {told}" for told in script.run(line)]
    return "\n".join(found) + "\n"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    want = path.read_text()
    got = play(want)
    if os.environ.get("REWRITE"):
        path.write_text(got)
    assert got == want or os.environ.get("REWRITE")


def test_there_are_transcripts() -> None:
    assert len(list(DATA.glob("*.txt"))) >= 8
