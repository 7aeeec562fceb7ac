"""The columns of a log, as Arrow and as Spark must see them: exactly equal, or Spark refuses the first batch.

Always `binary`, never `large_binary`, which Spark refuses; so one batch stays below 2 GiB. Used by every source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS = (
    ("log", "string", pyarrow.string(), False),
    ("offset", "long", pyarrow.int64(), False),
    ("index", "long", pyarrow.int64(), True),
    ("term", "long", pyarrow.int64(), True),
    ("timestamp", "timestamp", pyarrow.timestamp("us", tz="UTC"), True),
    ("kind", "string", pyarrow.string(), False),
    ("meta", "binary", pyarrow.binary(), True),
    ("payload_size", "long", pyarrow.int64(), True),
    ("payload_hash", "binary", pyarrow.binary(), True),
)
"""name, Spark type, Arrow type, nullable. `payload_size` is null for a record without a payload; `payload_hash` is the
xxh3-128 of the payload's bytes, the same in every cluster, where they were read, else null."""
PAYLOAD = ("payload", "binary", pyarrow.binary(), True)
KEY = ("key", "binary", pyarrow.binary(), True)


def columns_of(payloads: bool, keys: bool) -> tuple[tuple[str, str, pyarrow.DataType, bool], ...]:
    """Return the columns; `payloads` adds `payload`, `keys` adds `key` before `meta`."""
    at = next(number for number, column in enumerate(COLUMNS) if column[0] == "meta")
    found = (*COLUMNS[:at], KEY, *COLUMNS[at:]) if keys else COLUMNS
    return (*found, PAYLOAD) if payloads else found


def arrow_schema(payloads: bool, keys: bool = False) -> pyarrow.Schema:
    """Return the schema of a batch, as `columns_of`."""
    columns = columns_of(payloads, keys)
    return pyarrow.schema([pyarrow.field(name, kind, nullable) for name, _, kind, nullable in columns])


def spark_schema(payloads: bool, keys: bool = False) -> StructType:
    """Return the same as Spark's; needs no session."""
    from pyspark.sql import types

    kinds = {
        "string": types.StringType, "long": types.LongType, "timestamp": types.TimestampType,
        "binary": types.BinaryType,
    }  # fmt: skip
    columns = columns_of(payloads, keys)
    return types.StructType([types.StructField(name, kinds[kind](), nullable) for name, kind, _, nullable in columns])
