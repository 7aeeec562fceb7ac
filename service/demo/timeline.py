"""Who had which partition when: the journals of the cluster demo's consumers, spans of time, the table and the picture.

Pure but for the files that are read and drawn. A span begins where an observation first shows a holder and ends where
one first does not. Called by `service.demo.cluster`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .judge import Commit, Given, History, Place, Verdict, judge

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)
ROW_INCHES = 0.34
LABEL_INCHES = 0.16
CHARACTERS = 150
"""Of a label, over the width of the picture."""


class Span(NamedTuple):
    """A partition's holder, a consumer or a node, over a time in seconds."""

    topic: str
    partition: int
    holder: int
    since: float
    until: float


class Event(NamedTuple):
    """Something that was done to the cluster."""

    at: float
    text: str


class Journals:
    """What all consumers wrote, by topic; `owns`: (consumer, topic) and the partitions that it has from then on."""

    def __init__(self) -> None:
        self.given: dict[str, list[Given]] = {}
        self.commits: dict[str, list[Commit]] = {}
        self.owns: list[tuple[float, tuple[int, str], frozenset[int]]] = []

    def read(self, consumer: int, path: Path, ended: float) -> None:
        """Read one consumer's; `ended`: when its process did, should it not have said so itself."""
        topics: set[str] = set()
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                kind, at, *values = json.loads(line)
            except ValueError:
                # Its last line, when it was killed.
                continue
            if kind == "given":
                topic, partition, epoch, *rest = values
                self.given.setdefault(topic, []).append(Given(at, consumer, consumer, partition, epoch, *rest))
            elif kind == "commit":
                answered, topic, counted = values
                for one in counted:
                    self.commits.setdefault(topic, []).append(Commit(at, answered, consumer, *one))
            elif kind == "owns":
                topic, partitions = values
                topics.add(topic)
                self.owns.append((at, (consumer, topic), frozenset(partitions)))
            elif kind == "end":
                ended = min(ended, at)
        self.owns += ((ended, (consumer, topic), frozenset()) for topic in topics)

    def judged(self, topic: str, sent: Mapping[Place, tuple[int, int]], killed: Mapping[int, float]) -> Verdict:
        """Return what is wrong with the history of one topic's group."""
        given, commits = self.given.get(topic, []), self.commits.get(topic, [])
        return judge(History(sent, given, commits, killed, {}, {}))


def spans(
    seen: Iterable[tuple[float, Key, frozenset[Item]]], end: float
) -> list[tuple[Key, Item, float, float]]:  # fmt: skip
    """Return (key, item, since, until) from observations: from `at` on, `key` has exactly these items. What is there
    last lasts until `end`."""
    since: dict[Key, dict[Item, float]] = {}
    found = []
    for at, key, items in sorted(seen, key=lambda one: one[0]):
        there = since.setdefault(key, {})
        for item in there.keys() - items:
            found.append((key, item, there.pop(item), at))
        for item in items - there.keys():
            there[item] = at
    found += ((key, item, begin, end) for key, there in since.items() for item, begin in there.items())
    return found


def owners(journals: Journals, began: float, end: float) -> list[Span]:
    """Return which consumer had which partition. Who gave it up sees that only with its next look, so a span ends
    at the latest where the next owner's begins."""
    found: list[Span] = []
    for one in _placed(
        ((topic, partition), consumer, since, until)
        for (consumer, topic), partition, since, until in spans(journals.owns, end)
    ):
        if found and found[-1][:2] == one[:2] and found[-1].until > one.since:
            found[-1] = found[-1]._replace(until=one.since)
        found.append(one)
    return _relative(found, began)


def holders(
    seen: Iterable[tuple[float, tuple[str, int], frozenset[int]]], began: float, end: float
) -> list[Span]:  # fmt: skip
    """Return which node held a member of which partition."""
    return _relative(_placed(spans(seen, end)), began)


