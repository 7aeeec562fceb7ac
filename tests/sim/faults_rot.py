"""D7 to D10, L4: what a disk loses, changes, puts elsewhere or gives back wrong, on one node a round.

Damage counts where it lies in bytes that are in use. Bytes of the newest batch are left alone: a batch that nothing
follows is a torn one to everybody (law 8).
"""

from __future__ import annotations

from logyard.engine.log.record import BLOCK, DATA_START

from .cluster import Host
from .files import File
from .ground import Ground
from .store import Rows

SNAPSHOT, STATE = b"n", b"s"


class RotFaults(Ground):
    """Each verb brings one about."""

    def _victim(self) -> Host | None:
        """The node that loses things in this run; none while members change, as quorums are small then.

        One node only, as damage may lie unseen for long: on two nodes it could hit the last copies of a group.
        """
        if self.membership:
            return None
        self.victim = self.victim or self.draw.choice(list(self.cluster.hosts))
        self.hurt = True
        host = self.cluster.hosts[self.victim]
        if host.other or host.number in self.true_files:
            return None
        self.checker.damaged.add(host.number)
        return host

    def _file(self, host: Host, ending: str) -> tuple[str, File] | None:
        """One of a node's files."""
        found = [(path, node) for path, node in host.files.walk() if isinstance(node, File) and path.endswith(ending)]
        return self.draw.choice(found) if found else None

    def _spoil(self, file: File, low: int, high: int) -> bool:
        """A bit, or at most a sector of zeros, within these bytes and one block; False when there are none. Its last
        two at once could be two batches of a log: the younger one is what tells the older from a torn tail."""
        high = min(high, len(file.seen))
        if low >= high:
            return False
        at = self.draw.randrange(low, high)
        zeros = self.draw.random() < 0.3
        for data in (file.seen, file.held):
            if zeros:
                end = min(high, at + 512, (at // BLOCK + 1) * BLOCK)
                data[at:end] = bytes(end - at)
            else:
                data[at] ^= 1 << self.draw.randrange(8)
        return True

    def wal_middle(self) -> None:
        host = self._victim()
        if host is None:
            return
        self.cluster.crash(host.number)
        found = self._file(host, ".wal")
        if found is not None and self._spoil(found[1], DATA_START, found[1].last):
            host.rot = "D7.wal_middle"
        self.revive_later(host, 0.3)

    def segment(self) -> None:
        """Entries of a segment; its index lies at its end."""
        host = self._victim()
        found = self._file(host, ".seg") if host is not None else None
        if host is None or found is None:
            return
        _, file = found
        if self._spoil(file, 64, len(file.seen) * 2 // 3):
            self.hits["D8.segment"] += 1

    def segment_index(self) -> None:
        host = self._victim()
        found = self._file(host, ".seg") if host is not None else None
        if host is None or found is None:
            return
        _, file = found
        if self._spoil(file, len(file.seen) - 120, len(file.seen)):
            self.hits["D8.segment_index"] += 1

    def rot_ring(self) -> None:
        """A header or a body of a slot; of some the other header is good, of some nobody needs anything."""
        host = self._victim()
        found = self._file(host, ".ring") if host is not None else None
        if host is None or found is None:
            return
        _, file = found
        if self._spoil(file, DATA_START, len(file.seen)):
            self.hits["D8.ring"] += 1

    def _rows(self, host: Host, path: str) -> Rows | None:
        file = host.files.find(f"{host.files.prefix}/{path}/data.mdb")
        return file.rows if isinstance(file, File) else None

    def _spoil_row(self, rows: Rows, key: bytes) -> None:
        value = bytearray(rows.values[key])
        value[self.draw.randrange(len(value))] ^= 1 << self.draw.randrange(8)
        rows.put(key, bytes(value))

    def meta(self) -> None:
        """One copy of a row: the twin has it."""
        self._meta("D8.meta", b"", ("a",) if self.draw.random() < 0.5 else ("b",))

    def snapshot_row(self) -> None:
        self._meta("D8.snapshot", SNAPSHOT, ("a", "b"))

    def vote_row(self) -> None:
        """Both copies of what was promised."""
        self._meta("D8.vote", STATE, ("a", "b"))

    def _meta(self, kind: str, prefix: bytes, names: tuple[str, ...]) -> None:
        host = self._victim()
        if host is None:
            return
        self.cluster.crash(host.number)
        both = [self._rows(host, f"meta/{name}") for name in names]
        if all(rows is not None for rows in both):
            keys = [key for key in both[0].keys if key.startswith(prefix) and key[:1] > b"\0"]  # type: ignore[union-attr]
            if len(names) == 1:
                # A node that could not start since has not mended what was spoilt of the twin.
                twin = self._rows(host, "meta/b" if names == ("a",) else "meta/a")
                keys = [key for key in keys if twin is None or twin.values.get(key) == both[0].values[key]]  # type: ignore[union-attr]
            if keys:
                key = self.draw.choice(keys)
                for rows in both:
                    if rows is not None and key in rows.values:
                        self._spoil_row(rows, key)
                self.hits[kind] += 1
        self.revive_later(host, 0.3)

    def generation(self) -> None:
        """A row of a payload environment."""
        host = self._victim()
        if host is not None and self._generation(host):
            self.hits["D8.generation"] += 1

    def _generation(self, host: Host) -> bool:
        """A row of one of the entries that may be damaged on this node and on no other but the victim."""
        count = len(self.cluster.hosts)
        found = [
            node.rows
            for path, node in host.files.walk()
            if isinstance(node, File) and node.rows is not None and "/payloads/" in path
        ]
        for rows in found:
            # Own rows of the generation begin with run 0; the index ends at byte 24.
            keys = [key for key in rows.keys if key[:8] != bytes(8) and key[23] % count == host.number - 1]
            # Few rows are pieces of large payloads: every other time it is one of these.
            pieces = [key for key in keys if key[32:36] != bytes(4)] if self.draw.random() < 0.5 else []
            keys = pieces or keys
            if keys:
                self._spoil_row(rows, self.draw.choice(keys))
                return True
        return False

    def atlas(self) -> None:
        """Different payloads on every node: each keeps good copies."""
        if self._victim() is None:
            return
        for number, host in self.cluster.hosts.items():
            if self._generation(host):
                self.checker.damaged.add(number)
                self.hits["D9.atlas"] += 1

    def payload(self) -> None:
        """Bytes of a payload at home in a WAL file."""
        host = self._victim()
        system = host.system if host is not None else None
        if host is None or system is None:
            return
        entries = [
            entry
            for _, entry in system.storage.location.unsealed()
            if entry.body_bytes and entry.file and not entry.tombstone
        ]
        if not entries:
            return
        entry = self.draw.choice(entries[:-1] or entries)
        path = f"{host.files.prefix}/wal/{entry.file:016x}.wal"
        file = host.files.find(path)
        end = entry.offset + entry.body_bytes
        if isinstance(file, File) and end <= file.last and self._spoil(file, entry.offset, end):
            self.hits["L4.payload"] += 1

    def lost_write(self) -> None:
        """The disk says that it wrote a batch, and did not; noticed at the next start, behind younger batches."""
        host = self._victim()
        if host is not None:
            host.faults.lost_write = True
            self.after(1.5, self._restart, host)

    def misdirected(self) -> None:
        host = self._victim()
        if host is not None:
            host.faults.misdirect = True
            self.after(1.5, self._restart, host)

    def _restart(self, host: Host) -> None:
        host.faults.lost_write = host.faults.misdirect = False
        if host.ready:
            self.cluster.crash(host.number)
        self.revive_later(host, 0.2)

    def stale_read(self) -> None:
        """One read gives what stood there before."""
        host = self._victim()
        if host is not None:
            host.faults.stale_read = True

    def noticed(self, host: Host) -> None:
        """A process takes part: did it find what was damaged?"""
        system = host.system
        if host.rot and system is not None:
            if system.repair.log_repair.known or system.store.lost_ranges():
                self.hits[host.rot] += 1
            host.rot = ""
