"""Several machines in one group: a command's envelope says whose it is, and only that one decodes it.

An envelope is tag (u16) | version (u16) | raw bytes. A tag that is not there is a committed, deterministic refusal. A
part may ask for commands to other parts (`then`), which are applied in the same index, so what they do together is
atomic. Each part is snapshotted on its own, with the version it was written in; a part that nothing happened to gives
the same sections again, bytes that the snapshot store has already. Invariant: a part sees, and touches, nothing of
another; restoring builds all parts anew before any of the old ones goes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgpack

from logyard.engine.machine import (
    Append,
    Applied,
    Aux,
    Context,
    Deliver,
    Effect,
    Machine,
    Monitor,
    PayloadRange,
    PayloadRef,
    Reject,
    Sections,
    Send,
    Timer,
)

ENVELOPE = struct.Struct("<HH")
OWN = "mux"
"""The section with the parts' versions, and what is kept for them."""
THEN_MAX = 64
"""Commands that one command leads to, in one index."""


class Then(NamedTuple):
    """What `then` makes. Effect, of parts only: apply `command` to the part `tag` in this same index, after this one.

    What comes of it is told by `on_then(context, tag, reply or Reject)`, if the part has that, which may return
    effects; a refusal takes nothing back.
    """

    tag: int
    command: bytes


def then(tag: int, command: bytes) -> Effect:
    """Return a `Then`, as what a part may return among its effects."""
    return cast(Effect, Then(tag, command))


def envelope(tag: int, command: bytes, version: int = 1) -> bytes:
    """Return a command for the part `tag`, written for that version of it."""
    return ENVELOPE.pack(tag, version) + command


def opened(data: bytes) -> tuple[int, int, bytes]:
    """Return (tag, version, command) of an envelope. Raises `Reject`."""
    if len(data) < ENVELOPE.size:
        raise Reject("bad_envelope", f"an envelope has {ENVELOPE.size} bytes before its command, not {len(data)}")
    tag, version = ENVELOPE.unpack_from(data)
    return tag, version, data[ENVELOPE.size :]


