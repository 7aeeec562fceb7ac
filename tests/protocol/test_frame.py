"""The one format of command frames: its bytes stay, and a frame is the same however it was built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.protocol.errors import BadRequest
from logyard.protocol.frame import FRAME_BYTES, UNIFORM, Frame, check_frame, encode_frame, encode_parts

RECORDS = st.lists(
    st.tuples(st.binary(max_size=40), st.one_of(st.none(), st.binary(max_size=60), st.just(b"L" * 4096))),
    min_size=1,
    max_size=12,
)
GIVEN: list[tuple[bytes, bytes | None]] = [(b"one", b"body"), (b"", None), (b"two", b"L" * 4096)]
ONE_COMMAND = (
    "0101010003000000010000002200000000100000000000000700000000000000090000000000000001"
    "030000000400000000000000ffffffff03000000001000006f6e6574776f626f6479"
)
COMMANDS = (
    "01000100030000000f00000022000000001000000000000000000000000000000000000000000000"
    "01000000000000000200000078797a"
    "030000000400000000000000ffffffff03000000001000006f6e6574776f626f6479"
)


def test_the_bytes_stay() -> None:
    one = b"".join(encode_frame(GIVEN, command=b"\x01", session=7, sequence=9))
    each = b"".join(encode_frame(GIVEN, commands=[b"x", b"", b"yz"]))
    assert one == bytes.fromhex(ONE_COMMAND) + b"L" * 4096
    assert each == bytes.fromhex(COMMANDS) + b"L" * 4096


@given(RECORDS, st.binary(min_size=1, max_size=9))
def test_what_a_client_gathers_is_the_same_frame(records: list[tuple[bytes, bytes | None]], command: bytes) -> None:
    gathered = Frame(command=bytes((1,)) + command)
    gathered.put_many(records)
    whole = b"".join(gathered.encode(7, 9))
    assert whole == b"".join(encode_frame(records, command=bytes((1,)) + command, session=7, sequence=9))
    assert check_frame(memoryview(whole))[0] == len(records)


@given(RECORDS)
def test_each_record_may_have_a_command_of_its_own(records: list[tuple[bytes, bytes | None]]) -> None:
    commands = [b"c" * (number % 3) for number in range(len(records))]
    whole = b"".join(encode_frame(records, commands=commands))
    assert not whole[1] & UNIFORM and check_frame(memoryview(whole))[0] == len(records)


def test_a_frame_that_was_cut_is_refused() -> None:
    whole = bytearray(b"".join(encode_parts([1, 2], [b"h"], [b"bo"], [], b"c")))
    for length in range(len(whole)):
        with pytest.raises(BadRequest):
            check_frame(memoryview(whole[:length]))
    assert check_frame(memoryview(whole)) == (1, FRAME_BYTES + 1, len(whole), 0, 0)
