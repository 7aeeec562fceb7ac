"""Where the Spark demo leaves things: nothing where it was started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from logyard.service.demo.run import home
from logyard.service.demo.spark import DATA, plot


def test_plots_stay_beside_the_data_and_not_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    audits = {
        f"{name}, stopped": {"files": {"node-1/wal/0000000000000001.wal": {"live": 1, "stored": 2}}} for name in DATA
    }
    with home(None, "demo-", DATA) as directory:
        for name in DATA:
            (directory / name).mkdir()
        plots = plot(directory, {}, audits)
    assert len(plots) == 2 and all(path.stat().st_size for path in plots)
    assert os.listdir(tmp_path / "here") == [] and sorted(directory.iterdir()) == sorted(plots)
    with pytest.raises(ZeroDivisionError), home(None, "demo-", DATA) as directory:
        raise ZeroDivisionError
    assert not directory.exists(), "what failed leaves nothing"
    with home(tmp_path / "here", "demo-", DATA) as directory:
        (directory / "first").mkdir()
    assert (tmp_path / "here" / "first").exists(), "a directory that was named is kept"
