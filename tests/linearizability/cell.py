"""One register or one key: every value written once is decided by `blocks`, anything else by a search.

The search is Wing and Gong's with Lowe's memory of configurations (done operations, value), and these cuts, each of
which keeps a linearization if there is one:
- a read that fits the value is taken at once;
- a value that nobody still waits for is as good as any other such value (`SPENT`);
- a write that nobody reads is taken just before another write, or at once where the value is spent;
- of equal operations the one that ends first goes first;
- a value with waiting readers and no writer left is not left;
- a whole block that may begin now goes at once where the value is spent.
While somebody waits for a value to be gone, any write may be what takes its place: none is taken without a choice then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .blocks import Step, Zone, clash, needed_values, overlap, solve_blocks
from .chains import untangle
from .history import NEVER, Operation, Truth, Value, plain
from .verdict import CONFIGURATIONS_MAX, VALID, Verdict


class Spent:
    """The one value that stands for all that nobody waits for."""

    def __repr__(self) -> str:
        return "SPENT"


SPENT = Spent()


DIFFERENT = Truth(False)
"""The result of a compare-and-set that found another value."""


def steps_of(operations: Sequence[Operation]) -> list[Step]:
    """What operations of the register or kv model ask of a cell. Reads without an answer say nothing."""
    steps = []
    for item in operations:
        if item.f in ("read", "get"):
            if not item.pending:
                steps.append(Step("read", item.result, None, item.start, item.end, item))
        elif item.f == "cas":
            assert isinstance(item.argument, tuple)
            expected, new = item.argument
            if item.result == DIFFERENT and not item.pending:
                steps.append(Step("differs", expected, None, item.start, item.end, item))
                continue
            steps.append(Step("cas", expected, new, item.start, item.end, item))
        else:
            kind = "append" if item.f == "append" else "write"
            new = None if item.f == "delete" else item.argument
            steps.append(Step(kind, None, new, item.start, item.end, item))
    return steps


def appended(value: Value, new: Value) -> Value:
    """Text is continued; anything else makes a list longer (a list by its items)."""
    if isinstance(new, str) and (value is None or isinstance(value, str)):
        return (value or "") + new
    tail = new if isinstance(new, tuple) else (new,)
    if value is None:
        return tail
    return (*(value if isinstance(value, tuple) else (value,)), *tail)


def begins_with(whole: Value, start: Value) -> bool:
    """Whether appends may lead from `start` to `whole`."""
    if whole == start:
        return True
    if start is None:
        return isinstance(whole, str | tuple)
    if isinstance(whole, str):
        return isinstance(start, str) and whole.startswith(start)
    if isinstance(whole, tuple):
        if isinstance(start, str):
            return bool(whole) and isinstance(whole[0], str) and whole[0].startswith(start)
        head = start if isinstance(start, tuple) else (start,)
        return whole[: len(head)] == head
    return False


def mentions(whole: Value, item: Value) -> bool:
    """Whether `item`, appended, may be a part of `whole`."""
    if isinstance(whole, str):
        return isinstance(item, str) and item in whole
    return isinstance(whole, tuple) and any(part == item or mentions(part, item) for part in whole)


def solve_cell(operations: Sequence[Operation], configurations: int = CONFIGURATIONS_MAX) -> Verdict:
    """Whether one key's history is that of a register or a key-value cell that begins as null."""
    steps = steps_of(operations)
    differs = [step for step in steps if step.kind == "differs"]
    if differs:
        # Without them it is decided as ever; and most of them say nothing that is not plain to see.
        steps = [step for step in steps if step.kind != "differs"]
        open_ = doubtful(differs, steps)
        found = solve_steps(steps, configurations)
        if not found.valid or not open_:
            return found
        return Search([*steps, *open_], any(step.kind == "append" for step in steps), configurations).run()
    return solve_steps(steps, configurations)


def doubtful(differs: Sequence[Step], steps: Sequence[Step]) -> list[Step]:
    """Those of `differs` whose value may have been there while they were under way: it was made before they ended, and
    nothing that began when it was made had taken its place before they began."""
    made: dict[Value, list[Step]] = {None: []}
    changes = sorted((step for step in steps if step.kind != "read"), key=lambda step: step.start)
    appends = any(step.kind == "append" for step in steps)
    for step in changes:
        made.setdefault(step.new, []).append(step)
    starts = [step.start for step in changes]
    gone = [NEVER] * (len(changes) + 1)
    for at in range(len(changes) - 1, -1, -1):
        gone[at] = min(gone[at + 1], changes[at].end)
    found = []
    for step in differs:
        makers = made.get(step.expected, [])
        if appends or step.expected is None:
            found.append(step)
            continue
        if not any(maker.start < step.end for maker in makers):
            continue
        last = max(maker.end for maker in makers)
        if gone[bisect_right(starts, last)] < step.start:
            continue
        found.append(step)
    return found


