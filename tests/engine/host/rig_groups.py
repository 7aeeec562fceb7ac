"""Nodes of nothing but a group registry and a replica_gc, on a network that is a function call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import trio

from logyard.engine.entry import Entry, build_plain
from logyard.engine.host import replica_gc
from logyard.engine.host.groups import GroupRegistry, Groups, Host, Peers
from logyard.engine.host.replica_gc import ReplicaGC
from logyard.engine.log import meta_rows
from logyard.engine.log.wal import WalItem
from logyard.engine.raft.core import Raft
from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.raft.state import Limits
from logyard.engine.replica.member import Member
from logyard.engine.replica.retire import Retire
from logyard.engine.types import Spec
from logyard.protocol.errors import BadRequest, LogyardError, NoSpace


def encode(index: int, term: int, kind: int, content: bytes) -> Entry:
    return build_plain(index, term, kind, 0, content)


def a_member(node: int, spec: Spec, last: int = 0, term: int = 0, configuration: int = 0) -> Member:
    """A follower with `last` entries, all of `term`; its configuration is of entry `configuration`."""
    raft = Raft(
        spec.uid, node, Configuration(spec.voters), RaftLog(0, 0, [(1, term)] if last else (), last_index=last),
        term=term, vote=2 if term else 0, live={1, 2, 3}, draw=lambda n: 0, encode=encode, limits=Limits(),
        configuration_index=configuration,
    )  # fmt: skip
    budget = SimpleNamespace(drop=lambda size: None)
    return Member(spec, raft, cast(Any, object()), cast(Any, object()), cast(Any, budget))


def spec_of(uid: int, name: str = "log", voters: tuple[int, ...] = (1, 2, 3)) -> Spec:
    return Spec(uid, name, "log", {}, voters, 0)


class Names(dict[str, int]):
    def drop(self, name: str, uid: int) -> None:
        if self.get(name) == uid:
            del self[name]


class Node:
    """One node. What it did, in order, is in `events`; `rows` is its meta store. `fork` is what keeping one ends
    with."""

    def __init__(self, number: int, network: Network) -> None:
        self.number = number
        self.network = network
        self.events: list[Any] = []
        self.rows: dict[bytes, bytes | None] = {}
        self.members: dict[int, Member] = {}
        self.names = Names()
        self.barred: set[int] = set()
        self.unsettled: set[int] = set()
        self.full = False
        self.fork: LogyardError | None = None
        self.grown = 0
        self.meanwhile: Callable[[], Any] | None = None
        self.machines = {"log"}
        retire = Retire(
            self.members, set(), lambda messages: None, lambda uid: self.events.append(("drop", uid)), self.names.drop,
            lambda member: None,
        )  # fmt: skip
        self.gc = ReplicaGC(
            number, self.members.get, retire, cast(Any, self),
            replica_gc.Rows(self.commit, self.forget, self.settle, self.write), self.send, network.spawn,
        )  # fmt: skip
        here = Groups(
            self.names,
            self.members.get,
            self.members.__contains__,
            self.spec,
            lambda: len(self.members),
            lambda uid: self.events.append(("doubt", uid)),
            self.unsettled.__contains__,
            self.barred,
        )
        self.registry = GroupRegistry(
            number, 1000, self.create_machine, here, self.gc, cast(Any, self),
            Peers(lambda: set(network.nodes) - {number}, network.live, self.send),
            Host(self.start, lambda spec: None, self.lay, self.grow, retire.detach, self.forget, network.spawn),
        )  # fmt: skip

    def create_machine(self, name: str, arguments: Mapping[str, Any]) -> None:
        if name not in self.machines:
            raise BadRequest(f"no machine {name!r}")
        if arguments.get("size") == "none":
            raise ValueError("its machine raises whatever it likes")

    def spec(self, uid: int) -> Spec | None:
        return self.members[uid].spec if uid in self.members else None

    def start(self, spec: Spec) -> None:
        assert (b"g" + meta_rows.KEY.pack(spec.uid)) in self.rows, "durable first, then alive"
        self.members[spec.uid] = a_member(self.number, spec)

    def lay(self, specs: Sequence[Spec]) -> None:
        self.events.append(("lay", len(specs)))
        for spec in specs:
            self.start(spec)

    def grow(self) -> None:
        self.grown += 1

    def send(self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Any] = ()) -> bool:
        return self.network.send(self.number, node, kind, request, header)

    # The books, the storage and the forks

    async def store_specs(self, specs: Sequence[Spec], more: Iterable[Any] = (), asleep: bool = False) -> None:
        await self.commit(lambda: [*((meta_rows.group_key(spec.uid), b"its definition") for spec in specs), *more])
        if self.meanwhile is not None:
            await self.meanwhile()

    async def commit(self, build: Callable[[], Iterable[Any]]) -> None:
        await trio.lowlevel.checkpoint()
        if self.full:
            raise NoSpace("the disk is full")
        puts = list(build())
        self.events.append(("rows", [key[:1] for key, _ in puts]))
        self.rows.update(puts)

    async def forget(self, members: Sequence[Member], rows: Mapping[int, Callable[[], Iterable[Any]]]) -> None:
        self.events.append(("forget", [member.uid for member in members]))
        await self.commit(lambda: [put for build in rows.values() for put in build()])

    async def settle(self) -> None:
        self.events.append(("settle",))
        await self.commit(tuple)

    async def write(self, items: Sequence[WalItem]) -> None:
        self.events.append(("wal", [(item.uid, item.truncate) for item in items]))

    async def keep(self, member: Member, first: int, lineage: Any) -> str:
        assert member.raft.stopped, "nothing of it changes any more"
        if self.fork is not None:
            raise self.fork
        self.events.append(("fork", member.uid, first))
        return "a path"


class Network:
    """All nodes; those in `down` hear and say nothing, of `lost` kinds nothing arrives."""

    def __init__(self, count: int, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.down: set[int] = set()
        self.lost: set[int] = set()
        self.sent: list[tuple[int, int, int, Mapping[str, Any]]] = []
        self.live = set(range(1, count + 1))
        self.nodes: dict[int, Node] = {}
        for number in range(1, count + 1):
            self.nodes[number] = Node(number, self)

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    def send(self, node: int, to: int, kind: int, request: int, header: Mapping[str, Any]) -> bool:
        if to in self.down or node in self.down or to not in self.nodes:
            return False
        self.sent.append((node, to, kind, header))
        if kind not in self.lost:
            self.nodes[to].registry.on_blob(node, kind, request, header)
        return True

    def fall(self, *numbers: int) -> None:
        """These nodes are gone, and everybody knows."""
        self.down |= {*numbers}
        self.live -= {*numbers}

    def rise(self) -> None:
        """All are back; links are new."""
        self.live |= self.down
        back, self.down = self.down, set()
        for node in self.nodes.values():
            for other in back - {node.number}:
                node.gc.forget_told(other)
                node.registry.on_link_up(other)

    def having(self, uid: int) -> set[int]:
        """The nodes with a member."""
        return {number for number, node in self.nodes.items() if uid in node.members}
