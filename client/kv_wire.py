"""What a KV group is asked and answers, under the name that users import it by; they live in `protocol.kv`."""

from __future__ import annotations

from logyard.protocol.kv import (
    Changes,
    Compacted,
    Compare,
    Delete,
    DeleteResult,
    Event,
    Get,
    GetResult,
    KeyValue,
    Lease,
    Put,
    PutResult,
    Txn,
    TxnResult,
    prefix_end,
)  # fmt: skip

__all__ = [
    "Changes", "Compacted", "Compare", "Delete", "DeleteResult", "Event", "Get", "GetResult", "KeyValue", "Lease",
    "Put", "PutResult", "Txn", "TxnResult", "prefix_end",
]  # fmt: skip