def solve_steps(steps: list[Step], configurations: int) -> Verdict:
    """The same of steps that all write, or read a value."""
    steps = untangle(steps) or steps
    appends = any(step.kind == "append" for step in steps)
    if not appends:
        needed = needed_values(steps)
        steps = [step for step in steps if step.kind == "read" or not (step.end == NEVER and step.new not in needed)]
        found = solve_blocks(steps) or early_exit(steps)
        if found is not None:
            return found
    return Search(steps, appends, configurations).run()


def early_exit(steps: Sequence[Step]) -> Verdict | None:
    """Contradictions that are seen without a search, where some values are written more than once."""
    writers: dict[Value, list[Step]] = {}
    for step in steps:
        if step.kind != "read":
            writers.setdefault(step.new, []).append(step)
    zones = []
    blocks: dict[Value, list[Step]] = {}
    for step in steps:
        if step.kind == "write" or step.end == NEVER:
            continue
        makers = writers.get(step.expected, [])
        if step.expected is not None:
            if not makers:
                return Verdict(False, f"{step.source}: {plain(step.expected)} was never written")
            if step.end < min(maker.start for maker in makers):
                return Verdict(False, f"{step.source}: {plain(step.expected)} was written only later")
            if len(makers) == 1:
                blocks.setdefault(step.expected, list(makers)).append(step)
                continue
        if step.kind == "read":
            zones.append(Zone(step.end, step.start, step.expected))
    for value, block in joined(blocks).items():
        zones.append(Zone(min(step.end for step in block), max(step.start for step in block), value))
    # Values that are written twice may come and go: reads of them have no zone but their own.
    found = overlap(zones)
    return Verdict(False, clash(*found)) if found else None


def joined(blocks: dict[Value, list[Step]]) -> dict[Value, list[Step]]:
    """Blocks that a cas joins, as one: the first step of a block made its value."""
    found: dict[Value, list[Step]] = {}
    for value, block in blocks.items():
        root, maker = value, block[0]
        passed = {value}
        while maker.kind == "cas" and maker.expected in blocks and maker.expected not in passed:
            root = maker.expected
            passed.add(root)
            maker = blocks[root][0]
        found.setdefault(root, []).extend(block)
    return found


