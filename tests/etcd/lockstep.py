"""Random requests to a real etcd and to our gateway in lockstep: status, body and events agree.

What may differ is what `_plain` and `_read` take away, and no more: who answers (ids of cluster and member, the term),
the words of a refusal of JSON, bodies of paths that nobody serves, the rest of a lease within seconds, lease numbers
that the server chose. Of streams, what each watch was told in order. Used by `python -m tests.etcd` and by the test.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .draw import Step, World
from .servers import WAIT_S, Died, Reply, Side, Stream, both

SHORT = re.compile(r"([A-Za-z0-9+/]{40})[A-Za-z0-9+/]{40,}={0,2}")
"""Values are shown by their beginnings."""
EPISODE = 500
"""Requests before both begin anew: what one leaves behind is looked at, and history stays short."""
SETTLE_EVERY = 20
STREAMS_MAX = 6
TTL_SLACK_S = 3
LONG_S = 60
"""A lease that is granted for less may end during a run."""
GREETED_S = 1.0
"""For the answers to the messages of a stream of which one can't be read."""
AGREED_TRIES = 200
NAMES = ("etcd", "logyard")
SEVERAL = ("etcdserver: key not found", "etcdserver: requested lease not found",
           "etcdserver: mvcc: required revision has been compacted",
           "etcdserver: mvcc: required revision is a future revision")  # fmt: skip
"""Of a transaction that is refused for two of these, either may be told."""
CHOSEN = 1 << 41
"""Lease numbers that a request chose are below, or one of the list; others are the server's."""


class Difference(Exception):
    """The two do not agree: the request's number in its episode, and what each said."""


class Result(NamedTuple):
    """What a run was."""

    seed: int
    requests: int
    statuses: dict[int, int]
    events: int
    watches: int
    died: list[str]


