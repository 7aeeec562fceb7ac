"""Bugs in the machines and what serves them: watches, queues, uploads. Planted by `planted`."""

from __future__ import annotations

from typing import Any

from logyard.engine.replica import snapshot_sections
from logyard.engine.replica.quarantine import Quarantine
from logyard.machines.kv import machine as kv
from logyard.machines.queue import machine as queue
from logyard.machines.queue.state import QueueState
from logyard.service.kv import watch as kv_watch

from .bugs import Bug, edited, hidden, nothing


def _skips_a_revision(old: Any) -> Any:
    return lambda history, start, end: old(history, start + (end - start > 3), end)


def _forgets_what_is_held(old: Any) -> Any:
    def freeze(state: Any) -> Any:
        with hidden(state.consumers.values(), "held", list):
            return old(state)

    return freeze


def _publishes_less(old: Any) -> Any:
    def publish(self: Any, run: Any, *rest: Any) -> Any:
        if run.count > 1:
            run.cut(1)
        return old(self, run, *rest)

    return publish


BUGS = (
    Bug("watch_skips_a_revision", "a watch sees every revision", [(kv_watch, "_revisions", _skips_a_revision)]),
    Bug("held_not_in_snapshots", "what a consumer holds is state", [(queue, "freeze", _forgets_what_is_held)]),
    Bug("message_lost", "what is confirmed is delivered", [(QueueState, "publish", _publishes_less)]),
    Bug(
        "empty_batch_raises",
        "an entry all of whose frames were refused is applied",
        [(kv, "spans_of", edited(("for frame in frames:", "frames[0]\n    for frame in frames:")))],
        featured=frozenset({"sessions"}),
    ),
    Bug(
        "repaired_program_applies_what_was_skipped",
        "what an operator skipped stays out at every replay",
        [(Quarantine, "foresee", lambda old: lambda self, member, entries=(): None)],
        featured=frozenset({"repairs"}),
    ),
    Bug("pieces_not_in_snapshots", "uploads are part of the state", [(snapshot_sections, "uploads_of", nothing)]),
)
