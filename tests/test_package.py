"""The wheel: built from a clean copy of what git tracks, it holds every module, and it works outside of the checkout.

Also the facade's promise: what runs on a Spark executor loads neither lmdb, trio nor the engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import logyard

from .source_tree import PACKAGES, ROOT

HEAVY = ("lmdb", "trio", "logyard.engine", "logyard.payloads", "logyard.service", "logyard.machines")


def run(command: Sequence[str | Path], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files() -> list[str]:
    return [name for name in run(["git", "ls-files", "-z"], ROOT).split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked_files():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy], out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_what_git_tracks(wheel: Path) -> None:
    expected = set()
    for name in tracked_files():
        top = name.split("/")[0]
        if top in PACKAGES and name.endswith(".py"):
            expected.add(f"logyard/{name}")
        elif top in ("logyard", "pyspark_logyard") and not (ROOT / name).is_symlink():
            expected.add(name)
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    assert wheel.name == f"logyard-{logyard.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"logyard-{logyard.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "logyard = logyard.service.cli:main" in entry_points


@pytest.mark.long
def test_the_wheel_works_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        modules = sorted(
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for name in archive.namelist()
            if name.endswith(".py") and not name.endswith("__main__.py")
        )
    script = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path / "site")!r})
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(tmp_path / "site")!r}), (name, module.__file__)
bare = [name for name in {PACKAGES!r} if name in sys.modules]
assert not bare, bare
print(len({modules!r}))
"""
    assert int(run([sys.executable, "-c", script], tmp_path)) == len(modules) > 10


@pytest.mark.parametrize("module", ["logyard", "logyard.client.sync", "pyspark_logyard"])
def test_light_modules_load_nothing_heavy(module: str, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import {module}
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run([sys.executable, "-c", script], tmp_path).strip() == "[]"


def test_spark_finds_its_source_in_an_installed_environment(tmp_path: Path) -> None:
    """PySpark walks sys.path for packages named pyspark_*: an editable install by import hook would hide ours."""
    try:
        importlib.metadata.distribution("logyard")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("logyard is not installed in this environment; make setup installs it")
    script = "import pkgutil; print([m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')])"
    assert "pyspark_logyard" in run([sys.executable, "-c", script], tmp_path)


def test_every_name_of_the_facade_is_there() -> None:
    for name in logyard.__all__:
        assert getattr(logyard, name) is not None
        assert name in dir(logyard)
    with pytest.raises(AttributeError, match="'logyard' has no attribute 'append'"):
        importlib.import_module("logyard").append  # noqa: B018


def test_the_constraints_satisfy_what_the_project_asks_for() -> None:
    """One version with hashes of each dependency, and nothing that names where it comes from."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.lstrip().startswith("#")]
    pinned: dict[str, str] = {}
    for line in lines:
        found = re.fullmatch(r"([\w.-]+)==(\S+)(?: *;[^-]*)?((?: +--hash=sha256:[0-9a-f]{64})+)", line.rstrip())
        assert found is not None, line
        pinned[canonicalize_name(found[1])] = found[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for asked in map(Requirement, [*project["dependencies"], *extras["tls"], *extras["etcd"]]):
        assert asked.specifier.contains(pinned[canonicalize_name(asked.name)]), asked
        assert any(one.operator in ("<", "<=", "~=", "==") for one in asked.specifier), f"{asked} has no upper bound"
    assert "://" not in text
