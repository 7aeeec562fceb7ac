"""The data pipeline on Spark: logs as DataFrames (docs/guides/spark.md). Imports nothing until it is asked."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import local_session, ship

__all__ = ["local_session", "ship"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".session", __name__), name)
