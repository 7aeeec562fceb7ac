"""Who may import whom, and which file is the only door to a resource (docs/architecture.md): checked on the source.

The rules are data; each is also tried on a planted offence, so that a rule that catches nothing is noticed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable

import pytest

from .house import cycles
from .source_tree import PACKAGES, ROOT, Source, product_sources, test_sources

pytestmark = pytest.mark.xdist_group("source")

TOP = "logyard.engine.<top>"
"""The files that lie directly in engine/: types, entry, config, machine, ports; and the door to the disk."""

OF_THE_LOOP = tuple(
    f"logyard.engine.log.{name}"
    for name in (
        "group_commit", "space", "location", "liveness_accounting", "segment_files", "ring_files", "segment_writer",
        "compactor", "janitor", "group_logs", "rehoming", "checkpoints", "checkpoint_rows", "meta_batch", "gc_blockers",
        "cache", "compose",
    )
)  # fmt: skip
"""Of the log, what runs beside a node's loop and knows its members: nobody who reads a stopped directory has these."""

COMPOSES = "logyard.engine.host.engine"
"""The object that builds the engine, floor by floor from below. No part knows it."""

GROUND_OF_A_NODE = "logyard.engine.replica.ground"
"""What composing functions are given of a node."""

MAKES_CORES = "logyard.engine.replica.build"
"""Where Raft is made: nobody else outside of it knows it by name."""

SPOKEN_BY_CORES = tuple(
    f"logyard.engine.raft.{name}"
    for name in ("configuration", "mending.Mend", "messages", "progress", "quorum", "raft_log", "ready", "state")
)
"""What any core and its host speak in."""

