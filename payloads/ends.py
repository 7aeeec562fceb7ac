"""Where the file of large bodies ends, by what the environment beside it says.

Invariant: nobody appends below a byte that a row names, whatever became of the row that says where the file ends (the
end row). It is there from the creation of the file on: where it lacks, or does not verify, it was damaged. Called by
`generation` when it opens for writing, and by `writing`.
"""

from __future__ import annotations

import lmdb

from logyard.protocol.errors import PayloadCorrupt

from . import layout
from .layout import END_ROW, KEY, PLACE_ROW


def put_end(txn: lmdb.Transaction[bytes], end: int) -> None:
    """Write the end row."""
    key = layout.own_key(layout.BODIES)
    txn.put(key, layout.wrap(key, END_ROW.pack(end)))


def find_end(path: str, env: lmdb.Environment, form: int, size: int, map_bytes: int) -> int:
    """Return where to go on in a file of `size` bytes.

    A file that ends in the page where the end row says was left by a commit, and nothing is looked for. One that is
    longer was left by a crash, or the end row is of an earlier commit (a write that the disk lost): only a walk over
    the rows tells. Without an end row the rows, of which more may be lost, are not enough either: it is the file's end
    then.
    """
    with env.begin(buffers=True) as txn:
        said = _said(path, txn)
        if said is not None and size <= layout.aligned(said):
            return said
        named = _named(path, txn, form, max(size, map_bytes))
    return max(size, named) if said is None else max(said, named)


def _said(path: str, txn: lmdb.Transaction[memoryview]) -> int | None:
    key = layout.own_key(layout.BODIES)
    value = txn.get(key)
    if value is None:
        return None
    try:
        body = layout.unwrap(path, key, value)
    except PayloadCorrupt:
        return None
    end: int = END_ROW.unpack(body)[0]
    return end


def _named(path: str, txn: lmdb.Transaction[memoryview], form: int, most: int) -> int:
    """Return where the last byte ends that a row names. Rows prove themselves by the bytes only, which are not read:
    one that names what lies behind `most`, where nothing of this generation can be, is damaged."""
    found = 0
    with txn.cursor() as cursor:
        there = cursor.set_range(KEY.pack(layout.OWN + 1, 0, 0, 0, 0, 0))
        while there:
            value = cursor.value()
            # Those of other rows are seldom so short: they are told apart without a look at their key.
            if len(value) == PLACE_ROW.size:
                key = bytes(cursor.key())
                if KEY.unpack(key)[4]:
                    end = _end(path, key, value, form)
                    found = max(found, end if end <= most else 0)
            there = cursor.next()
    return found


def _end(path: str, key: bytes, value: memoryview, form: int) -> int:
    try:
        placed = layout.parse_place(path, key, value, form)
        return 0 if placed is None else placed[1] + layout.placed_length(path, key, placed[0])
    except PayloadCorrupt:
        return 0