def _placed(found: Iterable[tuple[tuple[str, int], int, float, float]]) -> list[Span]:
    """Return spans by partition and time."""
    made = [Span(topic, number, holder, since, until) for (topic, number), holder, since, until in found]
    return sorted(made, key=lambda one: (one.topic, one.partition, one.since, one.holder))


def _relative(found: Iterable[Span], began: float) -> list[Span]:
    return [one._replace(since=round(one.since - began, 2), until=round(one.until - began, 2)) for one in found]


def table(owned: Sequence[Span], held: Sequence[Span]) -> list[tuple[str, str, str]]:
    """Return a row a partition: its name, its consumers in order, and its nodes in order, with their seconds."""
    places = sorted({(one.topic, one.partition) for one in (*owned, *held)})
    return [(f"{topic}.{number}", _line(owned, topic, number), _line(held, topic, number)) for topic, number in places]


def _line(found: Sequence[Span], topic: str, number: int) -> str:
    mine = sorted((one.since, one.until, one.holder) for one in found if (one.topic, one.partition) == (topic, number))
    return ", ".join(f"{holder} ({since:.0f}-{until:.0f})" for since, until, holder in mine)


def lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each interval, in order of their beginnings, a lane that no other one occupies at the same time."""
    free: list[float] = []
    placed = []
    for since, until in intervals:
        lane = next((at for at, end in enumerate(free) if end <= since), len(free))
        free[lane : lane + 1] = [until]
        placed.append(lane)
    return placed


def picture(path: Path, owned: Sequence[Span], held: Sequence[Span], events: Sequence[Event]) -> Path:
    """Draw who had which partition over time, consumers above, nodes below. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    places = sorted({(one.topic, one.partition) for one in (*owned, *held)})
    end = max((one.until for one in (*owned, *held)), default=1.0)
    # So many seconds a character, about: each label has a line where it covers no other.
    labels = lanes([(one.at, one.at + len(one.text) * end / CHARACTERS) for one in events])
    figure, axes = pyplot.subplots(
        2, 1, sharex=True, figsize=(13, 2.5 + LABEL_INCHES * len(set(labels)) + 2 * ROW_INCHES * max(1, len(places))),
        layout="constrained",
    )  # fmt: skip
    for panel, what, found in ((axes[0], "consumer", owned), (axes[1], "node", held)):
        _panel(panel, places, what, found, pyplot.get_cmap("tab10"))
        for one in events:
            panel.axvline(one.at, color="black", linewidth=0.8, linestyle=":")
    for lane, one in zip(labels, events, strict=True):
        axes[0].annotate(
            one.text, (one.at, 1.0), xycoords=("data", "axes fraction"), fontsize=8,
            xytext=(0, 3 + 72 * LABEL_INCHES * lane), textcoords="offset points",
        )  # fmt: skip
    axes[1].set_xlim(-0.02 * end, 1.02 * end)
    axes[1].set_xlabel("seconds")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _panel(panel: Any, places: Sequence[tuple[str, int]], what: str, found: Sequence[Span], colours: Any) -> None:
    """Draw one row a partition, as many lanes in it as it has holders at once."""
    from matplotlib.patches import Patch

    for row, place in enumerate(places):
        mine = [one for one in found if one[:2] == place]
        rows = lanes([(one.since, one.until) for one in mine])
        height = 0.8 / (max(rows, default=0) + 1)
        for lane, one in zip(rows, mine, strict=True):
            low = row - 0.4 + lane * height
            panel.broken_barh(
                [(one.since, one.until - one.since)], (low, height), facecolors=colours((one.holder - 1) % 10)
            )
    panel.set_yticks(range(len(places)), [f"{topic}.{number}" for topic, number in places], fontsize=8)
    panel.invert_yaxis()
    panel.set_ylabel(f"the partition's {what}s")
    names = sorted({one.holder for one in found})
    patches = [Patch(color=colours((number - 1) % 10), label=f"{what} {number}") for number in names]
    panel.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
