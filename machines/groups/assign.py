"""Which member is to read which partition: sticky, even, by zone, and the same on every replica.

Pure. Invariants: every partition whose topic somebody reads has a member; of two members that read the same topics
neither has two partitions more than the other; a partition leaves its member only for that. Called by `state`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from logyard.protocol.groups import Key

TAKERS = 8
"""Of members that have equally little, so many are looked at for whose zone a partition fits best."""


class Reader(NamedTuple):
    """A member, as it counts here: where it is, and which topics it reads."""

    zone: str
    topics: Collection[int]


class Place(NamedTuple):
    """A partition: whose it is, or is to be (0: nobody's), and where it is led ("": not known)."""

    owner: int
    zone: str


def assign(readers: Mapping[int, Reader], places: Mapping[Key, Place]) -> dict[Key, int]:
    """Return the member of each partition, by number; those that nobody reads are left out."""
    members = sorted(readers)
    load = dict.fromkeys(members, 0)
    found: dict[Key, int] = {}
    held: dict[int, list[Key]] = {member: [] for member in members}
    homeless: list[Key] = []
    of_topic = {
        topic: [member for member in members if topic in readers[member].topics] for topic in {key[0] for key in places}
    }
    for key in sorted(places):
        owner = places[key].owner
        if owner in readers and key[0] in readers[owner].topics:
            found[key] = owner
            held[owner].append(key)
            load[owner] += 1
        elif of_topic[key[0]]:
            homeless.append(key)
    for key in homeless:
        zone = places[key].zone
        taker = min(of_topic[key[0]], key=lambda one: (load[one], bool(zone) and readers[one].zone != zone, one))
        found[key] = taker
        held[taker].append(key)
        load[taker] += 1
    _even(readers, places, of_topic, found, held, load)
    return found


def _even(
    readers: Mapping[int, Reader],
    places: Mapping[Key, Place],
    of_topic: Mapping[int, list[int]],
    found: dict[Key, int],
    held: dict[int, list[Key]],
    load: dict[int, int],
) -> None:
    """Move partitions from whoever has most, one at a time, as long as somebody has two less."""
    settled: set[int] = set()
    zoned = any(place.zone for place in places.values())
    while len(settled) < len(load):
        giver = max((one for one in load if one not in settled), key=lambda one: (load[one], -one))
        mine = held[giver]
        takers = {other for topic in _topics(mine, of_topic) for other in of_topic[topic]}
        least = min((load[one] for one in takers), default=load[giver])
        if least + 1 >= load[giver]:
            settled.add(giver)
            continue
        among = sorted(one for one in takers if load[one] == least)[:TAKERS]
        if not zoned and len(of_topic) == 1:
            # What has no owner yet stands last.
            key, taker = mine[-1], among[0]
        else:
            key, taker = min(
                ((key, one) for one in among for key in mine if key[0] in readers[one].topics),
                key=lambda move: _cost(readers, places, giver, *move),
            )
        found[key] = taker
        mine.remove(key)
        held[taker].append(key)
        load[giver] -= 1
        load[taker] += 1
        # Who has more now may be relieved by others that were full before.
        settled.clear()


def _topics(keys: list[Key], of_topic: Mapping[int, list[int]]) -> Collection[int]:
    return of_topic.keys() if len(of_topic) == 1 else {key[0] for key in keys}


def _cost(
    readers: Mapping[int, Reader], places: Mapping[Key, Place], giver: int, key: Key, taker: int
) -> tuple[int, bool, int, Key]:
    """Return what orders moves: those that bring a partition to its zone first, those that take it away last; then one
    that is on its way anyway."""
    place = places[key]
    home = bool(place.zone)
    gain = (home and readers[taker].zone == place.zone) - (home and readers[giver].zone == place.zone)
    return -gain, place.owner == giver, taker, (-key[0], -key[1])
