"""`make` on machines that can't work: it stops at once and says what to do, before anything is downloaded."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .source_tree import PACKAGES, ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The doors of a checkout, with links."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "logyard").mkdir()
    for name in PACKAGES:
        (tmp_path / "logyard" / name).symlink_to(f"../{name}")
    return tmp_path


def make(checkout: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    # CI's own `make` hands its flags and variables down.
    theirs = ("MAKE", "MFLAGS", "WORKERS", "PYTEST_ARGS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False, env={**inherited, **environ}
    )


def test_a_checkout_without_links_fails_at_once(checkout: Path) -> None:
    (checkout / "logyard" / "engine").unlink()
    (checkout / "logyard" / "engine").write_text("../engine")
    done = make(checkout, "setup")
    assert done.returncode
    assert "logyard/engine is not a symbolic link" in done.stderr
    assert "core.symlinks" in done.stderr
    assert not (checkout / ".venv").exists()


def test_what_it_starts_keeps_compiled_modules_whatever_the_environment_says(checkout: Path) -> None:
    (checkout / "more").write_text('include Makefile\nsaid:\n\t@echo "[$$PYTHONDONTWRITEBYTECODE]"\n')
    assert make(checkout, "-f", "more", "said", PYTHONDONTWRITEBYTECODE="1").stdout == "[]\n"


def test_an_old_python_is_refused_by_name(checkout: Path) -> None:
    old = checkout / "python-old"
    program = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$2"\n')
    old.chmod(0o755)
    done = make(checkout, "setup", f"PYTHON={old}")
    assert done.returncode
    assert "needs Python 3.11 or newer" in done.stderr
    assert "is 3.9" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_absent_python_is_said(checkout: Path) -> None:
    done = make(checkout, "setup", "PYTHON=python-that-is-absent")
    assert done.returncode
    assert "python-that-is-absent not found: logyard needs Python 3.11 or newer" in done.stderr


def test_a_missing_java_says_what_to_install(checkout: Path) -> None:
    done = make(checkout, "java", JAVA_HOME=str(checkout / "absent"))
    assert done.returncode
    assert "Java 17 or newer" in done.stderr
    assert "default-jre-headless" in done.stderr


def test_an_old_java_is_refused(checkout: Path) -> None:
    java = checkout / "jre" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    done = make(checkout, "java", JAVA_HOME=str(checkout / "jre"))
    assert done.returncode
    assert "is Java 11; PySpark needs 17 or newer" in done.stderr


def test_a_good_java_passes(checkout: Path) -> None:
    java = checkout / "jre" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"21\" 2023-09-19' >&2\n")
    java.chmod(0o755)
    assert make(checkout, "java", JAVA_HOME=str(checkout / "jre")).returncode == 0


def test_zip_files_get_the_byte_code_of_what_is_installed_as_it_is_there(tmp_path: Path) -> None:
    """Not of other source; again changes nothing; and what was cut off before is no obstacle."""
    lib = tmp_path / "pyspark" / "python" / "lib"
    lib.mkdir(parents=True)
    with zipfile.ZipFile(lib / "one.zip", "w") as file:
        for name in ("same", "other"):
            (tmp_path / f"{name}.py").write_text(f"VALUE = {name!r}\n")
            py_compile.compile(str(tmp_path / f"{name}.py"))
            file.writestr(f"{name}.py", "VALUE = 'same'\n")
        file.writestr("alone.py", "VALUE = 'alone'\n")
    (lib / ".one.zip.part").write_bytes(b"PK")
    for _ in range(2):
        subprocess.run([sys.executable, ROOT / ".ci" / "zip-code", tmp_path], check=True)
        with zipfile.ZipFile(lib / "one.zip") as file:
            assert file.namelist() == ["same.py", "other.py", "alone.py", "same.pyc"]
    program = "import alone, other, same; print(alone.VALUE, other.VALUE, same.VALUE, same.__file__[-4:])"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(lib / "one.zip")}, cwd=lib,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["alone", "same", "same", ".pyc"]


def test_what_is_run(checkout: Path) -> None:
    """`make test` leaves the long ones out, `make test-all` nothing; both take more words, and CI calls the latter."""
    words = "PYTEST_ARGS=tests/engine -k wal"
    (test,) = [line for line in make(checkout, "-n", "test", words).stdout.splitlines() if "pytest" in line]
    (everything,) = [line for line in make(checkout, "-n", "test-all", words).stdout.splitlines() if "pytest" in line]
    assert test.split("pytest ")[1] == "-n 4 --dist loadgroup -m 'not long' tests/engine -k wal"
    assert everything.split("pytest ")[1] == "-n 4 --dist loadgroup tests/engine -k wal"
    (called,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make test" in line]
    assert called.startswith("make test-all ")
    assert "\nmake test-all" in (ROOT / "README.md").read_text()
