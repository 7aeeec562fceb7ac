"""The topics in a group of their own, `_topics`: what keeps them in a cluster that has no catalogue.

The catalogue's machine with one section, so that clients speak to both alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from logyard.protocol.topics import SECTION

from .machine import Catalog
from .section import Section
from .topics import Topics


def make_topics() -> Sequence[Section]:
    """Return the one section, fresh."""
    return (Topics(),)


class TopicsAlone(Catalog):
    """A catalogue of topics."""

    version = 2

    def __init__(self) -> None:
        super().__init__(make_topics, ({SECTION: 1}, {SECTION: 2}))
