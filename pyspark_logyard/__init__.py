"""Where Spark finds the format "logyard": it imports every package named pyspark_* and registers its `DefaultSource`.

This runs in every PySpark program of the environment, so it loads nothing until it is asked, and never raises at
import. The source itself is `logyard.pipeline.datasource`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logyard.pipeline.datasource import LogyardDataSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from logyard.pipeline.datasource import LogyardDataSource
    except ImportError as error:
        raise AttributeError(f"the format logyard needs PySpark 4.2 or newer: {error}") from None
    return LogyardDataSource
