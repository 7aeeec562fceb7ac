"""Refuse to build from a tree whose links were lost (a zip of it, say): the wheel would hold three files."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

PACKAGES = ("bench", "client", "engine", "machines", "payloads", "pipeline", "protocol", "service")

lost = [name for name in PACKAGES if not Path(__file__).parent.joinpath("logyard", name, "__init__.py").is_file()]
if lost:
    raise SystemExit(
        f"logyard/{lost[0]} is no link to {lost[0]}/ in this tree, as in an archive without symbolic links. "
        f"Make them: for name in {' '.join(PACKAGES)}; do rm -f logyard/$name; ln -s ../$name logyard/$name; done"
    )
setup()
