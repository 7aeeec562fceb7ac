"""What is made of the pairs that compare two checkouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from logyard.bench.suite import checkouts
from logyard.bench.suite.checkouts import CASES, LOADS, Cost, compared, microseconds, words_of
from logyard.bench.suite.table import CASES as TABLE
from logyard.bench.suite.table import BadSuite, case_of
from logyard.service.cli.root import cli


def test_start_and_end_are_taken_off() -> None:
    assert microseconds(Cost(3.5, 11_000), Cost(1.5, 1000)) == pytest.approx(200.0)


def test_the_figure_is_the_median_of_the_pairs_and_not_the_ratio_of_medians() -> None:
    found = compared([10.0, 20.0, 40.0], [11.0, 18.0, 80.0])
    assert (found["ratio"], found["ratios"]) == (1.1, [1.1, 0.9, 2.0])
    assert (found["us_before"], found["us_after"]) == (20.0, 18.0)


def test_pairs_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, float]] = []

    def run(checkout: Path, arguments: object, seconds: float) -> Cost:
        ran.append((checkout.name, seconds))
        return Cost(seconds, int(seconds * 1000))

    monkeypatch.setattr(checkouts, "run", run)
    checkouts.measure((Path("a"), Path("b")), (), 3, 2.0)
    assert [name for name, seconds in ran if seconds == 2.0] == ["a", "b", "b", "a", "a", "b"]


def test_what_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        checkouts.main([str(tmp_path), str(tmp_path)])
    assert left.value.code == 2 and "is no checkout" in capsys.readouterr().err


def test_a_case_is_a_row_of_the_suite_in_words_that_the_command_takes() -> None:
    assert words_of(case_of("alone-256")) == [
        "append", "--nodes", "3", "--size", "256", "--clients", "1", "--window", "1",
    ]  # fmt: skip
    assert words_of(case_of("queue-256")) == ["queue", "--nodes", "1"]
    runner = CliRunner()
    loads = [one for one in TABLE if one.kind in LOADS and not one.sync_delay_ms]
    assert {*CASES} < {one.name for one in loads} and any("keep" in one.settings for one in loads)
    for one in loads:
        kind, *options = words_of(one)
        found = runner.invoke(cli, ["bench", kind, *options, "--help"])
        assert found.exit_code == 0, found.output


@pytest.mark.parametrize("name", ["failover-1000", "closed-256-sync-1ms"])
def test_what_is_no_load_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadSuite, match=name):
        words_of(case_of(name))
    with pytest.raises(SystemExit) as left:
        checkouts.main([".", ".", "--case", name])
    assert left.value.code == 2 and name in capsys.readouterr().err
