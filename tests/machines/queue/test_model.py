"""Random histories of a queue against a model that knows every message, restored from a snapshot before each entry."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from logyard.engine.machine import Frame
from logyard.machines.queue import command as qc
from logyard.machines.queue.options import QueueOptions

from . import model
from .model import Bench

KEYS = st.tuples(st.integers(1, 3), st.integers(1, 2))
SMALL = st.integers(0, 12)
OPTIONS = st.builds(
    QueueOptions,
    max_length=st.sampled_from((0, 0, 3, 8)),
    max_bytes=st.sampled_from((0, 0, 60)),
    overflow=st.sampled_from(("drop_head", "reject")),
    ttl_ms=st.sampled_from((0, 0, 500)),
    expires_ms=st.just(0),
    delivery_limit=st.sampled_from((0, 2, 20)),
    dead_letters=st.booleans(),
    dead_max_length=st.sampled_from((0, 4)),
    delayed_max=st.sampled_from((0, 5)),
    single_active=st.booleans(),
    lease_ms=st.sampled_from((400, 1_000_000)),
)


@st.composite
def publications(draw: st.DrawFn) -> Frame:
    sizes = draw(
        st.one_of(st.lists(SMALL, min_size=1, max_size=4), st.builds(lambda n, s: [s] * n, st.integers(1, 6), SMALL))
    )
    publisher = draw(st.sampled_from((0, 0, 0, 1, 2)))
    return model.publish(
        sizes,
        priority=draw(st.integers(0, 1)),
        ttl=draw(st.sampled_from((0, 0, 100, 700))),
        delay=draw(st.sampled_from((0, 0, 0, 200, 1_000))),
        publisher=publisher,
        sequence=draw(st.integers(1, 8)) if publisher else 0,
    )


STEPS = st.one_of(
    st.tuples(st.just("frame"), publications()),
    st.tuples(st.just("frame"), publications()),
    st.tuples(
        st.just("frame"),
        st.builds(
            model.attach, KEYS, credit=st.integers(0, 5), size=st.integers(1, 40), priority=st.integers(0, 1),
            lease=st.sampled_from((0, 150, 900)), auto=st.booleans(), dead=st.sampled_from((False, False, True)),
        ),
    ),
    st.tuples(st.just("frame"), st.builds(model.detach, KEYS)),
    st.tuples(st.just("frame"), st.builds(model.credit, KEYS, st.integers(0, 4), st.integers(1, 60))),
    st.tuples(st.just("settle"), KEYS, st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("settle"), KEYS, st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("extend"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("resend"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("frame"), st.builds(model.purge, st.integers(1, 7))),
    st.tuples(st.just("end"), st.integers(1, 3)),
    st.tuples(st.just("time"), st.sampled_from((1, 50, 150, 600, 2_000))),
    st.tuples(st.just("late"), st.sampled_from((150, 600))),
)  # fmt: skip


def frames_of(bench: Bench, step: tuple[Any, ...]) -> list[Frame]:
    """A step's frame, by what the queue holds now."""
    verb, *arguments = step
    if verb == "frame":
        return [arguments[0]]
    if verb in ("settle", "extend", "resend"):
        key = arguments[0]
        reader = bench.model.readers.get(key)
        tags = sorted(reader.held) if reader is not None else []
        if verb == "resend":
            return [model.resend(key, tags[arguments[1] % len(tags)] if tags else 1)]
        picked = [(tags[at % len(tags)] if tags else 1 + at) for at in arguments[-2 if verb == "settle" else -1 :]]
        low, high = min(picked), max(picked)
        ranges = [(low, low), (high, high + 1)] if high > low + 1 and high % 2 else [(low, high)]
        return [model.settle(key, arguments[1], *ranges) if verb == "settle" else model.extend(key, *ranges)]
    if verb == "cancel":
        delayed = bench.model.at("delayed")
        return [model.cancel(delayed[arguments[0] % len(delayed)].id if delayed else 1, 10_000)]
    return []


@settings(max_examples=150, deadline=None)
@example(
    QueueOptions(),
    [("frame", model.attach((2, 1))), ("resend", (2, 1), 0), ("frame", model.detach((2, 1)))],
    [1, 2],
)  # who leaves in the entry in which it asked again is sent nothing
@example(
    QueueOptions(),
    [
        ("frame", model.attach((1, 2), credit=3, size=4, auto=False)),
        ("frame", model.publish([3, 2, 2, 1])),
        ("frame", model.attach((1, 1), credit=2, size=4, auto=False)),
    ],
    [],
)  # what is next behind what another consumer got may be small enough
@example(
    QueueOptions(),
    [
        ("frame", model.attach((1, 1), credit=4, size=2, auto=False)),
        ("frame", model.publish([0])),
        ("frame", model.publish([2, 0])),
    ],
    [],
)  # an empty message has room beside what fills the credit
@given(OPTIONS, st.lists(STEPS, min_size=1, max_size=40), st.lists(st.integers(1, 4), max_size=12))
def test_histories_follow_the_model(options: QueueOptions, steps: list[tuple[Any, ...]], together: list[int]) -> None:
    bench = Bench(options)
    at = 0
    many = iter(together)
    while at < len(steps):
        verb, *arguments = steps[at]
        at += 1
        bench.now += 1
        if verb in ("time", "late"):
            bench.now += arguments[0]
        if verb != "late" or options.overflow == "reject":
            bench.ring()
        if verb == "end":
            bench.end_session(arguments[0])
            continue
        frames = frames_of(bench, (verb, *arguments))
        if options.overflow == "drop_head":
            # Commands that look at what is held were drawn for the state before the entry: only plain ones join it.
            for _ in range(next(many, 1) - 1):
                if at < len(steps) and steps[at][0] == "frame":
                    frames.append(steps[at][1])
                    at += 1
        bench.apply(*frames, gap=at % 3 == 0)
    bench.apply(model.purge(qc.READY | qc.DELAYED | qc.DEAD_LETTERS))
    for session in (1, 2, 3):
        bench.end_session(session)
    bench.apply(model.purge(qc.READY | qc.DELAYED | qc.DEAD_LETTERS))
    assert tuple(bench.live.released_before) == (bench.machine.state.last_index + 1, 0), "nothing leaks"