# package -> what it may import of ours. Longest prefix of the importing module wins.
FLOORS: dict[str, tuple[str, ...]] = {
    "logyard.protocol": (),
    "logyard.engine": (TOP, "logyard.payloads.reference"),
    "logyard.engine.ports": (TOP, "logyard.payloads.reference", "logyard.engine.raft.messages"),
    # What the host needs of any core is said in what Raft speaks in.
    "logyard.engine.core": (TOP, "logyard.engine.raft"),
    "logyard.engine.raft": (TOP, "logyard.engine.raft"),
    "logyard.engine.disk": (TOP,),
    "logyard.engine.log": (TOP, "logyard.engine.log", "logyard.payloads.reference"),
    **dict.fromkeys(
        OF_THE_LOOP,
        (
            TOP, "logyard.engine.log", "logyard.engine.snapshot", "logyard.engine.raft.configuration",
            "logyard.engine.replica.member", "logyard.engine.replica.ground", "logyard.payloads.reference",
        ),
    ),
    "logyard.engine.snapshot": (TOP, "logyard.engine.snapshot", "logyard.payloads.reference"),
    "logyard.engine.transport": (TOP, "logyard.engine.transport", "logyard.engine.raft.messages"),
    "logyard.engine.replica": (
        TOP, "logyard.engine.replica", "logyard.engine.raft", "logyard.engine.snapshot", "logyard.engine.log.meta_rows",
        "logyard.engine.log.recovered", "logyard.engine.log.segment", "logyard.engine.log.ring",
        "logyard.engine.recovery.rebuild",
        "logyard.engine.transport.blobs",
        "logyard.payloads.reference",
    ),
    # What all floors of a node stand on, and how this one is composed on the one below.
    **dict.fromkeys(
        ("logyard.engine.replica.ground", "logyard.engine.replica.compose"),
        (
            TOP, "logyard.engine.replica", "logyard.engine.raft", "logyard.engine.log",
            "logyard.engine.transport.blobs", "logyard.engine.transport.network",
        ),
    ),
    "logyard.engine.recovery": (
        TOP, "logyard.engine.recovery", "logyard.engine.log", "logyard.engine.snapshot",
        "logyard.engine.raft.configuration", "logyard.engine.raft.raft_log",
    ),
    # A start builds the members: it needs what they are built of, and what keeps their bytes.
    "logyard.engine.recovery.open": (
        TOP, "logyard.engine.recovery", "logyard.engine.log", "logyard.engine.replica.member",
        "logyard.engine.repair.log_repair",
    ),
    # What they still need of the host goes down with its own files.
    "logyard.engine.transfer": (
        TOP, "logyard.engine.transfer", "logyard.engine.replica", "logyard.engine.raft", "logyard.engine.log",
        "logyard.engine.snapshot", "logyard.engine.transport.blobs", "logyard.payloads.reference",
        "logyard.engine.log.checkpoint_rows",
    ),
    "logyard.engine.repair": (
        TOP, "logyard.engine.repair", "logyard.engine.transfer", "logyard.engine.recovery", "logyard.engine.replica",
        "logyard.engine.raft", "logyard.engine.log", "logyard.engine.snapshot", "logyard.engine.transport.blobs",
        "logyard.payloads.reference", "logyard.engine.log.checkpoint_rows",
    ),
    "logyard.engine.quiesce": (
        TOP, "logyard.engine.quiesce", "logyard.engine.recovery", "logyard.engine.replica", "logyard.engine.raft",
        "logyard.engine.log", "logyard.engine.transport.blobs",
    ),
    # Who sleeps has a snapshot, and may wake damaged.
    "logyard.engine.quiesce.compose": (
        TOP, "logyard.engine.quiesce", "logyard.engine.replica", "logyard.engine.raft", "logyard.engine.log",
        "logyard.engine.repair.log_repair", "logyard.engine.transfer.snapshot_store", "logyard.engine.transport.blobs",
    ),
    "logyard.engine.host": (
        TOP, "logyard.engine.host", "logyard.engine.quiesce", "logyard.engine.transfer", "logyard.engine.repair",
        "logyard.engine.recovery", "logyard.engine.replica", "logyard.engine.raft", "logyard.engine.log",
        "logyard.engine.snapshot", "logyard.engine.transport.blobs", "logyard.payloads.reference",
    ),
    COMPOSES: ("logyard.engine",),
    "logyard.payloads": ("logyard.payloads",),
    "logyard.client": ("logyard.client",),
    "logyard.machines": (
        "logyard.machines", "logyard.engine.machine", "logyard.engine.types", "logyard.payloads.reference",
    ),
    "logyard.pipeline": (
        "logyard.pipeline", "logyard.client", "logyard.payloads", "logyard.engine.log", "logyard.engine.types",
        "logyard.engine.entry", "logyard.engine.recovery.inspect",
    ),
    # What a directory says is what a start would make of it, so the same code reads it; but nothing that runs a node.
    "logyard.pipeline.directory": (
        "logyard.pipeline", "logyard.client", "logyard.payloads", "logyard.machines", TOP, "logyard.engine.log",
        "logyard.engine.snapshot", "logyard.engine.recovery.damage", "logyard.engine.recovery.inspect",
        "logyard.engine.recovery.manifests", "logyard.engine.recovery.rebuild", "logyard.engine.replica.apply",
        "logyard.engine.replica.machine_state", "logyard.engine.replica.sessions", "logyard.engine.replica.skips",
        "logyard.engine.replica.snapshot_sections", "logyard.engine.replica.uploads",
    ),
    "logyard.bench": (
        "logyard.bench", "logyard.client", "logyard.engine", "logyard.machines", "logyard.payloads", "logyard.pipeline",
    ),
    "logyard.service": ("logyard",),
    "logyard": ("logyard",),
    "logyard.testing": ("logyard",),
    "pyspark_logyard": ("logyard.pipeline",),
}  # fmt: skip

GROUND = "logyard.protocol"
"""The lowest floor: everything may import it."""

PURE = frozenset(
    {
        "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math",
        "msgpack", "operator", "struct", "types", "typing",
    }
)  # fmt: skip
"""All that engine/raft may import from outside: nothing that waits, reads a clock, opens a file or draws a number."""