class Lockstep:
    """One episode. `aliases`: by side, the numbers of leases that it chose, in order."""

    def __init__(self, real: Side, ours: Side, seed: int) -> None:
        self.sides = (real, ours)
        self.world = World(seed)
        self.steps: list[Step] = []
        self.chosen: tuple[list[str], list[str]] = ([], [])
        self.streams: list[tuple[Stream, Stream]] = []
        self.statuses: dict[int, int] = {}
        self.events = 0
        self.watches = 0

    def run(self, requests: int) -> None:
        """So many requests. Raises `Difference`, `Died`."""
        for number in range(requests):
            step = self.world.step()
            self.steps.append(step)
            if step.stream:
                self._watch(step)
            else:
                self._call(step)
            if number % SETTLE_EVERY == SETTLE_EVERY - 1:
                self.settle()
        while self.streams:
            self._end_stream()

    # Calls

    def _call(self, step: Step) -> None:
        replies = [side.ask(step.method, step.path, self._body(step.body, at)) for at, side in enumerate(self.sides)]
        real, ours = (self._read(reply, step, at) for at, reply in enumerate(replies))
        if real != ours and not (step.path.endswith("/txn") and _several(real) and _several(ours)):
            raise Difference(f"{step.method} {step.path}\n  etcd:    {real}\n  logyard: {ours}")
        self.statuses[replies[0].status] = self.statuses.get(replies[0].status, 0) + 1
        self._learn(step, real[1])

    def _body(self, body: bytes, at: int) -> bytes:
        for number, one in enumerate(self.chosen[at]):
            body = body.replace(b"%d" % (CHOSEN + number), one.encode())
        return body

    def _read(self, reply: Reply, step: Step, at: int) -> tuple[int, Any]:
        """An answer, without what may differ."""
        if reply.status in (404, 405) and not reply.body.startswith(b'{"error":"etcdserver'):
            return reply.status, None
        try:
            found = [json.loads(line) for line in reply.body.splitlines() if line.strip()]
        except ValueError:
            raise Difference(f"{step.path}: {self.sides[at].name} answers {reply!r}") from None
        return reply.status, [self._plain(one, step, at) for one in found]

    def _plain(self, found: Any, step: Step, at: int) -> Any:
        if not isinstance(found, dict):
            return found
        if "error" in found:
            error = found["error"]
            if isinstance(error, dict):
                return {"error": (error.get("grpc_code"), error.get("http_code"))}
            words = error if error.startswith(("etcdserver: ", "election: ", '"leader"')) else None
            if found["message"] != error:
                raise Difference(f"{step.path}: {self.sides[at].name} says two things: {found}")
            return {"error": words, "code": found["code"]}
        found = dict(found)
        if "result" in found:
            return {"result": self._plain(found["result"], step, at)}
        if "header" in found:
            found["header"] = {"revision": found["header"].get("revision")}
        for name in ("ID", "lease"):
            if name in found:
                found[name] = self._alias(found[name], at)
        if "leases" in found:
            found["leases"] = sorted(self._alias(one["ID"], at) for one in found["leases"])
        if "timetolive" in step.path and "TTL" in found and found["TTL"] != "-1":
            granted = int(found["grantedTTL"])
            found["TTL"] = "about all" if granted - int(found["TTL"]) <= TTL_SLACK_S + WAIT_S else found["TTL"]
        if "keys" in found:
            found["keys"] = sorted(found["keys"])
        return json.loads(json.dumps(found), object_hook=lambda one: self._inner(one, at))

    def _inner(self, one: dict[str, Any], at: int) -> dict[str, Any]:
        if "create_revision" in one and "lease" in one:
            one["lease"] = self._alias(one["lease"], at)
        return one

    def _alias(self, number: str, at: int) -> str:
        chosen = self.chosen[at]
        if number not in chosen:
            if abs(int(number)) < CHOSEN or int(number) == (1 << 62) + 5:
                return number
            chosen.append(number)
        return f"{CHOSEN + chosen.index(number)}"

    def _learn(self, step: Step, found: Any) -> None:
        """What later requests may refer to."""
        world = self.world
        if not found or not isinstance(found[0], dict) or "error" in found[0]:
            return
        one = found[0].get("result", found[0])
        if not isinstance(one, dict) or not isinstance(one.get("header"), dict):
            return
        world.revision = max(world.revision, int(one["header"]["revision"] or 0))
        if step.path.endswith("/lease/grant"):
            if int(one["TTL"]) < LONG_S:
                # It ends at other moments here and there: both are asked to end it before it does.
                self._call(Step("/v3/lease/revoke", b'{"ID":"%s"}' % one["ID"].encode()))
            else:
                world.leases = sorted({*world.leases, int(one["ID"])})
        elif step.path.endswith("/kv/compaction"):
            world.compacted = max(world.compacted, self._asked(step))

    @staticmethod
    def _asked(step: Step) -> int:
        try:
            return int(json.JSONDecoder().raw_decode(step.body.decode().strip())[0]["revision"])
        except (ValueError, TypeError, KeyError):
            return 0

    # Watches

    def _watch(self, step: Step) -> None:
        # What is under way when a watch begins may reach it or not.
        self.settle()
        real, ours = (side.stream(step.path, self._body(step.body, at)) for at, side in enumerate(self.sides))
        self.streams.append((real, ours))
        self.watches += 1
        for stream in (real, ours):
            # All of it was read when progress is told, which the last message asks for, unless one can't be read.
            stream.wait(partial(_greeted, stream), GREETED_S)
        self._agree(real, ours)
        if len(self.streams) > STREAMS_MAX:
            self._end_stream()

    def settle(self) -> None:
        """Wait until both have told the same on every stream."""
        for real, ours in self.streams:
            self._agree(real, ours)

    def _agree(self, real: Stream, ours: Stream) -> None:
        def same() -> bool:
            return real.status == ours.status and self._told(real, 0) == self._told(ours, 1)

        for _ in range(AGREED_TRIES):
            if same():
                return
            real.wait(same, 0.05)
            ours.wait(same, 0.05)
        told = self._told(real, 0), self._told(ours, 1)
        parted = [one for one in sorted({*told[0], *told[1]}) if told[0].get(one) != told[1].get(one)]
        raise Difference(
            "\n".join(
                [f"a stream {real.body!r} ({real.status}, {ours.status})"]
                + [f"  {name}, watch {one}: {told[at].get(one)}" for one in parted for at, name in enumerate(NAMES)]
            )
        )

    def _told(self, stream: Stream, at: int) -> dict[str, Any]:
        """What each watch was told, in order; what is told of none is by itself."""
        found: dict[str, Any] = {}
        for line in list(stream.lines):
            said = json.loads(line)
            if "error" in said:
                found.setdefault("error", []).append(self._plain(said, Step("/v3/watch", b""), at))
                continue
            one = said["result"]
            told = found.setdefault(one.get("watch_id", "0"), [])
            events = [self._event(event, at) for event in one.get("events", ())]
            told += events
            rest = {key: value for key, value in one.items() if key not in ("header", "events", "fragment", "watch_id")}
            if rest or not events:
                told.append({**rest, "revision": one["header"].get("revision")})
        return found

    def _event(self, event: dict[str, Any], at: int) -> Any:
        return json.loads(json.dumps(event), object_hook=lambda one: self._inner(one, at))

    def _end_stream(self) -> None:
        real, ours = self.streams[0]
        self._agree(real, ours)
        self.events += len(real.lines)
        del self.streams[0]
        real.close()
        ours.close()


