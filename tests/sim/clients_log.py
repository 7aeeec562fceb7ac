"""Clients of append logs: bursts of records, uploads in pieces, reads.

Every answered record is at its offset exactly once; what is not answered is in the log once or not at all. A
linearizable read sees at least what was acknowledged, or read, before it began. Bodies are functions of their tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logyard.client.upload import Upload
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame
from logyard.protocol.records import Page

from .clients import Client, Frame, Group, Workload

UPLOADS = 0.08
"""So likely a burst is followed by an upload."""
PIECE_BYTES = (700, 3000, 9000)


class LogGroup(Group):
    """`records` is the log that clients were told of: offset -> the record's tag."""

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__(work, name)
        self.reset()
        LogClient(work, self)
        self.uploader = Uploader(work, self)

    def reset(self) -> None:
        self.records: dict[int, int] = {}
        self.start = 0
        self.acked_end = 0
        self.read_end = 0

    def lacks(self, machine: Any) -> str:
        return f"{machine.end} of {self.acked_end} acknowledged records" if machine.end < self.acked_end else ""

    def acked(self, tags: Sequence[int], data: bytes) -> None:
        """An append was answered."""
        work = self.work
        if len(data) != APPEND_REPLY.size:
            work.fault(f"{self.name}: an append was answered with {data!r}")
            return
        first, count = APPEND_REPLY.unpack(data)
        if count != len(tags):
            work.fault(f"{self.name}: an append of {len(tags)} records was answered with {count}")
        for offset, tag in enumerate(tags, first):
            if self.records.setdefault(offset, tag) != tag:
                work.fault(f"{self.name}: offset {offset} was given to records {self.records[offset]} and {tag}")
        self.acked_end = max(self.acked_end, first + count)
        work.acknowledged += count
        work.ask_leaders(self)

    def read(self, number: int, consistency: str) -> None:
        work = self.work
        work.operations += 1
        least = max(self.acked_end, self.read_end) if consistency == "linearizable" else 0
        if consistency == "leader" and work.newest_leader(self.uid) == number:
            # Who leads the newest term when it is asked, and when it answers, has all that was acknowledged before.
            least = self.acked_end
        uid = self.uid

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                if uid == self.uid:
                    still = consistency != "leader" or work.newest_leader(uid) == number
                    self._look(result, least if still else 0, number, consistency)
            elif not isinstance(error, LogyardError):
                work.cluster.on_bug(f"a read of {self.name} from node {number}", error)
            elif error.code in ("corrupt", "error", "bad_request"):
                work.hits[f"read.{error.code}"] += 1

        work.cluster.spawn(number, self._poll(number, consistency), "read", done)

    async def _poll(self, number: int, consistency: str) -> Any:
        node = self.work.cluster.node(number)
        bounds = await node.bounds(self.name, consistency)
        if bounds["end"] <= bounds["start"]:
            return bounds, None
        low = max(bounds["start"], bounds["end"] - 400)
        offset = self.work.draw.randrange(low, bounds["end"])
        header, blocks = await node.poll(self.name, offset, 20, 1 << 20, 0.0, True, "local")
        page = Page(b"".join(blocks), header["start"], header["end"], header["node"], offset, 20)
        return bounds, pairs_of(page)

    def _look(self, result: Any, least: int, number: int, consistency: str) -> None:
        bounds, records = result
        if least and bounds["end"] < least:
            self.work.fault(
                f"{self.name}: a {consistency} read at node {number} saw {bounds['end']}, {least} was known"
            )
        if least:
            self.read_end = max(self.read_end, bounds["end"])
        self.compare(records or (), number)

    def compare(self, records: Any, number: int) -> None:
        """Records as a node gives them."""
        fault = self.work.fault
        for offset, payload in records:
            if payload is None:
                # Too large for a page: an upload.
                continue
            tag = int(bytes(payload[:20]).partition(b";")[0])
            if self.work.body(tag) != payload:
                fault(f"{self.name}: record {offset} at node {number} has wrong bytes")
            known = self.records.get(offset)
            if known is not None and known != tag:
                fault(f"{self.name}: record {offset} at node {number} is {tag}, acknowledged was {known}")


def pairs_of(page: Page) -> list[tuple[int, Any]]:
    """Offset and payload of each record; None for one that did not come along."""
    return [(record.offset, None if record.left_out else record.payload) for record in page]


class LogClient(Client):
    """Frames of records; `what` is their tags."""

    group: LogGroup

    def say(self, burst: int) -> int:
        work = self.work
        said = 0
        frames = work.draw.choice((1, 1, 1, 2, 3))
        for _ in range(frames):
            if self.full:
                break
            count = max(1, burst // frames)
            said += count
            self.sequence += 1
            first = work.invent(count)
            tags = range(first, first + count)
            records = [(b"", work.body(tag)) for tag in tags]
            work.operations += count
            self.put(
                tags, b"".join(encode_frame(records, command=APPEND, session=self.session, sequence=self.sequence))
            )
        if "reads" in work.features:
            for number in work.cluster.up:
                if work.cluster.leads(number, self.group.name):
                    work.read(self.group, number, "leader")
        if work.draw.random() < 0.4:
            # Also of a leader that was: it must not answer.
            for number in work.cluster.up:
                if work.cluster.leads(number, self.group.name):
                    work.read(self.group, number, "linearizable")
        if work.draw.random() < 0.1 and work.cluster.up:
            work.read(self.group, work.draw.choice(work.cluster.up), "local")
        if work.draw.random() < UPLOADS:
            self.group.uploader.start()
        return said

    def answered(self, frame: Frame, data: bytes) -> None:
        self.group.acked(frame.what, data)


class Uploader(Client):
    """One large record at a time, in pieces under a session of its own; `what` is the tag for the frame that binds
    them, None for a piece. An upload whose session ends half-way is given up: its pieces must go with it."""

    group: LogGroup
    talks = False

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        self.upload: Upload | None = None
        self.tag = 0
        self.parts: list[memoryview] = []

    def talk(self, begun: int) -> None:
        """It is started by another client."""

    def start(self) -> None:
        """Another upload, if none is under way."""
        if self.upload is not None:
            if not self.session:
                self.open()
            return
        work = self.work
        self.tag = work.invent(1)
        work.sizes[self.tag] = work.draw.choice((600, 2500))
        body = memoryview(work.body(self.tag))
        size = work.draw.choice(PIECE_BYTES)
        self.parts = [body[at : at + size] for at in range(0, len(body), size)]
        self.upload = Upload(self.group.name, b"", work.draw)
        if self.session:
            self.began()
        else:
            self.open()

    def began(self) -> None:
        if self.upload is not None:
            self.upload.session = self.session
            self.upload._sequence = self.sequence
            self._next()

    def _next(self) -> None:
        upload = self.upload
        assert upload is not None
        self.sequence += 1
        if self.parts:
            self.put(None, b"".join(upload.piece(self.parts.pop(0))))
        else:
            self.work.operations += 1
            self.put((self.tag,), b"".join(upload.bind()))

    def answered(self, frame: Frame, data: bytes) -> None:
        upload = self.upload
        assert upload is not None
        if frame.what is None:
            upload.done()
            self._next()
        else:
            self.upload = None
            self.work.hits["uploaded"] += 1
            self.group.acked(frame.what, data)

    def lost(self, frames: Sequence[Frame]) -> None:
        self.upload = None

    def forget(self) -> None:
        super().forget()
        self.upload = None
