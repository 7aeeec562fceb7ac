"""One Spark for all tests that need one: a JVM takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from logyard.pipeline import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session of two threads. Without Java this fails, and says what to install."""
    found = local_session("tests", memory="1g")
    yield found
    found.stop()