class Search:
    """A depth-first search over one cell's steps. `run` is called once."""

    def __init__(self, steps: Sequence[Step], appends: bool, configurations: int) -> None:
        self.steps = sorted(steps, key=lambda step: step.start)
        self.appends = appends
        self.configurations = configurations
        self.required = 0
        self.needs: dict[Value, int] = {}
        # Values that must not be there.
        self.cares: dict[Value, int] = {}
        self.cared = 0
        self.makes: dict[Value, int] = {}
        self.writes = 0
        for number, step in enumerate(self.steps):
            bit = 1 << number
            if step.end != NEVER:
                self.required |= bit
            if step.kind in ("read", "cas"):
                self.needs[step.expected] = self.needs.get(step.expected, 0) | bit
            if step.kind == "differs":
                self.cares[step.expected] = self.cares.get(step.expected, 0) | bit
                self.cared |= bit
            if step.kind in ("write", "cas"):
                self.makes[step.new] = self.makes.get(step.new, 0) | bit
                self.writes |= bit
        self.deepest = -1
        self.blocking: Step | None = None

    def run(self) -> Verdict:
        """Search; say what stood in the way at the deepest place."""
        seen: set[tuple[int, Value]] = set()
        stack: list[tuple[int, Value]] = [(0, None)]
        while stack:
            done, value = self.settle(*stack.pop())
            if not self.required & ~done:
                return VALID
            if (done, value) in seen:
                continue
            seen.add((done, value))
            if len(seen) > self.configurations:
                return Verdict(None, f"not decided after {self.configurations} configurations")
            stack.extend(self.branches(done, value))
        return Verdict(False, f"{self.blocking.source if self.blocking else 'nothing'} fits nowhere")

    def waiting(self, value: Value, done: int) -> bool:
        """Whether somebody may still want to see `value`, or what is appended to it, or that it is not there."""
        if not self.appends:
            return bool((self.needs.get(value, 0) | self.cares.get(value, 0)) & ~done)
        return any(
            mask & ~done and begins_with(whole, value) for whole, mask in (*self.needs.items(), *self.cares.items())
        )

    def enabled(self, done: int) -> list[int]:
        """Steps that may be next: none that is left ended before they began."""
        found = []
        first_end = NEVER
        number = (~done & (done + 1)).bit_length() - 1
        steps = self.steps
        for at in range(number, len(steps)):
            step = steps[at]
            if step.start > first_end:
                break
            if not done >> at & 1:
                found.append(at)
                first_end = min(first_end, step.end)
        return [at for at in found if steps[at].start < first_end]

    def settle(self, done: int, value: Value) -> tuple[int, Value]:
        """Take what needs no choice."""
        while True:
            before = done
            enabled = self.enabled(done)
            for at in enabled:
                step = self.steps[at]
                fits = value is not SPENT and step.expected == value
                if (step.kind == "read" and fits) or (step.kind == "differs" and not fits):
                    done |= 1 << at
            if value is not SPENT and not self.waiting(value, done):
                value = SPENT
            if value is SPENT and not self.cared & ~done:
                done |= self.unread(enabled, done) | self.whole_blocks(enabled, done)
            if done == before:
                return done, value

    def unread(self, enabled: Sequence[int], done: int) -> int:
        """Writes whose values nobody waits for."""
        found = 0
        for at in enabled:
            step = self.steps[at]
            if done >> at & 1 or step.kind not in ("write", "append"):
                continue
            if not (self.waiting if step.kind == "write" else self.mentioned)(step.new, done):
                found |= 1 << at
        return found

    def mentioned(self, new: Value, done: int) -> bool:
        """Whether a value that somebody waits for may hold what is appended."""
        items = new if isinstance(new, tuple) else (new,)
        return any(
            mask & ~done and all(mentions(whole, item) for item in items)
            for whole, mask in (*self.needs.items(), *self.cares.items())
        )

    def whole_blocks(self, enabled: Sequence[int], done: int) -> int:
        """A value written once, with all of its readers, where all of them may begin: nothing depends on when."""
        if self.appends:
            return 0
        may = sum(1 << at for at in enabled)
        for at in enabled:
            step = self.steps[at]
            if step.kind != "write" or done >> at & 1:
                continue
            block = 0
            while step.new is not None and self.makes[step.new] == 1 << at:
                readers = self.needs.get(step.new, 0)
                block |= 1 << at | readers
                after = readers & self.writes
                if readers & ~may or after & (after - 1):
                    break
                if not after:
                    return block
                at = after.bit_length() - 1
                step = self.steps[at]
        return 0

    def stuck(self, value: Value, done: int) -> bool:
        """Whether leaving `value` would leave somebody without it for good."""
        if value is SPENT or self.appends:
            return False
        return bool(self.needs.get(value, 0) & self.required & ~done) and not self.makes.get(value, 0) & ~done

    def branches(self, done: int, value: Value) -> list[tuple[int, Value]]:
        """Every configuration that one more write, cas or append leads to; the most urgent one last."""
        enabled = self.enabled(done)
        depth = done.bit_count()
        if depth > self.deepest:
            self.deepest = depth
            self.blocking = min((self.steps[at] for at in enabled), key=lambda step: step.end, default=None)
        hidden = 0 if self.cared & ~done else self.unread(enabled, done)
        best: dict[tuple[str, Value, Value], int] = {}
        for at in enabled:
            step = self.steps[at]
            if step.kind in ("read", "differs") or (step.kind == "cas" and (value is SPENT or step.expected != value)):
                continue
            shape = (step.kind, step.expected, step.new)
            if shape not in best or step.end < self.steps[best[shape]].end:
                best[shape] = at
        # Whoever makes what the most urgent reader waits for is tried first: the last one of the list.
        urgent = {
            self.steps[at].expected: self.steps[at].end for at in reversed(enabled) if self.steps[at].kind == "read"
        }
        found: list[tuple[float, float, int, Value]] = []
        for at in best.values():
            step = self.steps[at]
            after = done | 1 << at
            if step.kind == "append":
                new = SPENT if value is SPENT else appended(value, step.new)
            else:
                new = step.new
                if step.kind == "write":
                    after |= hidden
            if new == value or not self.stuck(value, after):
                found.append((urgent.get(new, NEVER), step.end, after, new))
        return [(after, new) for _, _, after, new in sorted(found, key=lambda row: row[:2], reverse=True)]
