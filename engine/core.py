"""What the engine needs of a core, the part of a group that decides what its log is: `engine.raft` is one, and any
object with these fields and verbs is driven by the same host (`tests/engine/host/test_second_core.py`).

A core is pure: it never waits, opens a file or reads a clock. Whatever happens is told to it by a verb, which changes
its state and `dirty` and nothing else; then `hand_out`, or else `ready`, says once a turn what there is to write and to
send, and `on_persisted` and `on_applied` say that it was done (`engine.raft`, "The turn"). What a core and the host
speak in is `engine.raft`'s: `RaftLog`, which is the memtable, `Configuration`, `Message`, `Ready`, `Progress`, `Mend`,
`Limits` and the roles. How its members agree is its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from .entry import Entry
from .raft.configuration import Change, Configuration
from .raft.mending import Mend
from .raft.messages import Message
from .raft.progress import Progress
from .raft.raft_log import RaftLog
from .raft.ready import Ready
from .raft.state import Limits
from .raft.steady import Handed


class Core(Protocol):
    """One member of one group. The host reads fields and never writes one."""

    uid: int
    node: int
    limits: Limits

    term: int
    """Durable with `vote`, as a `Ready` says. A core without elections stays in one term; a term never falls."""
    vote: int
    log: RaftLog
    role: int
    leader: int
    """Which node leads, as far as this one knows; 0: nobody."""
    commit: int
    applied: int
    lead_index: int
    """A leader's first entry, of its own kind: once it is applied, all of earlier leaders is."""
    stopped: bool
    dirty: bool
    """The next turn asks what there is to do. Read by the host as a field, for each group and turn."""
    untold: int
    """Who tells followers of the commit index (`raft.state.UNTOLD`); always 0 where nobody has to."""

    configuration: Configuration
    """In force from its append on, at `configuration_index`."""
    configuration_index: int
    base: tuple[int, Configuration]
    """The newest one that is applied, and its index."""
    history: tuple[tuple[int, Configuration], ...]
    """Those after it, ascending."""
    voter: bool
    may_lead: bool
    promise: tuple[int, int]
    """(term, index) of the last entry of an earlier replica here."""
    mend: Mend | None
    """Records were lost, and this member does not count yet."""

    @property
    def progress(self) -> Mapping[int, Progress]:
        """What a leader knows of the others, by node; empty where this member does not lead."""
        ...

    @property
    def is_quiet(self) -> bool:
        """No tick is needed until something happens."""
        ...

    @property
    def has_ready(self) -> bool:
        """`ready` may have something."""
        ...

    @property
    def transferring(self) -> bool:
        """Leadership is on its way to another member."""
        ...

    @property
    def applied_configuration(self) -> Configuration:
        """The configuration in force at `applied`."""
        ...

    # ---- what happened

    def step(self, m: Message) -> str | None:
        """Take a message; return what only a lie explains, or what ended this member, which is `stopped` then. Raises
        nothing for what a peer said."""
        ...

    def tick(self) -> bool:
        """Count a tick; return whether the member is quiet."""
        ...

    def on_liveness(self) -> None:
        """Take note that other nodes are up than before."""
        ...

    def on_link_reset(self, node: int) -> None:
        """Take note that messages to and from `node` may be lost."""
        ...

    def on_persisted(self, term: int, vote: int, index: int, entry_term: int, out: list[Message] | None = None) -> None:
        """Take note that the oldest of what was handed out with a token is durable. `out` takes what this lets go."""
        ...

    def on_applied(self, index: int) -> None:
        """Take note that entries up to `index` are applied."""
        ...

    def snapshot_sent(self, node: int, index: int, ok: bool) -> None:
        """Take note that a transfer that a SNAPSHOT message asked for ended."""
        ...

    def install_snapshot(self, index: int, term: int, configuration: Configuration) -> bool:
        """Go on from a durable snapshot; return False where it is not needed."""
        ...

    # ---- what is asked of it

    def propose(self, entry: Entry, urgent: bool = False) -> None:
        """Append an entry, made for `log.last_index` + 1 and `term`. Raises `NotLeader`, `Busy`; nothing was appended
        then."""
        ...

    def propose_membership(self, changes: Change | Sequence[Change], *, auto_leave: bool = True) -> int:
        """Append changes of members as one; return the entry's index. Raises `NotLeader`, `Refused`."""
        ...

    def leave_joint(self) -> int:
        """End a joint configuration; return the entry's index. Raises `NotLeader`, `Refused`."""
        ...

    def force_shrink(self) -> int:
        """Make this member the group; return the entry's index. Raises `Refused`."""
        ...

    def read(self, context: int) -> None:
        """Ask for a linearizable index: a `Ready` answers. Raises `NotLeader`."""
        ...

    def campaign(self, transfer: bool = False) -> None:
        """Try to lead."""
        ...

    def transfer(self, to: int) -> None:
        """Hand leadership to `to`. Raises `NotLeader`, `Refused`."""
        ...

    def resign(self, name_heir: bool) -> None:
        """Give up leading, as this node is about to end."""
        ...

    def abdicate(self) -> None:
        """Give up leading if another member can lead: this node's disk hangs."""
        ...

    def heirs(self) -> list[int]:
        """Return the members that may lead in its place, the best first."""
        ...

    def give_way(self) -> None:
        """Lead no more, and try no more to."""
        ...

    def stand_again(self) -> None:
        """Try to lead again where nobody does: what `give_way` was for is over. The host has the member ticked."""
        ...

    def on_awake(self, node: int) -> None:
        """Take note that the group woke on `node`, which holds this member to be asleep."""
        ...

    def stop(self) -> None:
        """Take no more part."""
        ...

    def resume(self) -> None:
        """Look for what can be sent: there is room again."""
        ...

    def tell(self) -> bool:
        """Tell followers of the commit index; return whether there is a `Ready` for it."""
        ...

    def has_told(self, index: int) -> bool:
        """Return whether all followers were told that this index is committed."""
        ...

    def note_untold(self, many: bool) -> None:
        """Note that somebody will call `tell`, soon or, of many, later."""
        ...

    # ---- sleep: a group is only a row, and a new object when it wakes

    def may_hibernate(self) -> bool:
        """Return whether nothing is under way: all this member has is durable, committed and applied."""
        ...

    def fall_asleep(self) -> None:
        """Take note that the group is only a row from now on, and this object is asked nothing more."""
        ...

    def resume_leader(self, asleep: Collection[int]) -> None:
        """Lead on, as before the sleep; the members in `asleep` have all of it."""
        ...

    def resume_follower(self, leader: int) -> None:
        """Follow on, as before the sleep."""
        ...

    def orphan(self) -> None:
        """Take note that the leader before the sleep is gone."""
        ...

    # ---- what there is to do

    def hand_out(self, out: list[Message]) -> Handed | None:
        """Return what there is to write, with what may leave at once in `out`; None: nothing was changed, and `ready`
        has to be asked. A core may always say None."""
        ...

    def ready(self) -> Ready | None:
        """Return what there is to do, and not `dirty` any more."""
        ...

    def all_nodes(self) -> set[int]:
        """Return the members by any configuration that may be in force somewhere."""
        ...

    def check(self) -> None:
        """Assert its invariants: tests call it between verbs."""
        ...

    def configuration_at(self, index: int) -> Configuration:
        """Return the configuration in force at `index`, applied <= index <= last index."""
        ...
