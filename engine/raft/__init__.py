"""Raft as a pure library: messages and ticks in, one `Ready` out. This page says how a host must drive it.

One `core.Raft` is one member of one group. It never waits, opens a file, reads a clock, starts a task or draws a
random number; what it needs of the world is injected (`draw`, `encode`, the shared set `live`). It is driven from one
thread. Model: etcd-io/raft.

**The turn.** Something happens: a message (`step`), a proposal (`propose`, `read`, `propose_membership`, `transfer`),
a tick (`tick`), news of nodes or links (`on_liveness`, `on_link_reset`), a finished write (`on_persisted`), an
applied entry (`on_applied`). None of them does anything but change state. Then, once for all that happened in the
turn, the host calls `ready()` and does what it says:

1. `truncated`: forget what was written or promised from that index on.
2. Send `messages`. They may leave before anything is written, because what they state is durable already: the core
   itself holds back what is not. An APPEND whose `entries` are None with `last >= first` has left memory: read
   `first..last` from segments, set `entries` (fewer will do, then lower `last`), send. A SNAPSHOT is not sent: it
   asks for a transfer of a snapshot to `to`; report the end of it with `snapshot_sent`, whichever way it ended.
3. Make `hard_state`, then `entries` durable. Then send `after`, and call `on_persisted(*ready.token)`: once for each
   `Ready` that had a hard state or entries, in the order of the `Ready`s. Any number of them may be under way; a
   shared WAL makes many groups' durable with one sync, but each group is told of its own (pitfall 9).
4. Apply up to `commit`, then `on_applied`. Applying may run ahead of this node's own disk: a quorum has the entries.
5. Answer `reads` when their index is applied, and `failed_reads` with "not the leader".

Whoever sees `ready()` give None has nothing to do; the test is one attribute. Proposals are encoded by the host for
`log.last_index + 1` and `term`, right before `propose`.

**Time.** A member that `is_quiet` needs no tick. Look at it after a turn: put the member on the list of those that
are ticked, or take it off. A quiet leader's live followers have said that they hold its last entry and its commit
index; a quiet follower knows a leader on a live node. There are no heartbeats. In their place stands the node-level
liveness that the host keeps for all groups together: mutate the shared set, then call `on_liveness` for the groups it
may concern. It decides when to campaign, to wake, to step down; never what is committed or read (law 10). A member
that is ticked asks again by itself when an answer stays away (`Limits.probe_ticks`), so a lost message never stops a
group; `on_link_reset` merely makes it faster, except in one case: a leader that is quiet when its follower's *memory*
is lost (a restart) has to be told, by that call.

**Durability.** `term` and `vote` travel as one pair; they are never written apart (pitfall 6). A vote, and the
candidate's own, counts when it is durable. A follower acknowledges the last *stable* index that its current leader
has validated; the leader's own share is its stable index, too, so that a leader with a slow disk can commit with its
followers' (architecture, law 2).

**Restart.** Give `RaftLog` what was recovered (snapshot, term runs of what is in segments, entries in memory), and
`Raft` the hard state, the commit index as far as it is known (it is a hint), and the configuration with the index
that set it; newer configurations are found in the entries. `applied` starts at the snapshot.

**Memory.** `RaftLog` is the group's memtable. `release_memory(upto)` when a durable segment holds the entries,
`compact(index, term)` when a durable snapshot does. Leave a tail for followers that are a little behind: who needs
what was compacted needs the snapshot.

**Snapshots.** A follower's host makes the machine's state and the payloads durable, then calls `install_snapshot`;
False means that it was not needed, and the host keeps what it has. The next `Ready` may carry `truncated` alone:
write it with the snapshot's index as the log's new start.

**Membership.** A list of changes takes effect as one: in a simple step if at most one voter comes or goes, through a
joint configuration otherwise, which the leader, or a later one, leaves by itself. A configuration counts from its
append on. Add a learner as `promotable` and the leader makes it a voter when it has caught up. A removed leader steps
down when its removal is committed. Where a quorum is gone for good, `force_shrink` makes one member the group. A
replica of a removed member may be deleted when all but (term, vote) and the position of its last entry is forgotten:
made anew, the member gets these back (`promise`), and so can't help to elect who lacks what it once acknowledged.

Whatever a peer says raises nothing here: malformed, late and misdirected messages are dropped as the network might
have dropped them. An `AssertionError` is a bug, or a broken promise of the host: stop the group.

**Damage.** A member that lost records is made with a `Mend`, and with any log that it once had: it takes part again
when the core says so (`Raft.mend` is None), and is ticked until then. Give it a number that no damage of this node had
before.

Modules: `core` (state and doors) and `dispatch` over the verbs `election`, `replication`, `reads`, `snapshots`,
`mending`, `membership`,
`quiescence`; the parts `raft_log`, `progress`, `quorum`, `configuration`; the nouns `messages`, `ready`, `state`.
"""
