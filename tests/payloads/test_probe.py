"""A generation is set aside for what is its own fault alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logyard.payloads import probe
from logyard.payloads.generation import Generation
from logyard.protocol.errors import GenerationFailed, PayloadError, StoreShort


@pytest.mark.parametrize(("code", "sound"), [(0, True), (1, True), (2, True), (3, True), (4, False), (-9, True)])
def test_who_ends_a_probe_from_outside_says_nothing_of_the_file(
    monkeypatch: pytest.MonkeyPatch, code: int, sound: bool
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code))
    assert probe.survives("x", 1, 1 << 30) == sound


def test_a_python_that_does_not_come_to_the_probe_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ends with 1: a package that is being replaced, say."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    assert probe.survives(str(tmp_path), 1, 1 << 30)


def test_a_probe_runs_the_code_of_who_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in a directory in which Python finds none."""
    (tmp_path / "data.mdb").write_bytes(b"no page" * 4096)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert not probe.survives(str(tmp_path), 1, 1 << 30)


@pytest.mark.parametrize("code", [-6, -7, -8, -11])
def test_who_dies_of_a_page_does_not_survive(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code))
    assert not probe.survives("x", 1, 1 << 30)


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("x", 300), OSError(11, "no process")], ids=["slow", "none"]
)
def test_a_probe_that_does_not_end_or_begin_says_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert probe.survives("x", 1, 1 << 30)


@pytest.mark.parametrize(
    ("error", "code"), [(StoreShort("no memory"), 3), (GenerationFailed("a generation", "a page is damaged"), 4)]
)
def test_a_want_of_memory_is_not_the_files_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: PayloadError, code: int
) -> None:
    def fails(self: Generation) -> None:
        raise error

    monkeypatch.setattr(Generation, "open_reader", fails)
    assert probe.main([str(tmp_path), "1", str(1 << 30)]) == code
