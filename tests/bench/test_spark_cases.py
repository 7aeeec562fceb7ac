"""The cases of `bench spark`, without Spark: which run where, what is asked of them, what the medians are."""

from __future__ import annotations

from logyard.bench.cases.spark import CASES, counts_of
from logyard.bench.cases.spark_rounds import Demand, Took, alternating, with_ratio
from logyard.bench.settings import SPARK_CASES


def test_cases_run_on_the_nodes_that_they_are_meant_for() -> None:
    assert counts_of(["rows", "direct", "idle"], None) == [(1, ["rows", "direct"]), (3, ["direct", "idle"])]
    assert counts_of(["rows", "idle"], 2) == [(2, ["rows", "idle"])]
    assert set(SPARK_CASES) == set(CASES) and SPARK_CASES[-1] == "dead", "the cluster is not whole meanwhile"


def test_what_is_asked_of_a_figure() -> None:
    demand = Demand("rows", 10, nodes=3)
    assert demand.missed({"rows": 9}, 1) is None and demand.missed({"rows": 10}, 3) is None
    assert demand.missed({"rows": 9}, 3) == "rows: 9; at least 10 is asked for"
    assert demand.missed({}, 3) == "rows: was not measured"
    assert Demand("ms", most=4).missed({"ms": 5}, 1) == "ms: 5; at most 4 is asked for"


def test_rounds_alternate_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    times = iter([100.0, 100.0, 3.0, 1.0, 1.0, 2.0, 2.0, 9.0])

    def measure(name: str) -> Took:
        calls.append(name)
        return Took(next(times), 1.0)

    found = alternating({"ours": lambda: measure("ours"), "null": lambda: measure("null")})
    assert calls == ["ours", "null"] * 4 and found == {"ours": Took(2.0, 1.0), "null": Took(2.0, 1.0)}
    assert with_ratio("rows", 100, Took(2.0, 4.0), Took(1.0, 1.0)) == {
        "rows": 50, "rows_null": 100, "rows_ratio": 0.5, "rows_cpu_ratio": 0.25,
    }  # fmt: skip
