"""Payloads that come in pieces: which pieces of which upload are committed and belong to no record yet.

Pure and replicated: every member, a replay and the offline check come to the same table. Invariant: a piece lives from
its own entry on until its upload is given up, ends with its session, or is bound; bound, it is the machine's to
release. Called by `sessions` at apply, by `effects` (releases spare what is here) and by `replica`.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgpack

from logyard.protocol.frame import BINDS, PAYLOAD_BYTES_MAX, PIECE_BYTES_MAX

from ..entry import Frame, units_of
from ..machine import Context, Effect, PayloadRange, PayloadRef, Position, Reject, Release

PIECES_MAX = 2 * (PAYLOAD_BYTES_MAX // PIECE_BYTES_MAX + 1)
"""Pieces of one upload: clients send full ones, so the largest payload needs half of this; a million tiny ones would
only fill the table."""
UPLOADS_MAX = 64
"""Of one session: as many as its client may have frames under way. The clients have one."""
PIECE_COUNTS = 64 << 10
"""What a piece counts at least among the bytes of unfinished uploads: its row costs memory on every member and a place
in each snapshot, however small it is. A payload of 4 GiB in `PIECES_MAX` pieces counts no more than it has."""
TABLE_BYTES = 8
"""What a small piece's bytes stand behind in their pack: its one row of lengths."""
_PIECE = struct.Struct("<QQQI16s")
"""offset, index, term, size, hash."""


class Upload:
    """One upload: its pieces by byte offset, and their bytes."""

    __slots__ = ("pieces", "bytes")

    def __init__(self) -> None:
        self.pieces: dict[int, PayloadRef] = {}
        self.bytes = 0