# resource -> (names whose import or reading is its use, with () only their call; the files that are its doors)
DOORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sockets": (
        (
            "socket", "ssl", "socketserver", "selectors", "asyncio", "trio.socket", "trio.SocketStream",
            "trio.SocketListener", "trio.open_tcp_stream", "trio.open_tcp_listeners", "trio.serve_tcp",
        ),
        (
            "engine/transport/link.py", "engine/transport/listener.py", "service/door/server.py", "client/aio.py",
            "client/runtime_asyncio.py", "client/runtime_trio.py",
            "service/metrics_http.py",
            "service/etcd/connections.py",
            "client/sync_link.py",
            "protocol/tls.py",  # ssl without sockets
            "client/tls_stream.py", "service/tls.py",
            "service/local_cluster.py",  # asks the kernel for free ports, serves nothing
            "bench/loops.py",  # starts the loop, opens nothing itself
            "bench/calibrate.py",  # measures the machine's loopback
            "bench/peers/load.py",  # speaks to rivals
        ),
    ),
    "LMDB environments": (("lmdb.open()", "lmdb.Environment()"), ("payloads/generation.py", "engine/log/meta.py")),
    "fsync": (
        ("os.fsync", "os.fdatasync", "os.sync"),
        # One measures the machine and keeps nothing; one writes exports, on any machine of a Spark cluster.
        ("engine/disk/door.py", "bench/calibrate.py", "pipeline/jobs/manifest.py"),
    ),
}  # fmt: skip

GROUND_LIBRARIES = frozenset({"msgpack", *sys.stdlib_module_names})
"""All that protocol/ may import from outside: it loads wherever a client does."""
GROUND_LATER = {"logyard.protocol.compression": "zstandard"}
"""What one module imports from outside when it is first used: a client that compresses nothing does without."""

HARMLESS = frozenset({"trio.socket.SocketType"})
"""Naming a type opens no door."""

# Module or package -> the libraries that nothing in it may import.
FREE_OF: dict[str, tuple[str, ...]] = {
    "logyard.engine.raft": ("trio",),
    "logyard.engine.log": ("trio",),
    "logyard.engine.types": ("trio", "lmdb"),
    "logyard.machines": ("trio", "lmdb"),
    "logyard.payloads": ("trio",),
    "logyard.payloads.reference": ("trio", "lmdb", "xxhash", "msgpack", "pyroaring"),
    "logyard.client": ("lmdb",),
    "logyard.client.sync": ("trio",),
    "logyard.client.sync_link": ("trio",),
    "logyard.client.session": ("trio",),
}


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Whether `name` is one of `prefixes` or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def top_modules(sources: Iterable[Source]) -> set[str]:
    return {source.module for source in sources if is_top(source)}


def is_top(source: Source) -> bool:
    folder, _, name = source.path.rpartition("/")
    return (folder == "engine" and name != "__init__.py") or folder == "engine/disk"


def floor_offences(source: Source, top: set[str]) -> list[str]:
    scope = max((prefix for prefix in FLOORS if within(source.module, [prefix])), key=len)
    allowed = [GROUND, *(name for name in FLOORS[scope] if name != TOP)]
    if TOP in FLOORS[scope]:
        allowed += top
    return [
        f"{source.path}:{line}: {scope} must not import {name}"
        for line, name in source.imports
        if within(name, ["logyard", "pyspark_logyard"]) and not within(name, allowed) and name != "logyard.__version__"
    ]


def bare_offences(source: Source) -> list[str]:
    return [
        f"{source.path}:{line}: {name} is a second copy of logyard.{name}"
        for line, name in source.imports
        if within(name, PACKAGES)
    ]


def purity_offences(source: Source) -> list[str]:
    if not within(source.module, ["logyard.engine.raft"]):
        return []
    found = [
        f"{source.path}:{line}: the core must not import {name}"
        for line, name in source.imports
        if name.split(".")[0] not in PURE | {"logyard"}
    ]
    for node in source.nodes:
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith | ast.AsyncFor):
            found.append(f"{source.path}:{node.lineno}: the core never awaits")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"open", "input", "print"}
        ):
            found.append(f"{source.path}:{node.lineno}: the core never calls {node.func.id}")
    return found


