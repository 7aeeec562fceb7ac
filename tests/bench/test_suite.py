"""The suite without anything started: what is run, what is not run again, what becomes of the figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.bench.settings import AppendSettings
from logyard.bench.suite import ours, run
from logyard.bench.suite.figures import compare, rows
from logyard.bench.suite.ours import KINDS
from logyard.bench.suite.run import Contender, make, run_suite
from logyard.bench.suite.samples import Sample, Samples, plan
from logyard.bench.suite.sync_delay import delayed_environment
from logyard.bench.suite.table import CASES, OURS, PROFILES, SPLIT, BadSuite, Case, Profile, SuiteFailed, case_of
from logyard.service.cli.root import cli

TINY = Profile("tiny", "for tests", ("closed-256", "recover-100"), 3, 0.1, 0.0)


def quiet(text: str) -> None:
    pass


def uncounted(count: int) -> None:
    pass


def system(name: str, rate: float = 100.0, **more: Any) -> tuple[Contender, list[str]]:
    asked: list[str] = []

    def run_one(case: Any, profile: Profile, directory: Path, processes: int) -> dict[str, Any]:
        asked.append(case.name)
        return {case.figure: rate + len(asked), "p50_ms": 1.0, "p99_ms": 2.0, **more}

    return Contender(name, "1.0", run_one), asked


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "describe_machine", lambda directory: {"fdatasync_us": 100.0})


def test_every_case_of_a_profile_is_in_the_table_and_has_settings_of_its_kind() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for profile in PROFILES.values():
        for name in profile.cases:
            case = case_of(name)
            settings = ours.settings_of(case, profile)
            assert set(case.settings) <= {one.name for one in dataclasses.fields(settings)}, name
    with pytest.raises(BadSuite, match="no case nothing"):
        case_of("nothing")


def test_a_load_lasts_as_long_as_the_profile_says() -> None:
    settings = ours.settings_of(case_of("open-256"), PROFILES["smoke"], 2)
    assert isinstance(settings, AppendSettings)
    assert (settings.seconds, settings.processes, settings.rate) == (8.0, 2, 2000.0)
    assert ours.settings_of(case_of("idle-10000"), PROFILES["full"]).seconds == 10.0


def test_rounds_alternate_and_begin_with_another_system_each() -> None:
    found = plan([case_of("closed-256"), case_of("recover-100")], [OURS, "etcd", "ra"], 2, OURS)
    assert [(one.case, one.system, one.round) for one in found] == [
        ("closed-256", OURS, 1), ("closed-256", "etcd", 1), ("closed-256", "ra", 1),
        ("closed-256", "etcd", 2), ("closed-256", "ra", 2), ("closed-256", OURS, 2),
        ("recover-100", OURS, 1), ("recover-100", OURS, 2),
    ]  # fmt: skip


def test_a_rival_is_not_asked_with_a_delay_that_it_cannot_have() -> None:
    case = case_of("closed-256-sync-1ms")
    assert case.sync_delay_ms == 1.0 and not case.is_for("etcd")


def test_large_bodies_are_asked_of_ra_alone_for_as_long_as_their_cases_say() -> None:
    case, profile = case_of("one-64k-recycled"), PROFILES["full"]
    assert case.name in PROFILES["large"].cases and case.name not in profile.cases
    assert case.is_for("ra") and not case.is_for("etcd")
    settings = ours.settings_of(case, profile)
    assert (settings.seconds, settings.warmup_s, settings.keep) == (60.0, 20.0, 1 << 30)
    assert ours.settings_of(case_of("one-64k-new"), profile).keep == 0


def test_a_rival_with_keys_is_asked_for_them_alone() -> None:
    for name in ("kv-put", "kv-get", "kv-put-4p", "kv-get-4p", "watch-1000-4p"):
        assert case_of(name).is_for("etcd") and not case_of(name).is_for("ra")
    assert not case_of("queue-256").is_for("etcd")


def test_a_case_that_says_how_many_load_processes_has_so_many(tmp_path: Path) -> None:
    asked: list[int] = []

    def run_one(case: Case, profile: Profile, directory: Path, processes: int) -> dict[str, Any]:
        asked.append(processes)
        return {"ops_per_s": 1.0, "client_cpu_s": 100.0, "seconds": 1.0}

    for name in ("kv-get-4p", "kv-get"):
        make(case_of(name), Contender(OURS, "1", run_one), TINY, tmp_path / "work", 1)
    assert asked == [4, 1, 2], "the load was what was busy: only where the case leaves it open there is more of it"


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "report")
    assert samples.begin(TINY, [OURS]) is False
    one, asked = system(OURS)
    assert run_suite(TINY, [one], samples, quiet, uncounted) == []
    assert asked == ["closed-256"] * 3 + ["recover-100"] * 3
    samples.place(Sample("closed-256", OURS, 2)).unlink()
    samples.place(Sample("recover-100", OURS, 1)).write_text('{"case": "recover-1')
    again, asked = system(OURS)
    assert Samples(tmp_path / "report").begin(TINY, [OURS]) is True
    steps: list[int] = []
    assert run_suite(TINY, [again], samples, quiet, steps.append) == []
    assert asked == ["closed-256", "recover-100"]
    assert sum(steps) == 6
    assert not (tmp_path / "report" / "work").exists()


def test_what_failed_is_a_row_and_is_run_again(tmp_path: Path) -> None:
    def fails(*_: object) -> dict[str, Any]:
        raise OSError(2, "no such thing")

    samples = Samples(tmp_path)
    failed = run_suite(TINY, [Contender(OURS, "1.0", fails)], samples, quiet, uncounted)
    assert len(failed) == 6
    (row, _) = rows(samples.all())
    assert row.rounds == 0 and row.failed == ["FileNotFoundError: [Errno 2] no such thing"]
    one, asked = system(OURS)
    run_suite(TINY, [one], samples, quiet, uncounted)
    assert len(asked) == 6


def test_a_check_that_failed_is_no_figure(tmp_path: Path) -> None:
    one, _ = system(OURS, ok=False, problems=["3 acknowledged records are lost"])
    samples = Samples(tmp_path)
    run_suite(TINY, [one], samples, quiet, uncounted)
    row = rows(samples.all())[0]
    assert row.rounds == 0 and row.failed == ["3 acknowledged records are lost"]


def test_a_rival_that_is_not_installed_is_a_row_that_says_how_to(tmp_path: Path) -> None:
    ours_, _ = system(OURS)
    samples = Samples(tmp_path)
    failed = run_suite(
        TINY, [ours_, Contender("redis", "", None, "apt-get install redis-server")], samples, quiet, uncounted
    )
    assert {sample.system for sample in failed} == {"redis"}
    row = next(row for row in rows(samples.all()) if row.system == "redis")
    assert row.failed == ["not installed: apt-get install redis-server"]


def test_busy_load_processes_are_doubled_and_that_is_remembered(tmp_path: Path) -> None:
    asked: list[int] = []

    def run_one(case: Any, profile: Profile, directory: Path, processes: int) -> dict[str, Any]:
        asked.append(processes)
        # Twice the processes do more with a smaller share each.
        return {case.figure: 100.0 * processes, "client_cpu_s": 9.5, "seconds": 10.0, "warmup_s": 0.0}

    samples = Samples(tmp_path)
    profile = dataclasses.replace(TINY, cases=("closed-256",), rounds=2)
    run_suite(profile, [Contender(OURS, "1.0", run_one)], samples, quiet, uncounted)
    assert asked == [1, 2, 2]
    found = samples.read(Sample("closed-256", OURS, 1))
    assert found is not None and found["processes"] == 2 and found["figures"]["client_share"] == 0.475


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    Samples(tmp_path / "a").begin(TINY, [OURS, "etcd"])
    with pytest.raises(BadSuite, match=r"holds a run tiny of logyard, etcd"):
        Samples(tmp_path / "a").begin(TINY, [OURS])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("mine")
    with pytest.raises(BadSuite, match="holds no run"):
        Samples(tmp_path / "b").begin(TINY, [OURS])
    (tmp_path / "a" / "suite.json").write_text('{"format": 99}')
    with pytest.raises(BadSuite, match="not of a release"):
        Samples(tmp_path / "a").told()


def sample(case: str, figure: float | None, number: int, who: str = OURS, **more: Any) -> dict[str, Any]:
    figures = {case_of(case).figure: figure, **more}
    found = {"case": case, "system": who, "round": number, "version": "1.0", "figures": figures}
    return found if figure is not None else {**found, "failed": "it ended"}


def test_a_row_has_the_median_and_its_spread() -> None:
    values = (100.0, 300.0, 110.0, None)
    (row,) = rows(sample("closed-256", value, at, p99_ms=value) for at, value in enumerate(values))
    assert (row.rounds, row.median, row.low, row.high) == (3, 110.0, 100.0, 300.0)
    assert row.beside["p99_ms"] == 110.0
    assert row.failed == ["it ended"]


def test_a_load_that_can_not_be_split_is_made_once(tmp_path: Path) -> None:
    """A queue's was made again, the same, and said to be of two processes."""
    asked: list[int] = []

    def run_one(case: Case, profile: Profile, directory: Path, processes: int) -> dict[str, Any]:
        asked.append(processes)
        return {case.figure: 100.0 + len(asked), "client_cpu_s": 1.0, "consumer_cpu_s": 1.9, "seconds": 2.0}

    found = make(case_of("queue-256"), Contender(OURS, "1", run_one), TINY, tmp_path / "work", 1)
    assert asked == [1] and found["processes"] == 1
    assert found["figures"]["client_share"] == 0.95, "of who publishes and who consumes the busier one"
    assert {*SPLIT} == {
        kind for kind, known in KINDS.items() if "processes" in {one.name for one in dataclasses.fields(known.settings)}
    }


