"""What a first-time user stumbles over, without a JVM: Java missing or old, heavy imports, the door for Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pyspark_logyard
from logyard.pipeline.datasource import LogReader, LogyardDataSource
from logyard.pipeline.options import parse_options
from logyard.pipeline.session import NoJava, check_java, ship
from tests.source_tree import ROOT


def java_in(folder: Path, version: str) -> Path:
    home = folder / "jre"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n", "utf-8")
    java.chmod(0o755)
    return home


def test_java_that_is_missing_or_old_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoJava, match=r"java was not found.*install default-jre-headless"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(java_in(tmp_path, "11.0.2")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(NoJava, match=r"is Java 11: PySpark needs 17 or newer; install"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(java_in(tmp_path / "new", "21.0.8")))
    check_java()


def test_the_door_is_light_and_never_raises(tmp_path: Path) -> None:
    assert pyspark_logyard.DefaultSource is LogyardDataSource and LogyardDataSource.name() == "logyard"
    with pytest.raises(AttributeError):
        pyspark_logyard.Other  # noqa: B018
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules["pyspark"] = None
import pyspark_logyard, logyard.pipeline
heavy = [name for name in ("pyarrow", "numpy", "trio", "lmdb") if name in sys.modules]
print(hasattr(pyspark_logyard, "DefaultSource"), heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False []"


def test_a_task_needs_neither_trio_nor_lmdb(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import logyard.pipeline.network, logyard.pipeline.frames, logyard.pipeline.datasource
print([name for name in ("trio", "lmdb", "logyard.service", "logyard.machines") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_tasks_spark_asks_for_nothing() -> None:
    reader = LogReader(parse_options({"servers": "127.0.0.1:1", "subscribe": "a"}))
    from pyspark.sql.datasource import InputPartition

    assert list(reader.read(InputPartition(None))) == []
    assert "pushFilters" not in vars(LogReader), "see docs/guides/spark.md: wrong results"


def test_only_our_wheel_is_shipped(tmp_path: Path) -> None:
    import zipfile

    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other.py", "")
    with pytest.raises(ValueError, match="is not logyard's wheel"):
        ship(None, other)  # type: ignore[arg-type]