def uses(source: Source) -> list[tuple[int, str]]:
    """(line, dotted name) of every import and every `module.attribute...` read, each chain once and whole.

    A call is there a second time, with (). A name imported from a module counts as called.
    """
    found = [use for line, name in source.imports for use in ((line, name), (line, f"{name}()"))]
    everything = source.nodes
    nodes = [node for node in everything if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in nodes}
    called = {id(node.func) for node in everything if isinstance(node, ast.Call)}
    for node in nodes:
        parts, at = [node.attr], node.value
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name) and id(node) not in inner:
            name = ".".join([at.id, *reversed(parts)])
            found += [(node.lineno, name)] + ([(node.lineno, f"{name}()")] if id(node) in called else [])
    return [(line, name) for line, name in found if name not in HARMLESS]


def door_offences(source: Source) -> list[str]:
    found = []
    for resource, (names, doors) in DOORS.items():
        if source.path in doors:
            continue
        imported = {name.split(".")[0] for _, name in source.imports}
        found += [
            f"{source.path}:{line}: {resource} belong in {', '.join(doors)}, not here ({name})"
            for line, name in uses(source)
            if within(name, names) and name.split(".")[0] in imported
        ]
    return found


def lmdb_offences(source: Source) -> list[str]:
    if source.path.startswith("payloads/") or source.path == "engine/log/meta.py":
        return []
    return [f"{source.path}:{line}: imports lmdb" for line, name in source.imports if within(name, ["lmdb"])]


def freedom_offences(source: Source) -> list[str]:
    return [
        f"{source.path}:{line}: {source.module} must not import {name}"
        for prefix, libraries in FREE_OF.items()
        if within(source.module, [prefix]) and source.module not in OF_THE_LOOP
        for line, name in source.imports
        if within(name, libraries)
    ]


def ground_offences(source: Source) -> list[str]:
    if not within(source.module, [GROUND]):
        return []
    return [
        f"{source.path}:{line}: protocol must not import {name}"
        for line, name in source.imports
        if name.split(".")[0] not in GROUND_LIBRARIES | {"logyard"} | later_libraries(source, line)
    ]


def composing_offences(source: Source) -> list[str]:
    """Find who knows the whole engine and does not compose it into something larger."""
    if source.module == COMPOSES or within(source.module, ["logyard.service", "logyard.testing"]):
        return []
    return [
        f"{source.path}:{line}: {name} is not for a part of it"
        for line, name in source.imports
        if within(name, [COMPOSES])
    ]


def floor_as_argument_offences(source: Source) -> list[str]:
    """Find who is no composing function and knows a floor as a whole: a part is given parts."""
    if (
        not within(source.module, ["logyard.engine"])
        or source.path.endswith("/compose.py")
        or source.module == COMPOSES
    ):
        return []
    return [
        f"{source.path}:{line}: {name} is for who composes"
        for line, name in source.imports
        if name.endswith(".compose") or ".compose." in name or within(name, [GROUND_OF_A_NODE])
    ]


def core_offences(source: Source) -> list[str]:
    """Find who knows Raft by name: a host drives what `engine.core.Core` says."""
    if within(source.module, ["logyard.engine.raft", "logyard.engine.core", MAKES_CORES]):
        return []
    return [
        f"{source.path}:{line}: {name} is Raft's own"
        for line, name in source.imports
        if within(name, ["logyard.engine.raft"]) and not within(name, SPOKEN_BY_CORES)
    ]


def later_libraries(source: Source, line: int) -> set[str]:
    """What a line inside of a function may import."""
    functions = (node for node in source.nodes if isinstance(node, ast.FunctionDef))
    inside = any(node.lineno < line <= (node.end_lineno or 0) for node in functions)
    return {GROUND_LATER[source.module]} if inside and source.module in GROUND_LATER else set()


def check_floors(source: Source) -> list[str]:
    return floor_offences(source, top_modules(product_sources()))


def report(rule: Callable[[Source], list[str]], sources: Iterable[Source]) -> None:
    offences = sorted({offence for source in sources for offence in rule(source)})
    assert not offences, "\n" + "\n".join(offences)