def test_a_row_says_when_its_clients_were_busy() -> None:
    (row,) = rows([sample("closed-256", 1.0, 1, client_share=0.97)])
    assert row.notes == ["the load processes were busy: the system may do more"]


@pytest.mark.parametrize(
    ("case", "before", "after", "worse"),
    [
        ("closed-256", 100.0, 81.0, False),
        ("closed-256", 100.0, 79.0, True),
        ("closed-256", 100.0, 500.0, False),
        ("recover-100", 1.0, 1.2, False),
        ("recover-100", 1.0, 1.3, True),
        ("recover-100", 1.0, 0.1, False),
    ],
)
def test_worse_is_less_of_what_is_good_and_more_of_what_is_not(
    case: str, before: float, after: float, worse: bool
) -> None:
    (change,), missing = compare(rows([sample(case, before, 1)]), rows([sample(case, after, 1)]), 0.2)
    assert change.worse is worse and not missing
    assert change.ratio == pytest.approx(after / before if case_of(case).more else before / after)


def test_a_comparison_has_the_spread_of_both_and_names_what_is_missing() -> None:
    before = rows([*(sample("closed-256", v, at) for at, v in enumerate((90.0, 100.0, 120.0))),
                   sample("alone-256", 1.0, 1), sample("kv-put", None, 1)])  # fmt: skip
    after = rows([*(sample("closed-256", v, at) for at, v in enumerate((180.0, 200.0, 240.0))),
                  sample("kv-put", 5.0, 1)])  # fmt: skip
    (change,), missing = compare(before, after, 0.2)
    assert (change.ratio, change.low) == (2.0, 180 / 120) and change.high == pytest.approx(240 / 90)
    assert missing == ["alone-256 of logyard is only in A", "kv-put of logyard is only in B"]


