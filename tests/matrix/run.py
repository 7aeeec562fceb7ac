"""Runs cells one after the other on one cluster, each with a log of its own."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from logyard.protocol.errors import LogyardError
from logyard.service.local_cluster import ClusterFailed, LocalCluster
from tests.crash.trace import available

from . import damage, strace
from .cells import INJECTED, Cell, Result
from .damage import STORED, Place
from .stage import LARGE, LIMITS, PAYLOAD, Ended, Stage, connect, wait

PROVOKE_S = 15.0
NO_PROCESS_S = 3.0


class Trial:
    """One cell."""

    def __init__(self, stage: Stage, cell: Cell, victim: int, seed: int, directory: Path) -> None:
        self.stage = stage
        self.cell = cell
        self.draw = random.Random(f"{seed} {cell}")
        self.result = Result(cell, victim)
        self.directory = directory
        self.old = directory / "old"
        self.trace = directory / "strace.txt"

    def step(self, text: str) -> None:
        """What was seen; where the cluster lies says nothing."""
        self.result.steps.append(text.replace(f"{self.stage.cluster.directory}/", ""))

    def run(self, name: str) -> Result:
        """All of it; what goes wrong is a problem of the cell."""
        began, stage, cell, result = time.monotonic(), self.stage, self.cell, self.result
        try:
            # A system group's log lies in a ring.
            name = f"_{name}" if cell.kind == "ring" else name
            payload = LARGE if cell.kind == "bodies" else PAYLOAD
            stage.prepare(name, result.victim, cell.role == "leader", cell.kind == "snapshot", payload)
            if cell.fault == "stale copy":
                self.remember()
            if cell.kind == "config":
                self.config()
            elif cell.fault == "EIO on read":
                self.failing_reads()
            elif cell.fault in INJECTED:
                self.failing_writes()
            elif cell.fault == "stale copy":
                self.stale()
            else:
                self.spoiled()
            stage.write(LAST_WORDS)
            self.whole()
            self.judge()
            self.clean()
            result.acknowledged = len(stage.acknowledged)
            stage.drop()
        except (AssertionError, ClusterFailed, Ended, LogyardError, OSError) as error:
            traceback.print_exc(file=sys.stderr)
            result.problems.append(f"{type(error).__name__}: {error}"[:2000])
        result.seconds = time.monotonic() - began
        return result

    def judge(self) -> None:
        """What each member says itself."""
        for node in sorted(self.stage.cluster.nodes):
            lost, wrong = self.stage.verify(node)
            self.result.lost += lost
            self.result.wrong += wrong

    def clean(self) -> None:
        """A last scrub of the victim finds nothing that is not repaired."""
        found = self.stage.scrub()
        if not found or found["left"] or found["error"]:
            self.result.problems.append(f"a last scrub: {found or 'the node died of it'}")

    # Bytes

    def places(self, live: bool) -> list[Place]:
        """Where to hit this kind on the victim."""
        stage, kind = self.stage, self.cell.kind
        data, uid = stage.data, self.uid
        rows = sorted(stage.acknowledged)
        if kind == "wal" and live:
            # A payload at home in a sealed file.
            payload = stage.acknowledged[rows[40 + self.draw.randrange(100)]][1]
            return damage.find(damage.wal_files(data), payload[1000:1100])[:1]
        if kind == "wal":
            # An entry in the file that is replayed.
            return damage.wal_records(damage.wal_files(data)[-1], uid)[-2:-1]
        if kind == "segment":
            found = damage.segment_entries(damage.segments(data), uid)
            return [found[len(found) // 2 + self.draw.randrange(5)]]
        if kind == "segment index":
            path = damage.segment_entries(damage.segments(data), uid)[-1].path
            index = damage.index_of(path)
            return [Place(path, index + self.draw.randrange(0, path.stat().st_size - index - 8))]
        if kind == "ring":
            found = damage.ring_slots(damage.ring(data, uid), uid, stage.ring())
            return [self.draw.choice(found)]
        if kind in STORED:
            payload = stage.acknowledged[rows[5]][1]
            return damage.find(damage.generations(data, kind), payload[1000:1100])[-1:]
        if kind == "snapshot":
            # In both copies, or a copy would make the other good; in the newest chunk, as old pages lie there too.
            token = b"key 120 "
            found = damage.find(damage.environments(data), token)
            return [place for place in found if self.is_chunk(place)]
        found = damage.find(damage.environments(data)[:1], b"s" + uid.to_bytes(8, "big"))
        return [Place(place.path, place.offset + 9 + 16 + 2) for place in found]

    def is_chunk(self, place: Place) -> bool:
        """Whether the keys beside it are there, too: a list of keys, and no single record."""
        with place.path.open("rb") as file:
            file.seek(max(0, place.offset - 4096))
            return file.read(8192).count(b"key ") > 4

    def hit(self, live: bool, places: list[Place] | None = None) -> None:
        """Do the damage."""
        places = self.places(live) if places is None else places
        if self.cell.fault == "truncation":
            # All that comes behind goes with the first of a file.
            places = [min(one for one in places if one.path == path) for path in {place.path for place in places}]
        elif self.cell.fault == "zeroed block":
            # Nothing of a block twice; nothing but the block of one copy.
            places = list({(place.path, place.offset // damage.PAGE): place for place in places}.values())
        for place in places:
            damage.spoil(place, self.cell.fault)
        assert places, f"no {self.cell.kind} to damage"
        self.result.hits += len(places)

    def spoiled(self) -> None:
        """Bytes change under the running node, which scrubs; then in its files after a kill."""
        stage = self.stage
        self.hit(live=True)
        found = stage.scrub()
        self.tell("running", found)
        self.revive()
        stage.write(LAST_WORDS)
        self.whole()
        self.judge()
        self.surely(stage.fill)
        self.surely(stage.snapshot)
        if self.cell.kind == "ring":
            stage.ringed()
        stage.write(LAST_WORDS)
        stage.stored()
        # Of a ring the node itself says what it needs.
        places = self.places(live=False) if self.cell.kind == "ring" else None
        stage.kill()
        self.hit(live=False, places=places)
        self.begin("stopped")

    def tell(self, when: str, found: dict[str, object]) -> None:
        """What a scrub says."""
        if not found:
            code = self.stage.ended()
            self.step(f"{when}: the node ended with {code}")
            return
        kinds = found["last"]
        assert isinstance(kinds, dict)
        seen = {kind: one for kind, one in kinds.items() if one["found"]}
        text = ", ".join(f"{one['found']} in {kind}, {one['repaired']} repaired" for kind, one in seen.items())
        self.step(f"{when}: scrub found {text or 'nothing'}")
        if found["left"] or found["error"]:
            names = [one["text"] for one in found["findings"] if not one["repaired"]]  # type: ignore[attr-defined]
            self.step(f"left: {names or found['error']}")

    def revive(self) -> None:
        """A victim that ended is started again."""
        if self.stage.ended() is not None:
            self.stage.kill()
            self.begin("then")

    def whole(self) -> None:
        """All members are up to date again."""
        self.surely(self.stage.settle)

    def surely(self, call: Callable[[], object]) -> None:
        """Do it; a victim that ends meanwhile is started, and it is done again."""
        try:
            call()
        except (Ended, LogyardError):
            if self.stage.ended() is None:
                raise
            self.step(f"then the node ended with {self.stage.ended()}")
            self.revive()
            call()

    def begin(self, when: str) -> None:
        """Start the victim, which may refuse: then it is replaced, as the manual says."""
        stage = self.stage
        try:
            codes = stage.start()
        except ClusterFailed as error:
            self.step(f"{when}: it does not start ({str(error).splitlines()[0]}), and is replaced")
            stage.replace()
            return
        if self.refused_by_others():
            self.step(f"{when}: the others refuse it as an older copy (exit {stage.ended()}), and it is replaced")
            stage.replace()
            return
        stage.settle()
        row = stage.status()
        seen = [f"starts that died: {codes}"] if codes else []
        seen += [f"{row['damage'][key]} groups {key}" for key in ("mended",) if row["damage"][key]]
        seen += [f"{row['damage']['refilled']} stretches refilled"] if row["damage"]["refilled"] else []
        self.step(f"{when}: started, {', '.join(seen) or 'nothing to mend'}")

    def refused_by_others(self) -> bool:
        """Whether the node ends soon after its start because the others know more of its directory."""
        stage = self.stage

        def decided() -> bool:
            if stage.ended() is not None:
                return True
            # It may end while it is asked.
            links = [row for row in stage.status()["peers"] if row["live"]]
            return len(links) == len(stage.cluster.nodes) - 1

        with contextlib.suppress(Ended):
            wait(decided, "the victim is live, or ended")
        return stage.ended() is not None

    @property
    def uid(self) -> int:
        """Of the cell's group."""
        return int(self.stage.yard.describe(self.stage.name)["uid"])

    # An older state of a file

    def targets(self) -> list[Path]:
        """The files of a kind."""
        data, kind = self.stage.data, self.cell.kind
        return {
            "wal": lambda: damage.wal_files(data)[-1:], "segment": lambda: damage.segments(data)[-1:],
            "segment index": lambda: damage.segments(data)[-1:], "snapshot": lambda: damage.environments(data),
            "ring": lambda: [damage.ring(data, self.uid)],
            "meta": lambda: damage.environments(data)[:1], "generation": lambda: damage.generations(data)[-1:],
            "bodies": lambda: damage.generations(data, kind)[-1:],
            "config": lambda: [self.stage.cluster.nodes[self.stage.victim].config_path],
        }[kind]()  # fmt: skip

    def remember(self) -> None:
        """Copies of the kind's files as they are now."""
        shutil.rmtree(self.old, ignore_errors=True)
        self.old.mkdir()
        for number, path in enumerate(self.targets()):
            shutil.copyfile(path, self.old / str(number))

    def stale(self) -> None:
        """After more was written, and the node died, the older copies stand there."""
        stage, kind = self.stage, self.cell.kind
        remembered = self.targets()
        stage.write(LAST_WORDS)
        if kind == "ring":
            stage.ringed()
        elif kind != "wal":
            stage.fill()
            stage.yard.snapshot([stage.name], stage.victim)
        if kind in STORED:
            stage.yard.compact(stage.victim)
        stage.stored()
        stage.kill()
        targets = remembered
        if kind in ("segment", "segment index"):
            # They never change: an older one stands under a newer one's name.
            targets = damage.segments(stage.data)[-1:]
        elif kind in STORED:
            payload = stage.acknowledged[sorted(stage.acknowledged)[-30]][1]
            targets = [damage.find(damage.generations(stage.data, kind), payload[1000:1100])[-1].path]
        for number, path in enumerate(targets):
            old = (self.old / str(number)).read_bytes()
            new = path.read_bytes()
            if kind == "segment index":
                # The rows of another segment in place of its own; its length stays.
                at, there = damage.index_of(path), damage.index_of(self.old / str(number))
                old = new[:at] + old[there:][: len(new) - at].ljust(len(new) - at, b"\0")
            assert old != new, f"{path} has not changed"
            path.write_bytes(old)
            self.result.hits += 1
        self.begin("stopped")

    # Errors of the kernel

    def failing_reads(self) -> None:
        """Reads fail under the running node, which scrubs and serves; then it is started again."""
        stage, kind = self.stage, self.cell.kind
        paths = {
            "wal": lambda: damage.wal_files(stage.data), "segment": lambda: damage.segments(stage.data),
            "segment index": lambda: damage.segments(stage.data)[:1],
            "ring": lambda: [damage.ring(stage.data, self.uid)],
            "snapshot": lambda: damage.environments(stage.data), "meta": lambda: damage.environments(stage.data)[:1],
            "generation": lambda: damage.generations(stage.data),
            "bodies": lambda: damage.generations(stage.data, kind),
        }[kind]()  # fmt: skip
        with strace.Failing(stage.pids()[:1], strace.READS, "EIO", paths, self.trace) as failing:
            found = stage.scrub()
            self.tell("running", found)
            if stage.ended() is None:
                self.judge()
        self.result.hits += failing.hits
        self.revive()
        self.whole()
        self.judge()
        stage.kill()
        self.begin("stopped")

    def failing_writes(self) -> None:
        """Writes fail under the running node until one was hit; then the disk is good again."""
        stage, kind, fault = self.stage, self.cell.kind, self.cell.fault
        error, calls = ("ENOSPC" if fault == "ENOSPC" else "EIO"), strace.WRITES
        newest = int(damage.wal_files(stage.data)[-1].stem, 16)
        numbers = range(newest, newest + 8)
        new = [stage.data / "segments" / f"{number:016x}.seg.tmp" for number in numbers]
        paths = {
            "wal": [stage.data / "wal" / f"{number:016x}.wal" for number in numbers],
            "segment": new, "segment index": new, "ring": [damage.ring(stage.data, self.uid)],
            "snapshot": damage.environments(stage.data),
            "meta": damage.environments(stage.data)[:1], "generation": damage.next_generations(stage.data),
            "bodies": damage.next_generations(stage.data, "bodies"),
        }[kind]  # fmt: skip
        if kind == "wal" and error == "ENOSPC":
            # Where the log's space comes from: what is written later was reserved.
            paths = [stage.data / "wal" / f"new-{number}.spare{end}" for number in range(4) for end in ("", ".tmp")]
            calls = f"fallocate,{calls}"
        if kind == "segment index":
            calls = strace.SYNCS
        before = dict(stage.refused)
        with strace.Failing(stage.pids(), calls, error, paths, self.trace) as failing:
            self.provoke(lambda: failing.hits > 0)
            if stage.ended() is None:
                stage.write(LAST_WORDS, timeout=NO_PROCESS_S)
        self.result.hits += failing.hits
        said = {
            code: count - before.get(code, 0) for code, count in stage.refused.items() if count > before.get(code, 0)
        }
        text = ", ".join(f"{count} with {code}" for code, count in said.items())
        self.step(f"running: {failing.hits} calls failed, refused: {text or 'nothing'}")
        if stage.ended() is not None:
            self.step(f"the node ended with {stage.ended()}")
        self.revive()
        self.whole()
        wait(lambda: stage.write(4, timeout=5.0) == 4, "writes go on")
        self.whole()
        self.judge()
        stage.kill()
        self.begin("stopped")

    def provoke(self, done: Callable[[], bool]) -> None:
        """Do what writes to the kind's files, until one write was hit."""
        stage = self.stage
        deadline = time.monotonic() + PROVOKE_S
        while not done() and stage.ended() is None and time.monotonic() < deadline:
            stage.write(24, timeout=NO_PROCESS_S)
            try:
                if self.cell.kind == "snapshot":
                    stage.yard.snapshot([stage.name], stage.victim)
                elif self.cell.kind in (*STORED, "ring"):
                    if self.cell.kind == "ring":
                        stage.release()
                    stage.yard.compact(stage.victim)
            except LogyardError as error:
                stage.refused[error.code] = stage.refused.get(error.code, 0) + 1

    # The configuration

    def config(self) -> None:
        """node.toml is read at a start, and never written by a node."""
        stage, fault = self.stage, self.cell.fault
        path = stage.cluster.nodes[stage.victim].config_path
        good = path.read_bytes()
        if fault in ("EIO on write", "ENOSPC"):
            error = "ENOSPC" if fault == "ENOSPC" else "EIO"
            with strace.Failing(stage.pids(), strace.WRITES, error, [path], self.trace) as failing:
                stage.fill()
                stage.yard.snapshot([stage.name], stage.victim)
            stage.kill()
            self.begin("stopped")
            self.result.hits = failing.hits
            self.result.reason = "" if failing.hits else "no node writes its configuration: not one call to fail"
            return
        stage.kill()
        if fault == "EIO on read":
            self.result.hits = self.start_traced(path)
        else:
            text = good.replace(b"[limits]", b"[limits]\nsegments_max = 63") if fault == "stale copy" else good
            offset = good.index(b"[limits]") + self.draw.randrange(10, 60)
            path.write_bytes(text)
            if fault != "stale copy":
                damage.spoil(Place(path, offset), fault)
            self.result.hits = int(path.read_bytes() != good)
            self.try_start()
        path.write_bytes(good)
        if stage.cluster.nodes[stage.victim].process is None:
            self.begin("with the file restored")
        else:
            stage.kill()
            self.begin("started again with the file restored")

    def try_start(self) -> None:
        """A start with a damaged configuration: refused, or it runs with what is left of it."""
        stage = self.stage
        stage.cluster.spawn(stage.victim)
        process = stage.cluster.nodes[stage.victim].process
        assert process is not None
        try:
            stage.cluster.wait_ready(stage.victim)
            self.step("it starts with that")
            stage.write(LAST_WORDS)
        except ClusterFailed as error:
            self.step(f"it refuses to start with exit {process.wait()}: {str(error).splitlines()[-1][-160:]}")

    def start_traced(self, path: Path) -> int:
        """A start in which reads of the configuration fail."""
        words = strace.words(strace.READS, "EIO", [path], self.trace)
        import subprocess

        command = [*words, sys.executable, "-m", "logyard.service.cli", "serve", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        self.step(f"it refuses to start with exit {done.returncode}: {done.stderr.strip().splitlines()[-1][-160:]}")
        return strace.count(self.trace)


LAST_WORDS = 8


def run(cells: Sequence[Cell], seed: int, directory: Path) -> list[Result]:
    """One cluster for all; where a cell leaves it broken, the next one gets another."""
    results: list[Result] = []
    waiting = list(cells)
    traced = available()
    draw = random.Random(seed)
    generation = 0
    while waiting:
        generation += 1
        with LocalCluster(directory / f"yard-{generation}", 3, limits=LIMITS) as cluster:
            cluster.start()
            with connect(cluster) as yard:
                stage = Stage(cluster, yard)
                while waiting:
                    cell = waiting.pop(0)
                    if cell.fault in INJECTED and not traced:
                        results.append(Result(cell, reason="no strace that may trace", not_run=True))
                        continue
                    trial = Trial(stage, cell, draw.choice([1, 2, 3]), seed, directory)
                    found = trial.run(f"cell-{len(results)}")
                    results.append(found)
                    mark = "ok" if found.passed else "FAILED"
                    print(
                        f"{cell}: {mark} in {found.seconds:.1f} s: {'; '.join(found.steps)}",
                        file=sys.stderr,
                        flush=True,
                    )
                    if not found.passed:
                        print("   ", *found.problems, *found.lost[:3], *found.wrong[:3], file=sys.stderr, flush=True)
                        break
    return results
