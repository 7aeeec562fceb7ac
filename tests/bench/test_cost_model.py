"""The cost model: what its fit finds in observations that are made up, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from logyard.bench import cost_model
from logyard.bench.cluster import NotReached
from logyard.bench.cost_model import (
    CLIENT,
    FITTED,
    GATHERED,
    HELD_OUT,
    NODE,
    Look,
    Model,
    Row,
    Run,
    Shape,
    Speed,
    Started,
    Unfit,
    counts_of,
    fit,
    level,
    median_run,
    predict,
    report,
)

CLIENT_US = dict(zip(CLIENT, (2.0, 25.0, 0.3, 110.0), strict=True))
NODE_US = dict(zip(NODE, (2.5, 50.0, 900.0, 1.2, 1.0, 35.0, 700.0, 0.8, 40.0), strict=True))
DRAW = 7


def run(shape: Shape, draw: random.Random, noise: float = 0.05, turn_ns: float = 200.0) -> Run:
    """A run of a thousand batches whose costs are those above, at a speed, but for noise."""
    batches = 1000
    entries = batches * min(shape.logs, shape.clients * shape.window)
    commands = batches * shape.clients * shape.window
    kib = commands * shape.size / 1024

    def row(counts: Mapping[str, float], us: Mapping[str, float]) -> Row:
        return Row(predict(Row(0.0, counts), us) * draw.uniform(1 - noise, 1 + noise) * turn_ns / 200.0, counts)

    nodes = []
    for node in range(3):
        share = 1 / 3 if shape.logs > GATHERED else float(node == 0)
        every = zip(("command", "entry", "batch", "KiB"), (commands, entries, batches, kib), strict=True)
        counts = {f"{role} {name}": count * part for name, count in every
                  for role, part in (("leader", share), ("follower", 1 - share))}  # fmt: skip
        # Who has little to do sleeps after each of its steps.
        counts["wake-up"] = batches * (3.0 + 2.0 / shape.window + draw.random())
        nodes.append(row(counts, NODE_US))
    client = {"command": commands, "frame": entries, "KiB": kib, "wake-up": batches * (0.5 + draw.random())}
    return Run(shape, turn_ns, commands, row(client, CLIENT_US), nodes)


def test_the_fit_finds_the_costs_that_observations_were_made_of() -> None:
    draw = random.Random(DRAW)
    model = Model.of([run(shape, draw, 0.02) for shape in FITTED for _ in range(5)])
    for name, us in CLIENT_US.items():
        assert model.client[name] == pytest.approx(us, rel=0.1), name
    for name, us in NODE_US.items():
        assert model.node[name] == pytest.approx(us, rel=0.25), name
    assert model.roles()["follower"]["entry"] == pytest.approx(35, rel=0.25)


def test_without_noise_it_finds_them_exactly() -> None:
    draw = random.Random(DRAW)
    model = Model.of([run(shape, draw, 0.0) for shape in FITTED])
    assert model.client == pytest.approx(CLIENT_US) and model.node == pytest.approx(NODE_US)


def test_no_cost_is_negative() -> None:
    rows = [Row(10.0 * a + 3.0 * b - 0.5 * c, {"a": a, "b": b, "c": c})
            for a, b, c in ((1, 0, 0), (2, 1, 3), (0, 4, 1), (5, 2, 7), (1, 1, 6))]  # fmt: skip
    found = fit(rows, ("a", "b", "c"))
    assert found["c"] == 0.0 and found["a"] > 0 and found["b"] > 0


def test_counts_that_are_missing_or_follow_from_others_are_named() -> None:
    rows = [Row(10.0 + number, {"command": number, "entry": 2.0 * number, "KiB": 5.0}) for number in range(1, 9)]
    with pytest.raises(Unfit, match="any batch"):
        fit(rows, ("command", "batch"))
    with pytest.raises(Unfit, match="counts of command follow"):
        fit(rows, ("command", "entry", "KiB"))
    assert set(fit(rows, ("command", "KiB"))) == {"command", "KiB"}
    one_shape = [run(FITTED[0], random.Random(DRAW)) for _ in range(9)]
    with pytest.raises(Unfit, match="follow"):
        Model.of(one_shape)


def test_shapes_that_were_held_out_are_predicted_whatever_the_machines_speed() -> None:
    draw = random.Random(DRAW)
    runs = {shape: [run(shape, draw, turn_ns=speed) for speed in (100.0, 200.0, 400.0)]
            for shape in (*FITTED, *HELD_OUT)}  # fmt: skip
    found = report(runs, HELD_OUT)
    assert found["ok"] and found["turn_ns"] == 200.0
    assert [one["total"] for one in found["held_out"]] == pytest.approx([1.0] * 3, abs=0.15)
    assert len(found["observations"]) == len(FITTED)
    # One that costs twice as much as what it is made of.
    dear = [one._replace(client=Row(0.0, {}), nodes=[row._replace(us=2 * row.us) for row in one.nodes])
            for one in runs[HELD_OUT[0]]]  # fmt: skip
    dear = [one._replace(client=Row(1.0, one.client.counts)) for one in dear]
    missed = report({**runs, HELD_OUT[0]: dear}, HELD_OUT)
    assert not missed["ok"] and missed["held_out"][0]["total"] == pytest.approx(0.5, abs=0.1)
    with pytest.raises(Unfit, match="300 x 256 B"):
        report({**runs, FITTED[-1]: []}, HELD_OUT)


def test_the_run_of_median_cost_stands_for_its_shape() -> None:
    draw = random.Random(DRAW)
    runs = [run(FITTED[0], draw, turn_ns=speed) for speed in (900.0, 100.0, 200.0)]
    assert median_run(runs) is runs[2]


def look(batches: int, commit: int, end: int, leader: int = 0) -> Look:
    led = [{"b": 3} if node == 2 else {"a": 1} if node == leader else {} for node in range(3)]
    return Look([batches, batches, 2 * batches], led, {"a": commit, "b": 10}, {"a": end, "b": 7})


def test_counts_are_those_of_the_logs_that_a_node_leads() -> None:
    commands, nodes = counts_of(Shape(2, 2048, 1, 1), look(10, 20, 30), look(15, 28, 130))
    assert commands == 100
    counts = (100, 8, 5.0, 200.0, 0, 0, 0.0, 0.0)
    assert nodes[0] == dict(zip(NODE[:-1], counts, strict=True))
    assert (nodes[2]["leader batch"], nodes[2]["follower batch"]) == (0.0, 10.0)
    assert nodes[1]["follower KiB"] == nodes[2]["follower KiB"] == 200.0
    with pytest.raises(NotReached, match="leaders changed"):
        counts_of(Shape(2, 2048, 1, 1), look(10, 20, 30), look(15, 28, 130, leader=1))


def test_nodes_are_level_when_all_applied_what_is_committed() -> None:
    assert level([{"commit": 9, "applied": 9}] * 3)
    assert not level([{"commit": 9, "applied": 9}, {"commit": 9, "applied": 8}])
    assert not level([{"commit": 9, "applied": 9}, {"commit": 8, "applied": 8}])


def test_nodes_are_read_from_what_up_says() -> None:
    nodes = Started(["node 1  127.0.0.1:7001  pid 12  log a", "node 2  127.0.0.1:7002  pid 13  log b", "export X=Y"])
    assert (nodes.count, nodes.addresses, nodes.pids) == (2, ["127.0.0.1:7001", "127.0.0.1:7002"], [12, 13])


def test_the_machines_speed_is_taken_beside_a_run() -> None:
    with Speed() as speed:
        sum(range(1000))
    assert 10 < speed.turn_ns < 1e6


def test_the_command_line_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cost_model.main(["--help"])
    assert left.value.code == 0 and "microseconds" in capsys.readouterr().out
