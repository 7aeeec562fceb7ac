"""The import paths that users have: each name is where the docs, the README and the examples said it is, for good.

Recorded: a path is added when the docs name a new one, and never taken away without a line in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pytest

from .source_tree import ROOT

ERRORS = (
    "BadRequest", "Busy", "Corrupt", "DirectoryInUse", "Gone", "GroupExists", "GroupStopped", "JobFailed",
    "JobPoisoned", "LogyardError", "NoSpace", "NotLeader", "OutOfRange", "Refused", "SessionExpired", "Unknown",
    "UnknownGroup", "WalFailed", "WrongIdentity", "WrongKind",
)  # fmt: skip

PATHS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "logyard.bench.cost_model": ("main",),
        "logyard.bench.suite.checkouts": ("main",),
        "logyard.bench.waterfall": ("main",),
        "logyard": ("AppendLog", "connect", "connect_sync", "open_system", *ERRORS),
        "logyard.client.aio": ("connect",),
        "logyard.client.errors": ERRORS,
        "logyard.client.kv_wire": (
            "Changes", "Compacted", "Compare", "Delete", "DeleteResult", "Event", "Get", "GetResult", "KeyValue",
            "Lease", "Put", "PutResult", "Txn", "TxnResult", "prefix_end",
        ),
        "logyard.client.kvstore": ("KVStore",),
        "logyard.client.messages": ("Delivered", "Message"),
        "logyard.client.producer": ("Producer", "producer_number"),
        "logyard.client.queue_wire": ("Message", "NotHeld"),
        "logyard.client.records": ("BlockError", "Page", "Record"),
        "logyard.client.sync": ("connect_sync",),
        "logyard.client.tail": ("Cursor", "SqliteCursor", "Tailed"),
        "logyard.client.tls": ("TlsConfig", "TlsError"),
        "logyard.protocol.verbs": (),
        "logyard.engine.errors": ERRORS,
        "logyard.engine.machine": (
            "Applied", "Context", "Frame", "Machine", "PayloadRange", "PayloadRef", "Position", "Reject", "Release",
        ),
        "logyard.machines.ids": ("Ids",),
        "logyard.machines.log": ("AppendLog",),
        "logyard.machines.mux": ("Mux", "envelope", "then"),
        "logyard.pipeline": ("local_session", "ship"),
        "logyard.pipeline.jobs.audit": ("run_audit",),
        "logyard.pipeline.jobs.digests": ("digest_logs",),
        "logyard.pipeline.jobs.export": ("Export", "run_export"),
        "logyard.pipeline.jobs.importing": ("Import", "run_import"),
        "logyard.pipeline.jobs.tables": ("Tables", "run_tables"),
        "logyard.pipeline.session": ("prepare",),
        "logyard.service.cli": (),
        "logyard.service.config": (),
        "logyard.service.metrics": (),
        "logyard.testing": (
            "Command", "EndSession", "Entry", "MemoryCluster", "MemoryNetwork", "Parted", "Refused", "Rehearsal",
            "Seen", "Step", "Upgrade", "Wait", "check_deterministic", "check_restore", "cluster", "until",
        ),
    }
)  # fmt: skip


def pages() -> Iterator[tuple[str, str]]:
    """What users read: (path, text)."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        # Pages about the inside name what is inside.
        if not {"decisions", "internals"} & set(path.parts):
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def named() -> Iterator[tuple[str, str, str]]:
    """(page, module, name) of all that the pages import or name; the name is empty for a module itself."""
    for page, text in pages():
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, flags=re.M | re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "logyard":
                    yield from ((page, node.module or "", alias.name) for alias in node.names)
        for dotted in re.findall(r"\blogyard(?:\.[a-z_]+)+(?:\.[A-Z]\w+)?", text):
            yield page, *split(dotted)


def split(dotted: str) -> tuple[str, str]:
    """(module, name) of a dotted name, as far as it is one of a module that is recorded."""
    module, _, name = dotted.rpartition(".")
    return (dotted, "") if dotted in PATHS else (module, name)


@pytest.mark.parametrize("module", PATHS)
def test_every_recorded_path_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PATHS[module] if not hasattr(found, name)] == []


def test_what_the_docs_name_is_recorded() -> None:
    examples = ("logyard.audit", "logyard.x.y")  # a logger; any module
    missing = {
        f"{page}: {module}.{name}"
        for page, module, name in named()
        if f"{module}.{name}" not in examples and (module not in PATHS or (name and name not in PATHS[module]))
    }
    assert not missing


def test_a_path_that_is_not_recorded_is_noticed() -> None:
    assert split("logyard.client.tail.SqliteCursor") == ("logyard.client.tail", "SqliteCursor")
    assert split("logyard.client.nowhere") == ("logyard.client", "nowhere") and "logyard.client" not in PATHS