def test_what_fails_in_b_is_worse_and_not_absent() -> None:
    before = rows([sample("closed-256", 100.0, 1), sample("kv-put", 1.0, 1), sample("kv-put", 1.0, 1, "etcd")])
    none, some = [sample("closed-256", None, 1)], [sample("closed-256", 100.0, 1), sample("closed-256", None, 2)]
    for failed in (none, some):
        after = rows([*failed, sample("kv-put", 1.0, 1), sample("kv-put", None, 1, "etcd")])
        changes, missing = compare(before, after, 0.2)
        assert [(one.case, one.system) for one in changes if one.worse] == [("closed-256", OURS)]
        # That a rival failed is no fault of ours.
        assert missing == ["kv-put of etcd is only in A"]


def test_a_comparison_goes_past_what_is_gone_and_says_where_runs_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        monkeypatch.setattr("logyard.bench.suite.samples.machine_name", lambda name=name: f"machine {name}")
        kept, (one, _) = Samples(tmp_path / name), system(OURS)
        kept.begin(TINY, [OURS])
        run_suite(dataclasses.replace(TINY, rounds=1), [one], kept, quiet, uncounted)
    kept.keep(Sample("of-another-release", OURS, 1), {"figures": {}})
    found = CliRunner().invoke(cli, ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    told = json.loads(found.stdout.splitlines()[-1])
    assert found.exit_code == 0 and len(told["cases"]) == 2 and told["hosts"] == ["machine a", "machine b"]
    assert told["missing"] == [f"of-another-release in {tmp_path / 'b'} is no case of this release"]
    plain = CliRunner().invoke(cli, ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "A was made on machine a, B on machine b" in plain.output


def test_no_case_at_all_is_bad_usage(tmp_path: Path) -> None:
    for cases in ("", " , "):
        found = CliRunner().invoke(cli, ["bench", "run", "smoke", "--cases", cases, "--report", str(tmp_path / "r")])
        assert found.exit_code == 2 and "at least one case" in found.output


def test_open_loops_are_compared_by_how_late_they_are() -> None:
    assert {(one.figure, one.more) for one in CASES if one.settings.get("rate")} == {("p99_ms", False)}


def test_a_figure_beyond_its_aim_is_a_figure(tmp_path: Path) -> None:
    ratios = iter((2.6, 3.4, 3.9))

    def run_one(*_: object) -> dict[str, Any]:
        ratio = next(ratios)
        return {"ok": ratio < 3, "sound": True, "ratio": ratio}

    samples = Samples(tmp_path)
    run_suite(dataclasses.replace(TINY, cases=("mixed",)), [Contender(OURS, "1", run_one)], samples, quiet, uncounted)
    (row,) = rows(samples.all())
    assert (row.rounds, row.median) == (3, 3.4)


@pytest.mark.parametrize("name", ["build", "machine_name"])
def test_a_run_does_not_go_on_with_another_build_or_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for value in ("aaaa", "bbbb"):
        monkeypatch.setattr(f"logyard.bench.suite.samples.{name}", lambda value=value: value)
        if value == "aaaa":
            Samples(tmp_path / "a").begin(TINY, [OURS])
    with pytest.raises(BadSuite, match=r"aaaa.*bbbb"):
        Samples(tmp_path / "a").begin(TINY, [OURS])


def test_samples_can_be_read_as_json(tmp_path: Path) -> None:
    one, _ = system(OURS)
    samples = Samples(tmp_path)
    run_suite(dataclasses.replace(TINY, rounds=1), [one], samples, quiet, uncounted)
    found = json.loads((tmp_path / "raw" / "closed-256" / "logyard-1.json").read_text())
    assert found["machine"] == {"fdatasync_us": 100.0} and found["figures"]["ops_per_s"] == 101.0


def test_without_a_compiler_a_delay_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert delayed_environment(tmp_path, 0.0) == {}
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SuiteFailed, match="apt-get install gcc"):
        delayed_environment(tmp_path, 1.0)