class Uploads:
    """The unfinished uploads of one group, by (session, upload). `bytes`: of all their pieces. How many there may be is
    asked by the leader before a piece becomes an entry (`submit`): what is in the log counts, however many they are.

    A piece is alone in its entry, so an index names it. `indexes` are those of all unbound pieces, rising.
    `discarded` are pieces that died unbound: the machine never heard of them, so what it claims may hold them.
    """

    __slots__ = ("open", "bytes", "indexes", "discarded", "_numbers")

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], Upload] = {}
        self.bytes = 0
        self.indexes: list[int] = []
        self.discarded: list[tuple[int, int]] = []
        # By session, its uploads in the order in which they began.
        self._numbers: dict[int, dict[int, None]] = {}

    @property
    def counted(self) -> int:
        """Return what all pieces count against the limit of a group, small ones `PIECE_COUNTS`."""
        return max(self.bytes, len(self.indexes) * PIECE_COUNTS)

    def is_full(self, key: tuple[int, int]) -> bool:
        """Return whether this upload would be one more than a session may have."""
        return key not in self.open and len(self._numbers.get(key[0], ())) >= UPLOADS_MAX

    def add(self, key: tuple[int, int], offset: int, ref: PayloadRef) -> Reject | None:
        """Take a piece; or say why it must not be."""
        found = self.open.get(key)
        if offset + ref.size > PAYLOAD_BYTES_MAX:
            return Reject("payload_too_large", f"a payload has at most {PAYLOAD_BYTES_MAX} bytes")
        if found is not None and (offset in found.pieces or len(found.pieces) >= PIECES_MAX):
            return Reject("bad_piece", f"upload {key[1]} has a piece at {offset} already, or too many of them")
        if found is None:
            found = self._begin(key)
        found.pieces[offset] = ref
        found.bytes += ref.size
        self.bytes += ref.size
        self.indexes.append(ref.index)
        return None

    def bind(self, key: tuple[int, int], size: int) -> tuple[PayloadRef, ...] | Reject:
        """Hand a complete upload over: its pieces from byte 0 to `size`. One that is not complete stays."""
        found = self.open.get(key)
        if found is None:
            return Reject("unknown_upload", f"there is no upload {key[1]}: it ended, or never began")
        at, pieces = 0, []
        for offset, ref in sorted(found.pieces.items()):
            if offset != at:
                break
            pieces.append(ref)
            at += ref.size
        if at != size or len(pieces) != len(found.pieces):
            return Reject("incomplete_upload", f"upload {key[1]} is whole up to byte {at}, and not one of {size}")
        self._remove([key])
        return tuple(pieces)

    def take(
        self, context: Context, frame: Frame, data: bytes, effects: list[Effect], skipped: list[tuple[int, int]]
    ) -> Frame | bytes | Reject:
        """Apply a frame of an upload: its reply, or for one that binds the frame with its pieces, to be shown to the
        machine. What is not kept is released; what of it the machine would count as its own is `skipped`."""
        key = (frame.session, frame.upload)
        if frame.flags & BINDS:
            bound = self.bind(key, frame.extent)
            if not isinstance(bound, Reject):
                return frame._replace(pieces=bound)
            # Who binds what is not whole has lost count.
            effects += self.give_up(key)
        elif context.records == 1:
            return self._piece(key, context, frame.extent, data, effects)
        else:
            bound = Reject("bad_piece", "a piece stands alone in its entry")
        skipped.append((frame.first, frame.records))
        end = (context.index, frame.first + frame.records) if context.records > 1 else (context.index + 1, 0)
        effects.append(Release(Position(context.index, frame.first), Position(*end)))
        return bound

    def _piece(
        self, key: tuple[int, int], context: Context, offset: int, data: bytes, effects: list[Effect]
    ) -> bytes | Reject:
        ref = _ref(context, data)
        refused: Reject | None = None
        if ref.size:
            refused = self.add(key, offset, ref)
            if refused is None:
                return b""
        else:
            effects += self.give_up(key)
        effects += self.discard([ref])
        return refused or b""

    def give_up(self, key: tuple[int, int]) -> list[Release]:
        """Give up an upload that ends unbound: its pieces are dead."""
        return self._discard(self._remove([key])) if key in self.open else []

    def end(self, sessions: Collection[int]) -> list[Release]:
        """End the uploads of sessions that ended: a step of apply, however many they are."""
        keys = [(one, number) for one in dict.fromkeys(sessions) for number in self._numbers.get(one, ())]
        return self._discard(self._remove(keys))

    def discard(self, refs: Iterable[PayloadRef]) -> list[Release]:
        """Return the releases of pieces that no machine took, remembered as such."""
        return self._discard(list(runs(sorted(ref.index for ref in refs))))

    def _discard(self, dead: list[tuple[int, int]]) -> list[Release]:
        if len(dead) == 1:
            insort(self.discarded, dead[0])
        else:
            self.discarded += dead
            self.discarded.sort()
        return [Release(Position(first, 0), Position(end, 0)) for first, end in dead]

    def _begin(self, key: tuple[int, int]) -> Upload:
        self._numbers.setdefault(key[0], {})[key[1]] = None
        upload = self.open[key] = Upload()
        return upload

    def _remove(self, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take uploads out; return the runs of their pieces, of one after the other. `indexes` are gone through once
        for all of them, and only where their pieces lie."""
        found: list[tuple[int, int]] = []
        gone: set[int] = set()
        for key in keys:
            upload = self.open.pop(key)
            numbers = self._numbers[key[0]]
            del numbers[key[1]]
            if not numbers:
                del self._numbers[key[0]]
            self.bytes -= upload.bytes
            pieces = sorted(ref.index for ref in upload.pieces.values())
            found += runs(pieces)
            gone.update(pieces)
        if gone:
            low, high = bisect_left(self.indexes, min(gone)), bisect_right(self.indexes, max(gone))
            self.indexes[low:high] = [index for index in self.indexes[low:high] if index not in gone]
        return found

    def spared(self, first: Position, end: Position) -> Iterator[tuple[Position, Position]]:
        """Yield a machine's release without the pieces it can't know of."""
        stop = bisect_left(self.indexes, end.index + (end.ordinal > 0))
        for index in self.indexes[bisect_left(self.indexes, first.index) : stop]:
            if first < (index, 0):
                yield first, Position(index, 0)
            first = max(first, Position(index + 1, 0))
        if first < end:
            yield first, end

    def claims(self, needed: PayloadRange) -> Iterator[PayloadRange]:
        """Yield what a machine says it needs, without the pieces that died before it heard of them."""
        at, end = needed
        first = max(0, bisect_left(self.discarded, (at.index, 0)) - 1)
        for number in range(first, len(self.discarded)):
            low, high = self.discarded[number]
            if (low, 0) >= end:
                break
            if at < (low, 0):
                yield PayloadRange(at, Position(low, 0))
            at = max(at, Position(high, 0))
        if at < end:
            yield PayloadRange(at, end)

    def forget(self, before: Position) -> bool:
        """Drop what only a machine that claims dead payloads could ask for; return True when nothing at all is left."""
        self.discarded = [run for run in self.discarded if run[1] > before.index]
        return not self.open and not self.discarded

    def encode(self) -> bytes:
        """Return the snapshot section: msgpack ``[[[session, upload, pieces], ...], [[first, end], ...]]``; a piece is
        `_PIECE`, joined."""
        rows = [
            (*key, b"".join(_PIECE.pack(at, one.index, one.term, one.size, one.hash) for at, one in found))
            for key, found in ((key, upload.pieces.items()) for key, upload in self.open.items())
        ]
        encoded: bytes = msgpack.packb((rows, self.discarded))
        return encoded

    @classmethod
    def decode(cls, uid: int, data: bytes) -> Uploads:
        """Return the uploads that `encode` gave."""
        table = cls()
        rows, discarded = msgpack.unpackb(data)
        for session, number, pieces in rows:
            upload = table._begin((session, number))
            for offset, index, term, size, digest in _PIECE.iter_unpack(pieces):
                upload.pieces[offset] = PayloadRef(uid, index, 0, term, size, digest)
                upload.bytes += size
                table.indexes.append(index)
            table.bytes += upload.bytes
        table.indexes.sort()
        table.discarded = [(first, end) for first, end in discarded]
        return table


def runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each unbroken stretch of rising numbers."""
    first = end = -1
    for index in indexes:
        if index != end:
            if first >= 0:
                yield first, end
            first = index
        end = index + 1
    if first >= 0:
        yield first, end


def _ref(context: Context, data: bytes) -> PayloadRef:
    """Return the payload of the entry that a piece is alone in; of size 0 in a frame that gives its upload up."""
    pack, *large = units_of(data)
    one = large[0] if large else pack
    size = one.length if large else pack.length - TABLE_BYTES
    return PayloadRef(context.uid, context.index, 0, context.term, size, one.hash)
