"""P and C: processes that end, at any step and in their recovery, stand still, or have wrong clocks."""

from __future__ import annotations

from .cluster import Host
from .ground import Ground


class ProcessFaults(Ground):
    """Each verb brings one about."""

    def kill(self) -> None:
        host = self.some()
        if host is not None:
            self.hits["P1.kill"] += 1
            self.down(host)

    def kill_all(self) -> None:
        """All at once."""
        for number in self.cluster.up:
            self.down(self.cluster.hosts[number])
        self.hits["G1.restart_all"] += 1

    def at_step(self) -> None:
        """A process dies at some step of its disk; and its successor in the middle of recovery."""
        host = self.some()
        if host is not None and host.life is not None:
            host.life.disk.crash_in = self.draw.randrange(40)
            for step in range(3):
                self.after(1.0 + step, self._again_at_step, host)

    def _again_at_step(self, host: Host) -> None:
        if host.life is None:
            self.revive(host, self.draw.randrange(30))
            life = host.life

            def look() -> None:
                if host.life is not life and not host.ready:
                    self.hits["P5.crash_in_recovery"] += 1

            self.loop.at(self.loop.now + 0.5, None, look)
            self.revive_later(host, 0.8)

    def writer_dies(self) -> None:
        host = self.some()
        if host is not None:
            host.faults.bug = "P2.wal_writer"
            self.revive_later(host, 2.0)

    def segment_writer_dies(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.life.doomed = ("_write_in_thread", "P2.segment_writer")
            self._roll(host.number)
            self.revive_later(host, 2.0)

    def snapshot_writer_dies(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.life.doomed = ("commit", "P2.snapshot_writer")
            self.ask(host.number, self.cluster.node(host.number).snapshot())
            self.revive_later(host, 2.0)

    def pause(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.life.paused_until = self.loop.now + self.draw.choice((0.3, 2.0, 5.0))
            self.hits["P3.pause"] += 1

    def wall_jump(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.wall_jump_ns = int(self.draw.uniform(-3600, 3600) * 1e9)
            host.life.wall_jump_ns = host.wall_jump_ns
            self.hits["C1.wall_jump"] += 1

    def drift(self) -> None:
        """The clock of the next process runs faster or slower."""
        host = self.some()
        if host is not None:
            host.drift = self.draw.uniform(0.7, 1.4)
            self.down(host, None, 0.3)
            self.hits["C1.drift"] += 1

    def freeze(self) -> None:
        """A process that stands still for a moment, as in a long collection."""
        host = self.some()
        if host is not None and host.life is not None:
            host.life.paused_until = self.loop.now + 1.7
            self.hits["C1.freeze"] += 1
