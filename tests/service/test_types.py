"""The types of public verbs, as a user's checkers see them: mypy --strict with the rest of the tree, pyright here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from . import user_program
from .test_asyncio import served

PYRIGHT = Path(sys.executable).with_name("basedpyright")
"""Pyright with a node of its own from the package index: nothing is fetched when it runs."""


async def test_the_programs_run(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):
        assert await user_program.with_tasks(servers) == 4
        assert await trio.to_thread.run_sync(user_program.with_threads, servers) == 7
    assert await user_program.embedded(tmp_path / "embedded") == 3


def pyright(directory: Path, text: str) -> list[dict[str, Any]]:
    (directory / "program.py").write_text(text)
    (directory / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    words = [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable, "-p", str(directory)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    return [one for one in found if one["severity"] == "error"]


@pytest.mark.skipif(not PYRIGHT.exists(), reason="basedpyright is not installed")
def test_pyright_takes_the_program_and_sees_a_wrong_one(tmp_path: Path) -> None:
    text = Path(user_program.__file__).read_text()
    assert pyright(tmp_path, text) == []
    wrong = text.replace('assert_type(await log.append(b"m", b"body"), int)', 'assert_type(await log.append("m"), str)')
    assert wrong != text
    assert {one["rule"] for one in pyright(tmp_path, wrong)} >= {"reportArgumentType", "reportAssertTypeFailure"}
