"""The golden files of this directory, from nothing: `python -m tests.formats.regenerate` writes them anew.

Do that only together with a new format number: the tests compare byte for byte, so a change here is a change on users'
disks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from logyard.engine.disk import Disk
from logyard.engine.entry import CONFIGURATION, Entry, build_commands, build_plain, encode_frame
from logyard.engine.log.record import BLOCK, DATA_START
from logyard.engine.log.segment import write_segment
from logyard.engine.log.wal import Wal, WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name
from logyard.engine.log.wal_replay import ReplayResult

HERE = Path(__file__).parent
WAL = HERE / "wal-1.bin"
SEGMENT = HERE / "segment-1.bin"
SALT = 0x0123456789ABCDEF
ORDERS, MAIL = 0x1111111111111111, 0x2222222222222222


def entries() -> dict[str, Entry]:
    """One entry of each kind, with small, large and no payloads, and a tombstone."""
    small = encode_frame([(b"k1", b"small body"), (b"k2", None)], command=b"put", session=5, sequence=1)
    large = encode_frame([(b"k3", b"L" * 5000)], commands=[b"put k3"], session=5, sequence=3)
    dead = encode_frame([(b"k4", b"long gone")], command=b"put", session=6, sequence=1)
    frames = {name: memoryview(b"".join(frame)) for name, frame in (("small", small), ("large", large), ("dead", dead))}
    found = {
        "configuration": build_plain(1, 1, CONFIGURATION, 1_700_000_000_000, b"members"),
        "commands": build_commands(ORDERS, 2, 1, 1_700_000_000_001, [frames["small"], frames["large"]]),
        "dead": build_commands(MAIL, 9, 3, 1_700_000_000_002, [frames["dead"]]),
    }
    found["dead"].bodies, found["dead"].tombstone = None, 12
    return found


def wal_bytes() -> bytes:
    """A WAL file of two batches, the second one empty."""
    made = entries()
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk()
        config = WalConfig(file_bytes=DATA_START + 5 * BLOCK)
        wal = Wal(disk, directory, config, ReplayResult(), lambda: SALT)
        wal.open()
        wal.write(
            [
                WalItem(ORDERS, [made["configuration"], made["commands"]], (1, 2, 1)),
                WalItem(MAIL, [made["dead"]], floor=12, truncate=9),
            ]
        )
        wal.seal()
        wal.close()
        return (Path(directory) / wal_name(1)).read_bytes()


def segment_bytes() -> bytes:
    """The segment of the same entries."""
    made = entries()
    made["commands"].file, made["commands"].offset = 1, 9000
    rows = [(ORDERS, made["configuration"]), (ORDERS, made["commands"]), (MAIL, made["dead"])]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "segment"
        write_segment(Disk(), str(path), 3, rows)
        return path.read_bytes()


def main() -> None:
    """Write the golden files."""
    WAL.write_bytes(wal_bytes())
    SEGMENT.write_bytes(segment_bytes())


if __name__ == "__main__":
    main()