def test_imports_go_down_the_floors() -> None:
    top = top_modules(product_sources())
    report(lambda source: floor_offences(source, top), product_sources())


def test_packages_are_only_reached_through_logyard() -> None:
    report(bare_offences, [*product_sources(), *test_sources()])


def test_the_raft_core_is_pure() -> None:
    report(purity_offences, product_sources())


def test_the_ground_floor_needs_msgpack_alone() -> None:
    report(ground_offences, product_sources())


def test_no_part_knows_the_whole_engine() -> None:
    report(composing_offences, product_sources())


def test_no_part_is_given_a_floor() -> None:
    report(floor_as_argument_offences, product_sources())


def test_the_host_knows_no_core_by_name() -> None:
    report(core_offences, product_sources())


def test_no_files_import_one_another() -> None:
    """Type-only and lazy imports count; `engine/raft` is one unit, whose files share the type of the core."""
    assert cycles(product_sources()) == []


def test_a_circle_of_type_only_imports_is_seen() -> None:
    lazily = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B"
    two = [planted("logyard.engine.a", lazily), planted("logyard.engine.b", "def f():\n    from .a import A")]
    assert cycles(two) == [["engine/a.py", "engine/b.py"]]
    assert cycles([planted("logyard.engine.raft.a", lazily), planted("logyard.engine.raft.b", "from . import a")]) == []


def test_one_door_per_resource() -> None:
    report(door_offences, product_sources())
    report(lmdb_offences, product_sources())


def test_modules_stay_free_of_heavy_libraries() -> None:
    report(freedom_offences, product_sources())


def test_each_package_has_its_tracked_link() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "logyard").iterdir() if path.is_symlink()}
    assert {name: str(target) for name, target in links.items()} == {name: f"../{name}" for name in PACKAGES}
    for name in PACKAGES:
        assert (ROOT / "logyard" / name / "__init__.py").is_file(), (
            f"{name} needs an __init__.py: the wheel would lose it"
        )


def test_every_folder_of_a_package_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    missing = sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file())
    assert not missing, f"the wheel would lose {missing}: add __init__.py"


