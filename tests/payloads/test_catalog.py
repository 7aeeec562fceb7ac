"""The directory of generations: what is taken out of use stays so after a power cut."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from logyard.payloads.catalog import Catalog, allocated
from logyard.payloads.generation import Generation
from logyard.payloads.homes import Home, without
from logyard.protocol.errors import GenerationFailed

from .support import SMALL, Door


def test_the_names_of_what_was_taken_out_of_use_are_durable(tmp_path: Path) -> None:
    door, directory = Door(), str(tmp_path)
    catalog = Catalog(directory, SMALL, door, writer=False)
    for number, take in ((1, catalog.retire), (2, catalog.set_aside)):
        made = Generation(str(tmp_path / f"gen-{number:010x}"), number, SMALL)
        made.create(0, door.sync_directory)
        made.seal(door.sync_directory)
        made.close()
        door.synced.clear()
        take(number)
        assert not os.path.exists(made.path) and door.synced == [directory]
    door.synced.clear()
    assert catalog.sweep() > 0 and door.synced == [directory]
    door.synced.clear()
    assert catalog.sweep() == 0 and not door.synced, "what was set aside stays, and nothing changed"
    assert len(os.listdir(directory)) == 1
    catalog.close()


def test_a_generation_that_goes_while_bytes_are_counted_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash states, seed 300, event 565: `status` failed beside the thread that retired a generation."""
    catalog = Catalog(str(tmp_path), SMALL, Door())
    for number in (1, 2):
        catalog.create(number, 0)
    one = allocated(catalog.path(2))
    assert catalog.disk_bytes() > one > 0
    listed = os.listdir

    def retired_behind(path: str) -> list[str]:
        names = listed(path)
        if path == str(tmp_path) and os.path.isdir(catalog.path(1)):
            catalog.retire(1)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", retired_behind)
        assert catalog.disk_bytes() == one
    assert catalog.numbers() == [2]
    catalog.close()


def test_a_creation_that_a_crash_cut_off_leaves_no_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def power_cut(*names: str) -> None:
        raise OSError("cut")

    catalog = Catalog(str(tmp_path), SMALL, Door())
    with monkeypatch.context() as patch, pytest.raises(OSError, match="cut"):
        patch.setattr(os, "rename", power_cut)
        catalog.create(1, 0)
    (left,) = tmp_path.iterdir()
    (left / "data.mdb").write_bytes(bytes(8192))
    assert catalog.numbers() == catalog.set_aside_numbers() == []
    catalog.clear_unfinished()
    assert not list(tmp_path.iterdir())

    with monkeypatch.context() as patch, pytest.raises(OSError, match="cut"):
        patch.setattr(os, "rename", power_cut)
        catalog.create(1, 0)
    made = catalog.writer_from(1, 0)
    assert (made.number, catalog.numbers()) == (1, [1]) and os.listdir(tmp_path) == ["gen-0000000001"]
    catalog.close()


def test_a_catalog_that_ends_closes_what_it_opened(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), SMALL, Door())
    catalog.create(1, 0)
    catalog.seal(1)
    reader = catalog.get(1)
    catalog.close()
    with pytest.raises(GenerationFailed):
        reader.measure()


def test_homes_less_a_range_are_the_indexes_outside_of_it() -> None:
    for first, last, low, high in itertools.product(range(1, 6), repeat=4):
        if first <= last and low <= high:
            left = without([Home(first, last, 1, 1)], low, high)
            found = [index for home in left for index in range(home.first, home.last + 1)]
            assert found == sorted({*range(first, last + 1)} - {*range(low, high + 1)})