def _several(found: tuple[int, Any]) -> bool:
    return isinstance(found[1], list) and len(found[1]) == 1 and found[1][0].get("error") in SEVERAL


def _greeted(stream: Stream) -> bool:
    return any(_progress(line) for line in list(stream.lines))


def _progress(line: bytes) -> bool:
    said = json.loads(line).get("result", {})
    return said.get("watch_id") == "-1" and not said.get("created")


def run(
    binary: Path, seed: int, requests: int, flags: tuple[str, ...] = (), note: Any = None, episode: int = EPISODE
) -> Result:
    """Compare. Raises `Difference`, whose message has the shortest prefix of requests that shows it."""
    statuses: dict[int, int] = {}
    died: list[str] = []
    done = events = watches = number = 0
    while done < requests:
        size = min(episode, requests - done)
        # A seed of its own for every episode, so that one can be repeated alone.
        own = seed + number
        number += 1
        with both(binary, *flags) as (real, ours, server):
            one = Lockstep(real, ours, own)
            try:
                one.run(size)
                done += size
            except Died as error:
                assert server.process.poll() is None, server.lines
                if not str(error).startswith("etcd"):
                    raise
                # The reference did not live through it: counted, and both begin anew.
                died.append(f"seed {own}, request {len(one.steps)}: {one.steps[-1]!r}")
                done += len(one.steps)
            except Difference as error:
                raise Difference(told(own, one.steps, SHORT.sub(r"\1...", str(error)))) from None
            assert "Traceback" not in server.lines, server.lines
        events, watches = events + one.events, watches + one.watches
        for status, count in one.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
        if note is not None:
            note(done, requests)
    return Result(seed, done, dict(sorted(statuses.items())), events, watches, died)


def told(seed: int, steps: list[Step], what: str) -> str:
    """A difference, with the requests up to the first one that shows it, and how to see it again."""
    return "\n".join(
        [
            f"difference at request {len(steps)} of seed {seed}:", *_shown(steps), what,
            f"again: {Path(sys.executable).name} -m tests.etcd --seed {seed} --requests {len(steps)}",
        ]
    )  # fmt: skip


def _shown(steps: list[Step]) -> Iterator[str]:
    for number, step in enumerate(steps, 1):
        body = SHORT.sub(r"\1...", repr(step.body))
        yield f"  {number}. {step.method} {step.path} {body}"
