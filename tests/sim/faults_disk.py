"""D1 to D6, D11, D12: power cuts, errors of the disk, slow and full ones, and directories that are another's."""

from __future__ import annotations

import errno
from copy import deepcopy

from logyard.protocol.errors import Outdated

from .cluster import Host
from .files import FileSystem
from .ground import Ground


class DiskFaults(Ground):
    """Each verb brings one about."""

    def power_cut(self) -> None:
        self._cut(0.0, 0.0, False)

    def torn(self) -> None:
        self._cut(self.draw.choice((0.2, 0.5, 0.9)), 1.0, False)

    def stale_tail(self) -> None:
        self._cut(0.5, 1.0, True)

    def lost_names(self) -> None:
        self._cut(1.0, 0.5, False, names_change=True)

    def _cut(self, chance: float, names: float, garbage: bool, names_change: bool = False) -> None:
        """In the middle of a write, so that something is not synced: at a step of the disk."""
        host = self.some()
        if host is None or host.life is None:
            return
        if names_change:
            self._roll(host.number)
        disk = host.life.disk
        disk.crash_in = self.draw.randrange(1, 25)
        disk.crash_kind = "power"
        host.cut_next = (chance, names, garbage)
        self.revive_later(host, 2.0)

    def sync_error(self) -> None:
        self._error("sync", "D4.sync_EIO")

    def write_error(self) -> None:
        self._error("write", "D5.write_EIO")

    def _error(self, operation: str, kind: str) -> None:
        host = self.some()
        if host is not None:
            host.faults.errors[operation] = errno.EIO
            self.revive_later(host, 3.0)

    def short_writes(self) -> None:
        host = self.some()
        if host is not None:
            host.faults.short = 0.2

    def slow_disk(self) -> None:
        host = self.some()
        if host is not None and host.system is not None:
            host.faults.latency_s = self.draw.choice((0.01, 0.1, 0.7, 4.0))
            # It is felt to be slow at once: the first slow sync would not block anybody here.
            host.system.storage.group_commit.pace_seconds = 0.004
            self.after(self.draw.uniform(1.0, 4.0), self._fast, host)

    def _fast(self, host: Host) -> None:
        host.faults.latency_s = 0.0

    def full(self) -> None:
        host = self.some()
        if host is not None:
            host.faults.quota = host.files.used() + self.draw.choice((0, 0, 50_000))
            self._roll(host.number)
            self.after(self.draw.uniform(0.5, 3.0), self._room, host)

    def _room(self, host: Host) -> None:
        host.faults.quota = -1

    # D12: another directory

    def wiped(self) -> None:
        """A node starts on an empty directory, and is refused; then it gets its own again."""
        self._other_files("D12.wiped", None)

    def old_copy(self) -> None:
        """A node starts on an old copy of its directory."""
        for number, files in sorted(self.old_files.items()):
            if self._is_known(number, copied=True):
                self._other_files("D12.old_copy", (number, files))
                return
        host = self.some()
        if host is not None and host.system is not None and not host.other:
            self.cluster.crash(host.number)
            self.old_files[host.number] = deepcopy(host.files)
            self.revive_later(host, 0.3)
            self.after(2.5, self.old_copy)

    def _is_known(self, number: int, copied: bool = False) -> bool:
        """Whether every other node has met this process, stored that, and, where a copy of what it started on is to
        take its place, knows of more batches than that had: what nobody saw nobody can tell."""
        own = self.cluster.system(number)
        if own is None or len(self.cluster.up) < len(self.cluster.hosts):
            return False
        for other in self.cluster.up:
            known = self.cluster.system(other).incarnation.acquaintances  # type: ignore[union-attr]
            if other != number and (
                number in known.fresh
                or number not in known.known
                or known.known[number].start != own.incarnation.origin.start
                or (copied and not 0 < own.incarnation.origin.written < known.known[number].written)
            ):
                return False
        return True

    def _other_files(self, kind: str, other: tuple[int, FileSystem] | None) -> None:
        host = self.cluster.hosts[other[0]] if other is not None else self.some()
        if host is None or self.true_files or not self._is_known(host.number):
            # One at a time: two that forgot may believe each other.
            return
        self.cluster.crash(host.number)
        self.true_files[host.number] = host.files
        host.files = other[1] if other is not None else FileSystem(host.files.prefix)
        self.old_files.pop(host.number, None)
        host.other = kind
        self.after(0.1, self.revive, host)
        self.after(3.0, self.give_back, host)

    def give_back(self, host: Host) -> None:
        """Its own directory again."""
        files = self.true_files.pop(host.number, None)
        if files is None:
            return
        if isinstance(host.failure, Outdated):
            self.hits[host.other] += 1
        self.cluster.crash(host.number)
        host.files = files
        host.other = ""
        self.revive(host)
