"""Where Spark finds the format "logyard": it imports every package named pyspark_* and registers its `DefaultSource`.

Keep this import light and never let it raise: it runs in every PySpark program of the environment. The source itself
lives in `logyard.pipeline` and is not there yet; until then this package registers nothing.
"""

from __future__ import annotations
