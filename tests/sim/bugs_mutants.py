"""Small changes of single lines that the product's own tests once did not notice. Planted by `planted`."""

from __future__ import annotations

from logyard.engine.host.hibernation import Hibernation
from logyard.engine.host.homes import Homes
from logyard.engine.log.meta import MetaStore
from logyard.engine.raft import quiescence
from logyard.payloads.store import PayloadStore
from logyard.payloads.writing import Writing

from .bugs import Bug, edited

BUGS = (
    Bug(
        "wakes_into_any_term",
        "a sleeper leads on in the term that it won",
        [
            (
                Hibernation,
                "_wake",
                edited(
                    (
                        "leader == own and raft.vote == own and raft.term == row.term",
                        "leader == own and raft.vote == own",
                    )
                ),
            )
        ],
        featured=True,
    ),
    Bug(
        "deposed_leader_sleeps",
        "only who leads puts a group to sleep",
        [(Hibernation, "_due_batch", edited((" or member.raft.role != LEADER:", ":")))],
        featured=True,
    ),
    Bug(
        "row_in_hand_dropped",
        "a full map loses no payload",
        [(Writing, "write", edited(("unwritten.append(current)", "pass")))],
        featured=True,
    ),
    Bug(
        "meta_names_not_synced",
        "the names of the meta store's files are durable before it is used",
        [(MetaStore, "open", edited(("disk.sync_directory(self._directory)", "pass")))],
    ),
    Bug(
        "nobody_probed_behind_the_dead",
        "a lost append is probed for, whoever else is dead",
        [
            (
                quiescence,
                "_tick_leader",
                edited(("if node not in live:\n            continue", "if node not in live:\n            break")),
            )
        ],
        featured=True,
    ),
    Bug(
        "home_hides_another",
        "a new home hides no other",
        [(Homes, "hidden_by", edited(("if dense or (at", "if dense and (at")))],
        featured=True,
    ),
    Bug(
        "first_of_the_lost_forgotten",
        "every entry of a lost run is lost",
        [(PayloadStore, "is_lost", edited(("home.last >= first", "home.last > first")))],
        featured=True,
    ),
)
