"""Protocol histories that the simulator found (tests/sim), each cut down to what it takes."""

from __future__ import annotations

from logyard.engine.entry import CONFIGURATION, NOOP, build_plain
from logyard.engine.raft.core import Raft, RaftLog
from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.state import Limits

from .network import encode

UID = 7
OLD, NEW = Configuration((1, 2, 4)), Configuration((2, 3, 4))


def test_a_snapshot_below_what_a_mended_member_knows_brings_no_older_configuration_back() -> None:
    entries = [build_plain(index, 1, NOOP, 0, b"") for index in range(1, 9)]
    entries[3] = build_plain(4, 1, CONFIGURATION, 0, NEW.encode())
    # What it committed counts for nothing until it is mended; its checkpoint says what it is a member of.
    raft = Raft(
        UID, 2, NEW, RaftLog(0, 0, (), entries), term=1, live={1, 2, 3, 4}, draw=lambda n: 0, encode=encode,
        limits=Limits(), configuration_index=4, mend=Mend(5, False),
    )  # fmt: skip
    assert raft.install_snapshot(2, 1, OLD)
    assert (raft.configuration_index, raft.configuration) == (4, NEW)
    raft.check()
