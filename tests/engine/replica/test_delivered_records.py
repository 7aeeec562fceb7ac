"""Records cut out of a pack, as deliveries need them: any stretch, any mixture of bodies, encoded heads."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.entry import build_commands, frames_of, units_of
from logyard.engine.replica.delivery import records_of
from logyard.protocol.frame import LARGE, MARK, encode_frame

BODIES = st.one_of(st.none(), st.binary(max_size=20), st.integers(LARGE, LARGE + 3).map(bytes))
RECORDS = st.lists(st.tuples(st.sampled_from((b"", b"h", b"a longer head")), BODIES), min_size=1, max_size=8)


@given(RECORDS, st.data(), st.booleans())
def test_any_stretch_of_a_pack(records: list[tuple[bytes, bytes | None]], data: st.DataObject, marked: bool) -> None:
    frame = memoryview(b"".join(bytes(part) for part in encode_frame(records, command=b"x")))
    entry = build_commands(1, 2, 3, 4, [frame, frame])
    assert len(frames_of(entry.data)) == 2 and entry.bodies is not None
    units = [(unit, memoryview(body)) for unit, body in zip(units_of(entry.data), entry.bodies, strict=True)]
    # The second frame: its ordinals do not begin at 0.
    pack, view = [pair for pair in units if pair[0].records][1]
    large = {unit.first_ordinal: body for unit, body in units if not unit.records}
    if marked:
        raw = bytearray(view)
        lengths = struct.unpack_from(f"<{2 * len(records)}I", raw)
        struct.pack_into("<I", raw, 0, lengths[0] | MARK)
        view = memoryview(bytes(raw))
    first = data.draw(st.integers(0, len(records) - 1))
    end = data.draw(st.integers(first + 1, len(records)))
    sizes, parts = records_of(view, pack.records, first, end, pack.first_ordinal, large)
    wanted = records[first:end]
    assert sizes == [(len(head), -1 if body is None else len(body)) for head, body in wanted]
    assert b"".join(bytes(part) for part in parts) == b"".join(head + (body or b"") for head, body in wanted)
