"""A Spark session that works at the first try, and how logyard gets to a cluster's executors.

Each setting answers something that stops or puzzles a first-time user (docs/guides/spark.md). Spark itself is imported
when it is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_LEAST = 17
INSTALL_JAVA = (
    "install default-jre-headless (Debian, Ubuntu: sudo apt-get install default-jre-headless; Fedora: sudo dnf install "
    "java-17-openjdk-headless), or set JAVA_HOME to the directory of one"
)
SETTINGS = {
    # The host's name may have no address, or one that is not this machine's.
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # 200 of them, the default, are for clusters.
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
}


class NoJava(RuntimeError):
    """There is no Java, or too old a one; the message says what to install."""


def local_session(
    app: str = "logyard", *, master: str = "local[2]", memory: str = "2g", **settings: str
) -> SparkSession:
    """Return a session on this machine with the format "logyard". `memory` is the driver's, and of local tasks;
    `settings` are Spark's with _ for each dot: ``spark_ui_enabled="true"``. Raises `NoJava`, ImportError without
    PySpark."""
    from pyspark.sql import SparkSession

    prepare()
    builder = SparkSession.builder.appName(app).master(master).config("spark.driver.memory", memory)
    given = {name.replace("_", "."): value for name, value in settings.items()}
    if several := re.fullmatch(r"local-cluster\[\d+,\d+,(\d+)\]", master.replace(" ", "")):
        # An executor asks for 1 GiB otherwise, more than its worker may have here.
        given.setdefault("spark.executor.memory", f"{several[1]}m")
    for name, value in {**SETTINGS, **given}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def prepare() -> None:
    """Set what a Spark that this process starts takes from the environment, for a session that is built by hand. Raises
    `NoJava`."""
    check_java()
    # Workers are started as `python3` otherwise, which may be another Python without pyarrow; and they must find the
    # logyard that is imported here.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    root = str(Path(__file__).absolute().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


def check_java() -> None:
    """Raise `NoJava` unless Spark will find a Java that it runs on."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    if shutil.which(java) is None:
        raise NoJava(f"{java} was not found: PySpark needs Java {JAVA_LEAST} or newer; {INSTALL_JAVA}")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < JAVA_LEAST:
        version = found[1] if found else "unknown"
        raise NoJava(f"{java} is Java {version}: PySpark needs {JAVA_LEAST} or newer; {INSTALL_JAVA}")


def ship(spark: SparkSession, wheel: str | os.PathLike[str]) -> None:
    """Send logyard's wheel to a cluster's executors, and register the format from it. They need the libraries that it
    depends on (msgpack, xxhash, numpy, pyarrow) installed: a wheel does not carry them."""
    from .datasource import LogyardDataSource

    folder = Path(tempfile.mkdtemp(prefix="logyard-"))
    # Spark adds to the path of its workers only what is called .zip.
    archive = folder / (Path(wheel).stem + ".zip")
    shutil.copyfile(wheel, archive)
    with zipfile.ZipFile(archive) as opened:
        if "logyard/pipeline/datasource.py" not in opened.namelist():
            raise ValueError(f"{wheel} is not logyard's wheel; python -m build makes it")
    spark.addArtifacts(str(archive), pyfile=True)
    spark.dataSource.register(LogyardDataSource)