class Mux:
    """A machine made of parts. `makers`: by tag (1 to 65,535) what makes a fresh one; `versions`: what each version of
    the whole consists of, the first being version 1. A part that a version adds is empty when it comes into force.

    Parts have their own `apply`, timers, monitored sessions, follow-ups (`Append`) and queries. What they send
    (`Send`, `Deliver`'s tag) goes out in an envelope as well. They must release exactly what is theirs; a machine that
    releases ranges (`exclusive`) can't be a part. Replies are the part's own.
    """

    version = 1

    def __init__(self, makers: Mapping[int, Callable[[], Machine]], versions: Sequence[Mapping[int, int]] = ()) -> None:
        self.makers = dict(makers)
        if not versions:
            versions = ({tag: 1 for tag in makers},)
        self.versions = [dict(one) for one in versions]
        self.version = len(self.versions)
        self.in_force = 1
        self.refused = 0
        self.monitors: dict[int, list[int]] = {}
        self.parts: dict[int, Machine] = {}
        # Sections as they were last given, of parts that nothing happened to since, with the version they are of.
        self._held: dict[int, tuple[int, dict[str, bytes]]] = {}
        # Of the whole only where they are of every part: log time is one for all.
        self.wall_time = self.renews_terms = True
        for tag in sorted({tag for one in self.versions for tag in one}):
            if not 0 < tag < 1 << 16 or tag not in self.makers:
                raise ValueError(f"no maker for part {tag}, or no such tag")
            newest = max(one[tag] for one in self.versions if tag in one)
            machine = self._made(tag)
            if newest > machine.version:
                raise ValueError(f"part {tag} is a machine of version {machine.version}, not {newest}")
            self.wall_time &= bool(getattr(machine, "wall_time", False))
            self.renews_terms &= any(getattr(machine, name, False) for name in ("wall_time", "renews_terms"))
            if hasattr(machine, "on_tick"):
                # Who has it costs its leader a call a tick: so only if a part wants it.
                self.on_tick = self._tick
        for tag in self.versions[0]:
            self.parts[tag] = self._fresh(tag, self.versions[0][tag])

    def _made(self, tag: int) -> Machine:
        machine = self.makers[tag]()
        if getattr(machine, "exclusive", False):
            raise ValueError(f"part {tag}: a {type(machine).__name__} needs a group of its own")
        return machine

    def _fresh(self, tag: int, version: int) -> Machine:
        """Return an empty part of a version."""
        machine = self._made(tag)
        _upgrade(machine, 1, version)
        return machine

    # What is replicated.

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command, and those that it leads to."""
        tag, version, raw = opened(command)
        effects: list[Effect] = []
        part = self._part(tag, version)
        found = part.apply(self._context(context, tag), raw, refs)
        self._take(context, tag, found.effects, effects)
        return Applied(found.reply, effects)

    def on_timer(self, context: Context, name: str) -> Applied:
        """Pass a timer on to its part."""
        tag, _, own = name.partition("/")
        return self._hooked(context, int(tag), "on_timer", own)

    def on_session_end(self, context: Context, session: int) -> Applied:
        """Tell every part that monitors the session of its end."""
        effects: list[Effect] = []
        for tag in self.monitors.pop(session, ()):
            try:
                effects += self._hooked(context, tag, "on_session_end", session).effects
            except Reject:
                # The others are told all the same.
                self.refused += 1
        return Applied(b"", effects)

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Go on as another version of the whole: parts come in, others go from version to version, none goes."""
        for number in range(from_version, to_version):
            before, after = self.versions[number - 1], self.versions[number]
            for tag, version in after.items():
                if tag not in self.parts:
                    self.parts[tag] = self._fresh(tag, version)
                else:
                    # Its sections stay as they are: restoring them upgrades them.
                    _upgrade(self.parts[tag], before[tag], version)
            self.in_force = number + 1

    def _hooked(self, context: Context, tag: int, name: str, argument: Any) -> Applied:
        hook = getattr(self.parts.get(tag), name, None)
        effects: list[Effect] = []
        if hook is not None:
            found: Applied = hook(self._context(context, tag), argument)
            self._take(context, tag, found.effects, effects)
        return Applied(b"", effects)

    def _part(self, tag: int, version: int) -> Machine:
        known = self.versions[self.in_force - 1]
        if tag not in known:
            raise Reject("unknown_tag", f"there is no part {tag} in version {self.in_force}")
        if version > known[tag]:
            raise Reject("unknown_version", f"part {tag} is of version {known[tag]}, the command is for {version}")
        return self.parts[tag]

    def _context(self, context: Context, tag: int) -> Context:
        return context._replace(version=self.versions[self.in_force - 1][tag])

    def _take(self, context: Context, tag: int, asked: Sequence[Any], effects: list[Effect]) -> None:
        """Take a part's effects as the whole's; commands to other parts are applied now, in the order of asking."""
        self._held.pop(tag, None)
        then: deque[tuple[int, Then]] = deque()
        self._sort(tag, asked, effects, then)
        applied = 0
        while then:
            asker, (to, command) = then.popleft()
            applied += 1
            if applied > THEN_MAX:
                # Its asker is not told, for it might ask again.
                self.refused += 1
                continue
            outcome: bytes | Reject
            try:
                found = self._part(to, 0).apply(self._context(context, to), command, ())
                self._held.pop(to, None)
                outcome = found.reply
                self._sort(to, found.effects, effects, then)
            except Reject as refusal:
                outcome = refusal
                self.refused += 1
            hook = getattr(self.parts[asker], "on_then", None)
            if hook is not None:
                self._held.pop(asker, None)
                try:
                    asked = hook(self._context(context, asker), to, outcome) or ()
                except Reject:
                    # What led to it is done, and its reply is given.
                    self.refused += 1
                else:
                    self._sort(asker, asked, effects, then)

    def _sort(self, tag: int, asked: Iterable[Any], effects: list[Effect], then: deque[tuple[int, Then]]) -> None:
        for effect in asked:
            if isinstance(effect, Then):
                then.append((tag, effect))
                continue
            effects += self._outward(tag, effect)

    def _outward(self, tag: int, effect: Any) -> Iterator[Effect]:
        """Yield an effect of a part as one of the whole."""
        version = self.versions[self.in_force - 1].get(tag, 1)
        if isinstance(effect, Timer):
            yield Timer(f"{tag}/{effect.name}", effect.due_ms)
        elif isinstance(effect, Append):
            yield Append(envelope(tag, effect.command, version))
        elif isinstance(effect, Send):
            yield Send(effect.session, envelope(tag, effect.message, version))
        elif isinstance(effect, Deliver):
            yield Deliver(effect.session, effect.refs, envelope(tag, effect.tag, version))
        elif isinstance(effect, Aux):
            yield Aux(envelope(tag, effect.data, version))
        elif isinstance(effect, Monitor):
            tags = self.monitors.setdefault(effect.session, [])
            if tag not in tags:
                tags.append(tag)
                tags.sort()
            yield effect
        else:
            yield effect

    # Snapshots.

    @property
    def section_versions(self) -> dict[str, int]:
        """The version that each section of the last snapshot was written in."""
        return {_section(tag, name): version for tag, (version, held) in self._held.items() for name in held}

    def snapshot(self) -> Sections:
        """Return each part's sections under its tag, and the mux's own."""
        known = self.versions[self.in_force - 1]
        for tag, part in self.parts.items():
            if tag not in self._held:
                self._held[tag] = known[tag], dict(part.snapshot())
        written = {tag: version for tag, (version, _) in sorted(self._held.items())}
        own = [self.in_force, self.refused, sorted(self.monitors.items()), list(written.items())]
        sections = {OWN: msgpack.packb(own)}
        for tag, (_, held) in sorted(self._held.items()):
            sections |= {_section(tag, name): data for name, data in held.items()}
        return sections

    def restore(self, sections: Sections) -> None:
        """Restore all parts from their sections, each brought to the version in force; the old parts go only when all
        are there. Raises ValueError for a section that is nobody's, and what a part raises."""
        in_force, refused, monitors, written = msgpack.unpackb(sections[OWN])
        if not 0 < in_force <= len(self.versions):
            raise ValueError(f"a snapshot of version {in_force}; this mux has {len(self.versions)}")
        known = self.versions[in_force - 1]
        apart: dict[int, dict[str, bytes]] = {tag: {} for tag, _ in written}
        for name, data in sections.items():
            if name != OWN:
                tag, _, own = name.partition(".")
                if not tag.isdigit() or int(tag) not in apart:
                    raise ValueError(f"section {name!r} belongs to no part")
                apart[int(tag)][own] = data
        parts: dict[int, Machine] = {}
        for tag, version in written:
            if tag not in known:
                raise ValueError(f"the snapshot has a part {tag}, which version {in_force} has not")
            part = parts[tag] = self._made(tag)
            part.restore(apart[tag])
            _upgrade(part, version, known[tag])
        for tag in known:
            if tag not in parts:
                raise ValueError(f"part {tag} is missing")
        self.parts = parts
        self.in_force, self.refused = in_force, refused
        self.monitors = {session: list(tags) for session, tags in monitors}
        self._held = {tag: (version, apart[tag]) for tag, version in written}

    def live_refs(self) -> Iterator[PayloadRange]:
        """Yield what any part needs."""
        for part in self.parts.values():
            yield from part.live_refs()

    # What is not replicated.

    def query(self, request: bytes) -> bytes:
        """Answer a part's query, which comes in an envelope. Raises `Reject`."""
        tag, version, raw = opened(request)
        ask = getattr(self._part(tag, version), "query", None)
        if ask is None:
            raise Reject("bad_request", f"part {tag} answers no queries")
        answer: bytes = ask(raw)
        return answer

    def has_terms_beside(self, timers: Iterable[str]) -> bool:
        """Return whether a term of any part is running: what the part says, or, of one without `has_terms`, whether one
        of the `timers` is its."""
        timed: set[str] = set()
        for tag, part in self.parts.items():
            if getattr(part, "wall_time", False):
                continue
            ask, inner = getattr(part, "has_terms", None), getattr(part, "has_terms_beside", None)
            if ask is None:
                timed.add(str(tag))
            if (ask is not None and ask()) or (inner is not None and inner(())):
                return True
        return any(name.partition("/")[0] in timed for name in timers)

    def on_role(self, role: str) -> list[Effect]:
        """Return every part's effects, in the order of tags."""
        return self._local("on_role", role)

    def _tick(self, context: Context) -> list[Effect]:
        effects: list[Effect] = []
        for tag, part in sorted(self.parts.items()):
            hook = getattr(part, "on_tick", None)
            for effect in (hook(self._context(context, tag)) if hook is not None else None) or ():
                effects += self._outward(tag, effect)
        return effects

    def on_listen(self, session: int) -> list[Effect]:
        """Return every part's effects."""
        return self._local("on_listen", session)

    def on_aux(self, data: bytes) -> None:
        """Call the hook of the part that asked for it."""
        tag, _, raw = opened(data)
        hook = getattr(self.parts.get(tag), "on_aux", None)
        if hook is not None:
            hook(raw)

    def overview(self) -> dict[str, Any]:
        """Return each part's overview, under its tag."""
        shown: dict[str, Any] = {"refused": self.refused}
        for tag, part in sorted(self.parts.items()):
            view = getattr(part, "overview", None)
            if view is not None:
                shown[str(tag)] = view()
        return shown

    def _local(self, name: str, argument: Any) -> list[Effect]:
        effects: list[Effect] = []
        for tag, part in sorted(self.parts.items()):
            hook = getattr(part, name, None)
            for effect in (hook(argument) if hook is not None else None) or ():
                effects += self._outward(tag, effect)
        return effects


def _section(tag: int, name: str) -> str:
    return f"{tag}.{name}"


def _upgrade(machine: Machine, from_version: int, to_version: int) -> None:
    hook = getattr(machine, "upgrade", None)
    if hook is not None and from_version < to_version:
        hook(from_version, to_version)


__all__ = ["Mux", "Then", "envelope", "opened", "then"]