def planted(module: str, text: str) -> Source:
    return Source(module.removeprefix("logyard.").replace(".", "/") + ".py", module, text)


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (check_floors, "logyard.engine.raft.core", "from ..log.wal import Wal"),
        (check_floors, "logyard.engine.raft.core", "from .. import log"),
        (check_floors, "logyard.engine.log.wal", "from logyard.engine.raft.core import Raft"),
        (check_floors, "logyard.engine.snapshot.store", "def f():\n    from ..log.wal import Wal"),
        (check_floors, "logyard.engine.transport.peers", "from ..raft.core import Raft"),
        (check_floors, "logyard.engine.transport.peers", "import logyard.engine.host.engine"),
        (check_floors, "logyard.engine.host.engine", "from logyard.payloads.store import PayloadStore"),
        (check_floors, "logyard.engine.disk.door", "from ..log import wal"),
        (check_floors, "logyard.payloads.store", "from logyard.engine.types import Buffer"),
        (check_floors, "logyard.protocol.errors", "from logyard.engine.types import Buffer"),
        (ground_offences, "logyard.protocol.errors", "def f():\n    import zstandard"),
        (ground_offences, "logyard.protocol.compression", "import zstandard\ndef f(): pass"),
        (check_floors, "logyard.client.wire", "from logyard.engine.entry import FRAME"),
        (check_floors, "logyard.machines.log", "from logyard.engine.entry import Frame"),
        (check_floors, "logyard.bench.load", "from logyard.service.node import serve"),
        (check_floors, "logyard.pipeline.reader", "from logyard.engine.host.engine import System"),
        (check_floors, "logyard.pipeline.reader", "from logyard.engine.host.groups import Groups"),
        (check_floors, "logyard.pipeline.directory.reading", "from logyard.engine.host.engine import System"),
        (check_floors, "pyspark_logyard", "from logyard.client.sync import connect_sync"),
        (bare_offences, "logyard.service.node", "import engine.disk.door"),
        (bare_offences, "tests.test_x", "from client import wire"),
        (purity_offences, "logyard.engine.raft.core", "import time"),
        (purity_offences, "logyard.engine.raft.core", "from random import Random"),
        (purity_offences, "logyard.engine.raft.core", "async def step(): pass"),
        (purity_offences, "logyard.engine.raft.core", "open('x')"),
        (door_offences, "logyard.engine.log.wal", "import os\nos.fdatasync(3)"),
        (door_offences, "logyard.engine.log.wal", "from os import fsync"),
        (door_offences, "logyard.engine.host.engine", "import socket"),
        (door_offences, "logyard.engine.host.engine", "import trio\ntrio.socket.socket()"),
        (door_offences, "logyard.service.daemon", "from trio import socket"),
        (door_offences, "logyard.payloads.store", "import lmdb\nlmdb.open('x')"),
        (door_offences, "logyard.payloads.store", "from lmdb import Environment"),
        (lmdb_offences, "logyard.service.check.run", "import lmdb"),
        (composing_offences, "logyard.engine.host.inbound", "def f():\n    from .engine import System"),
        (core_offences, "logyard.engine.host.ready_loop", "from ..raft.core import Raft"),
        (core_offences, "logyard.engine.host.ready_loop", "from ..raft import steady"),
        (core_offences, "logyard.service.status", "from logyard.engine.raft.mending import Mend, say"),
        (floor_as_argument_offences, "logyard.engine.host.inbound", "from ..log.compose import Storage"),
        (floor_as_argument_offences, "logyard.engine.repair.scrub", "from ..replica.ground import Ground"),
        (composing_offences, "logyard.bench.load", "from logyard.engine.host.engine import System"),
        (freedom_offences, "logyard.client.session", "import trio"),
        (freedom_offences, "logyard.client.aio", "import lmdb"),
        (freedom_offences, "logyard.payloads.compaction", "from trio import sleep"),
    ],
)  # fmt: skip
def test_a_planted_offence_is_caught(rule: Callable[[Source], list[str]], module: str, text: str) -> None:
    assert rule(planted(module, text))


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (check_floors, "logyard.engine.raft.core", "from ..entry import Entry\nfrom .messages import Message"),
        (check_floors, "logyard.engine.transport.codec", "from ..raft.messages import Message"),
        (check_floors, "logyard.engine.machine", "from logyard.payloads.reference import PayloadRef"),
        (check_floors, "logyard.service.node", "from logyard.payloads.store import PayloadStore"),
        (check_floors, "logyard.payloads.store", "from logyard.protocol.errors import Corrupt"),
        (ground_offences, "logyard.protocol.compression", "def f():\n    import zstandard"),
        (ground_offences, "logyard.protocol.errors", "import errno\nimport msgpack\nfrom .frame import HEADER"),
        (purity_offences, "logyard.engine.raft.core", "from collections.abc import Callable"),
        (door_offences, "logyard.client.aio", "from trio import socket"),
        (door_offences, "logyard.engine.transport.peers", "import trio\ndef f(s: trio.socket.SocketType): pass"),
        (door_offences, "logyard.payloads.store", "import lmdb\ndef f(e: lmdb.Environment): pass"),
        (door_offences, "logyard.service.rpc_fake", "socket = make()\nsocket.close()"),
        (bare_offences, "logyard.engine.log.wal", "from ..disk import Disk"),
        (floor_as_argument_offences, "logyard.engine.repair.compose", "from ..log.compose import Storage"),
        (core_offences, "logyard.engine.repair.log_repair", "from ..raft.mending import Mend"),
        (core_offences, MAKES_CORES, "from ..raft.core import Raft"),
        (composing_offences, "logyard.service.node", "from logyard.engine.host.engine import System"),
    ],
)
def test_what_is_allowed_passes(rule: Callable[[Source], list[str]], module: str, text: str) -> None:
    assert rule(planted(module, text)) == []
