"""The catalogue's machine: sections in one group, each with its version, snapshotted apart, decoded only by itself.

Like `machines.mux`, but sections may look at one another within a command, so that what they do together is refused
together. Invariants: a refused command changes no section; a command with a request that was answered already gets the
same answer and changes nothing; restoring builds all sections anew before any of the old ones goes. Hosted in the group
`_catalog`; called by the engine as every machine, and by its node, which looks names up in `sections` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from logyard.engine.machine import Applied, Context, PayloadRange, PayloadRef, Position, Reject, Release, Sections

from .answers import SHARDS, Answers
from .command import command_of, done, question_of, refused
from .compose import VERSIONS, make_sections
from .section import At, Section

OWN = "catalog"
"""The section with the versions that the others were written in."""
SENSELESS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What sections raise over values that are missing, or of another kind than they take."""


class Catalog:
    """Sections by name. `make`: fresh ones, empty, in the order in which they need one another; `versions`: which
    version of each section the versions of the whole consist of, the first being version 1."""

    version = 1
    stays_awake = True
    exclusive = True
    """It releases all that came before: payloads of another machine in its group would go with that."""
    inline_bytes = 1 << 10
    """Shards above this are stored apart: a snapshot writes those alone that changed."""

    def __init__(
        self,
        make: Callable[[], Sequence[Section]] = make_sections,
        versions: Sequence[Mapping[str, int]] = VERSIONS,
    ) -> None:
        self._make = make
        self._versions = versions
        self.version = len(versions)
        self.in_force = 1
        self.sections = self._made(1)
        self._answers = Answers()

    def _made(self, in_force: int) -> dict[str, Section]:
        found = {section.name: section for section in self._make()}
        known = self._versions[in_force - 1]
        if missing := known.keys() - found.keys():
            raise ValueError(f"no section {sorted(missing)[0]!r}")
        for name, version in known.items():
            if version > found[name].version:
                raise ValueError(f"section {name!r} is of version {found[name].version}, not {version}")
        return found

    # What is replicated.

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command; a refusal of its section is a reply like any other."""
        # It keeps no payloads, so all that came up to here is dead: released one by one, with entries between them that
        # have none, they would never be one range.
        effects = [Release(Position(0, 0), Position(refs[-1].index, refs[-1].ordinal + 1))] if refs else []
        wanted = command_of(command)
        if wanted.request is not None and (answer := self._answers.get(wanted.request)) is not None:
            return Applied(answer, effects)
        try:
            section = self._section(wanted.section, wanted.version, wanted.command)
            at = At(context.index, context.timestamp, self._known[wanted.section])
            reply = done(section.apply(at, wanted.command, wanted.values))
        except Reject as refusal:
            reply = refused(refusal)
        except SENSELESS as error:
            # Not remembered: members may word it differently, and whoever asks again comes to the same.
            return Applied(refused(_senseless(wanted.section, wanted.command, error)), effects)
        if wanted.request is not None:
            self._answers.put(wanted.request, reply)
        return Applied(reply, effects)

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Go on as another version of the whole: a section that comes in is empty, the others go on as newer ones."""
        for number in range(from_version, to_version):
            before, after = self._versions[number - 1], self._versions[number]
            for name, version in after.items():
                if before.get(name, 1) < version:
                    self.sections[name].upgrade(before.get(name, 1), version)
            self.in_force = number + 1

    @property
    def _known(self) -> Mapping[str, int]:
        return self._versions[self.in_force - 1]

    def _section(self, name: str, version: int, command: str) -> Section:
        if name not in self._known:
            raise Reject("bad_request", f"the catalogue has no section {name[:64]!r} in version {self.in_force}")
        if version > self._known[name]:
            raise Reject("bad_request", f"{name} is of version {self._known[name]}, the command is for {version}")
        section = self.sections[name]
        if command not in section.commands:
            raise Reject("bad_request", f"{name} has no command {command[:64]!r}")
        return section

    # Snapshots.

    def snapshot(self) -> Sections:
        """Return each section's shards under its name, the versions, and the newest answers."""
        found = {OWN: msgpack.packb([self.in_force, sorted(self._known.items())]), **self._answers.shards()}
        for name in sorted(self._known):
            found |= {f"{name}.{shard}": data for shard, data in self.sections[name].snapshot().items()}
        return found

    def restore(self, sections: Sections) -> None:
        """Restore all sections; the old ones go only when all are there. Raises ValueError for a shard that is
        nobody's, and what a section raises."""
        in_force, written = msgpack.unpackb(sections[OWN])
        if not 0 < in_force <= len(self._versions):
            raise ValueError(f"a snapshot of version {in_force}; this catalogue has {len(self._versions)}")
        apart: dict[str, dict[str, bytes]] = {name: {} for name, _ in written}
        answers = {key: data for key, data in sections.items() if key.startswith(SHARDS) or key == SHARDS[:-1]}
        for key, data in sections.items():
            if key != OWN and key not in answers:
                name, _, shard = key.partition(".")
                if name not in apart:
                    raise ValueError(f"shard {key!r} belongs to no section")
                apart[name][shard] = data
        if apart.keys() != self._versions[in_force - 1].keys():
            raise ValueError(f"a snapshot of version {in_force} has other sections: {', '.join(sorted(apart))}")
        made = self._made(in_force)
        for name, section in made.items():
            if name in apart:
                section.restore(apart[name], dict(written)[name])
        self._answers = Answers(answers)
        self.sections, self.in_force = made, in_force

    def live_refs(self) -> Iterable[PayloadRange]:
        """Return nothing: the catalogue keeps no payloads."""
        return ()

    # What is not replicated.

    def query(self, request: bytes) -> bytes:
        """Answer a question to a section. Raises `Reject` for what is none."""
        name, asked, values = question_of(request)
        if name not in self._known or asked not in self.sections[name].questions:
            raise Reject("bad_request", f"the catalogue answers no question {name[:64]}.{asked[:64]}")
        try:
            return done(self.sections[name].ask(asked, values))
        except Reject as refusal:
            return refused(refusal)
        except SENSELESS as error:
            raise _senseless(name, asked, error) from error

    def overview(self) -> dict[str, Any]:
        """Return the versions in force, for `describe`."""
        return {"sections": dict(self._known)}


def _senseless(section: str, asked: str, error: Exception) -> Reject:
    return Reject("bad_request", f"{section} {asked}: {error!r}"[:512])
