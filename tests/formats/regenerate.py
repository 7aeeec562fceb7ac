"""The golden files of this directory, from nothing: `python -m tests.formats.regenerate` writes them anew.

Do that only together with a new format number: the tests compare byte for byte, so a change here is a change on users'
disks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgpack
from pyroaring import BitMap

from logyard.engine.disk.door import Disk
from logyard.engine.entry import CONFIGURATION, NOOP, Entry, build_commands, build_plain
from logyard.engine.log.manifest_files import FOLDER, ManifestFiles
from logyard.engine.log.meta_copies import seal
from logyard.engine.log.meta_rows import SnapshotRow
from logyard.engine.log.record import BLOCK, DATA_START
from logyard.engine.log.ring import Geometry, make_ring, write_slots
from logyard.engine.log.segment import write_segment
from logyard.engine.log.wal import Wal, WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name
from logyard.engine.log.wal_replay import ReplayResult
from logyard.engine.raft.membership import Configuration
from logyard.engine.snapshot.format import Snapshot, split
from logyard.engine.transfer.chunks import Intent
from logyard.payloads import checkpoints
from logyard.payloads.homes import Home
from logyard.payloads.ledger import Marks
from logyard.payloads.liveness import Liveness
from logyard.protocol.frame import encode_frame

HERE = Path(__file__).parent
WAL = HERE / "wal-1.bin"
SEGMENT = HERE / "segment-1.bin"
ROWS = HERE / "rows-1.bin"
"""Contents of meta rows: snapshots of format 1 and 2, an intent, a group's homes."""
RING = HERE / "ring-1.bin"
"""A system group's ring of two slots."""
MANIFEST = HERE / "manifest-1.bin"
"""The file of a system group's snapshot."""
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
        wal = Wal(disk, directory, config, lambda: SALT)
        wal.adopt(ReplayResult())
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


def ring_entries() -> list[Entry]:
    """What is in the ring: an entry that never had a payload, and one without its own."""
    return [build_plain(8, 3, NOOP, 1_700_000_000_000, b""), entries()["dead"]]


def ring_bytes() -> bytes:
    """The ring of a group."""
    shape = Geometry(2, BLOCK)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ring"
        make_ring(Disk(), str(path), MAIL, shape)
        write_slots(Disk(), str(path), MAIL, shape, ring_entries())
        return path.read_bytes()


def snapshot_bytes(inline_bytes: int) -> bytes:
    """A snapshot's manifest: format 1 with its sections inline, format 2 with one of them beside it."""
    liveness = Liveness(3, 1)
    liveness.release((5, 0), (6, 0))
    sections = {"state": b"small", "large": bytes(range(256)) * 8}
    configuration = Configuration((1, 2, 3)).encode()
    live = liveness.encode_live_set(9)
    return split(Snapshot(ORDERS, 9, 2, configuration, 1, 7, 1_700_000_000_000, sections, live), inline_bytes).manifest


def intent_row() -> bytes:
    """A transfer that is half done."""
    return Intent(50, 2, 60, [(1, 40), (43, 44)], [b"c" * 16]).put(ORDERS)[1] or b""


def homes_row() -> bytes:
    """A group's payloads: two homes in one copy, a dead slot, and a stretch that was lost."""
    marks = Marks(1000, 2, BitMap([5]))
    homes = [Home(1, 4, 1, 7), Home(5, 6, 0, 0), Home(9, 12, 1, 7)]
    return checkpoints.encode(ORDERS, homes, [(1, 7, marks)])


def manifest_bytes() -> bytes:
    """The file of that snapshot, as of the seventh commit."""
    key, value = SnapshotRow(ORDERS, 7, 3, snapshot_bytes(1 << 62)).put()
    with tempfile.TemporaryDirectory() as directory:
        files = ManifestFiles(Disk(), f"{directory}/{FOLDER}")
        files.store([(ORDERS, seal(key, value, 7))])
        return Path(files.path(ORDERS)).read_bytes()


def main() -> None:
    """Write the golden files."""
    ROWS.write_bytes(msgpack.packb([snapshot_bytes(1 << 62), snapshot_bytes(1000), intent_row(), homes_row()]))
    WAL.write_bytes(wal_bytes())
    SEGMENT.write_bytes(segment_bytes())
    RING.write_bytes(ring_bytes())
    MANIFEST.write_bytes(manifest_bytes())


if __name__ == "__main__":
    main()
