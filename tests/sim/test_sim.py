"""The simulator itself: equal seeds, equal histories, in every process; recorded seeds stay clean; the command line.

How much it finds is shown by `test_planted`.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.core import Core
from logyard.engine.host import ticker
from logyard.engine.raft.core import Raft
from logyard.protocol.errors import WalFailed

from .__main__ import HASHES, REGRESSIONS, command_of, hash_jobs, jobs_of, parse, recorded, summary
from .clients_kv import KvGroup
from .clients_queue import QueueGroup
from .cluster import is_short
from .features import FEATURES, LATER, drawn
from .features import recorded as recorded_features
from .files import File
from .kinds import KINDS, VERBS, forced_of
from .loop import Stop
from .minimise import minimise
from .run import Result, Run

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "seeds", "sim_hours", "speed", "operations", "commits", "elections", "faults", "violations", "event_hash",
}  # fmt: skip


def simulate(*arguments: str, hash_seed: str = "0") -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.sim", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_equal_seeds_give_equal_histories_in_every_process() -> None:
    one = simulate("--seed", "13", "--minutes", "0.3", hash_seed="1")
    two = simulate("--seed", "13", "--minutes", "0.3", hash_seed="2")
    other = simulate("--seed", "12", "--minutes", "0.3", hash_seed="1")
    assert one[1].keys() >= KEYS
    assert (one[0], two[0], other[0]) == (0, 0, 0), (one[1]["violations"], other[1]["violations"])
    assert one[1]["event_hash"] == two[1]["event_hash"] != other[1]["event_hash"]
    for key in KEYS - {"speed"}:
        assert one[1][key] == two[1][key], key
    assert sum(one[1]["faults"].values()) > 20 and one[1]["operations"] > 0.3 * 60 * 20


def test_histories_are_those_that_were_recorded() -> None:
    """A few of those that `python -m tests.sim --hashes` compares."""
    kept = json.loads(HASHES.read_text())
    for seed, minutes, groups, _, share, features in hash_jobs(kept, 6):
        found = Run(seed, minutes, groups, None, share, frozenset(features or ())).go()
        assert found.event_hash == kept["hashes"][str(seed)], f"seed {seed} has another history than before"


@pytest.mark.parametrize("seed", [9001, 9043])
def test_histories_are_the_same_without_the_lane(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `steady.hand_out` gives is what a `Ready` would, to the byte."""
    kept = json.loads(HASHES.read_text())
    (job,) = [job for job in hash_jobs(kept, len(kept["hashes"])) if job[0] == seed]
    _, minutes, groups, _, share, features = job
    monkeypatch.setattr(Raft, "hand_out", lambda raft, out: None)
    found = Run(seed, minutes, groups, None, share, frozenset(features or ())).go()
    assert found.event_hash == kept["hashes"][str(seed)] and not found.violations


def test_nothing_of_the_simulation_stays_behind() -> None:
    result = Run(3, 0.1, allowed=frozenset({"kill"})).go()
    assert not result.violations, result.violations
    module: Any = ticker
    assert module.trio is trio and module.time.time() > 0 and not hasattr(module, "open")


def test_a_run_without_faults_meets_none() -> None:
    result = Run(4, 0.2, allowed=frozenset()).go()
    assert not result.violations and not result.faults - Counter({kind: 1 << 30 for kind in KINDS if kind[0] == "Q"})
    assert result.acknowledged > 100 and result.elections >= 4


def test_every_kind_of_machine_is_driven_and_judged() -> None:
    run = Run(5, 0.4, allowed=frozenset({"kill", "isolate"}))
    result = run.go()
    assert not result.violations, result.violations
    found = {type(group): group for group in run.work.groups}
    kv, queue = found[KvGroup], found[QueueGroup]
    assert isinstance(kv, KvGroup) and isinstance(queue, QueueGroup)
    assert len(kv.changes) > 20 and kv.changes.items() <= kv.seen.items() and len(kv.seen) == kv.next - 2
    assert len(queue.confirmed) > 20 and queue.confirmed.items() <= queue.delivered.items()
    assert result.notes["kv.decided"] == len(kv.keys) and not result.notes["kv.undecided"]


def test_a_kv_history_that_is_not_linearizable_is_noticed() -> None:
    run = Run(6, 0.1, allowed=frozenset())
    group = next(group for group in run.work.groups if isinstance(group, KvGroup))
    put, get = group.invoke(1, "put", b"k0", 7), group.invoke(2, "get", b"k1")
    group.ended(put)
    group.ended(get, None)
    group.judge()
    late = group.invoke(2, "get", b"k0")
    group.ended(late, None)
    with pytest.raises(Stop):
        group.judge()
    assert "not linearizable" in run.result.violations[0]


def test_a_failure_beside_a_want_of_descriptors_is_not_its_doing() -> None:
    def fails(code: int) -> None:
        try:
            raise OSError(code, os.strerror(code))
        except OSError as error:
            raise WalFailed("a write failed") from error

    def fails_while_short(code: int) -> None:
        try:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError:
            fails(code)

    with pytest.raises(WalFailed) as short:
        fails(errno.EMFILE)
    with pytest.raises(WalFailed) as broken:
        fails_while_short(errno.EIO)
    assert is_short(short.value) and not is_short(broken.value)


@pytest.mark.long
@pytest.mark.parametrize("row", json.loads(REGRESSIONS.read_text()), ids=lambda row: str(row["seed"]))
def test_the_recorded_seeds_are_clean(row: dict[str, Any]) -> None:
    seed, minutes, groups, verbs, share, features = recorded(row)
    allowed = None if verbs is None else frozenset(verbs)
    found = Run(seed, minutes, groups, allowed, share, None if features is None else frozenset(features)).go()
    assert not found.violations, (row["found"], found.violations)


def test_all_faults_are_forced_by_a_few_neighbouring_seeds() -> None:
    share = parse(["--seeds", "20"]).share
    assert set().union(*(forced_of(seed, share) for seed in range(100, 120))) == set(VERBS)
    assert set(forced_of(7, parse([]).share)) == set(VERBS)


@pytest.mark.parametrize("verbs", ["", "kill,torn", "none"])
def test_every_violation_says_the_command_that_repeats_it(verbs: str) -> None:
    jobs = jobs_of(parse(["--seed", "40", "--seeds", "50", "--minutes", "0.7", "--verbs", verbs]))
    found = [Result(job[0], violations=["broken"] if job[0] == 47 else []) for job in jobs]
    (row,) = summary(jobs, found)["violations"]
    assert row["seed"] == 47 and row["command"] == command_of(jobs[7])
    assert jobs_of(parse(row["command"].split()[3:])) == [jobs[7]]


def test_a_session_asked_of_a_process_that_stood_still_and_died_is_asked_for_again() -> None:
    run = Run(8, 0.5, allowed=frozenset())
    client = run.work.clients[0]
    work, cluster, loop = run.work, run.cluster, run.loop

    def strike() -> None:
        number = next(number for number in cluster.up if cluster.leads(number, client.group.name))
        client.forget()
        life = cluster.hosts[number].life
        assert life is not None
        life.paused_until = loop.now + 5.0
        client.open()
        # Another one asks too, and gets its answer.
        work.sessions += 1
        loop.at(loop.now + 3.0, None, cluster.crash, number)

    loop.at(10.0, None, strike)
    result = run.go()
    assert not result.violations, result.violations
    assert client.session


def test_the_minimiser_keeps_what_is_needed() -> None:
    needed = {"kill", "torn"}

    def fails(verbs: frozenset[str]) -> Result:
        return Result(1, violations=["broken"] if needed <= verbs else [])

    kept, best = minimise(fails)
    assert kept == needed and best is not None
    assert minimise(lambda verbs: Result(1))[1] is None


@pytest.mark.parametrize("wrong", [["--minutes", "0"], ["--seeds", "0"], ["--groups", "0"]])
def test_what_makes_no_sense_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)


def test_features_are_drawn_from_a_stream_of_their_own() -> None:
    assert set().union(*(drawn(seed) for seed in range(40))) == set(FEATURES)
    assert set().union(*(recorded_features(seed) for seed in range(40))) == set(FEATURES) - set(LATER)
    assert all(drawn(seed) - set(LATER) == recorded_features(seed) for seed in range(40))
    assert jobs_of(parse(["--seed", "11", "--features", "none"]))[0][5] is None
    assert jobs_of(parse(["--seed", "11", "--features", "plain"]))[0][5] == ()
    assert jobs_of(parse(["--seed", "11"]))[0][5] == tuple(sorted(drawn(11)))
    with pytest.raises(SystemExit):
        parse(["--features", "wings"])
    # A run without them draws what it drew before there were any: the same verbs in the same rounds.
    one, two = (Run(12, 0.3, features=features).go() for features in (None, frozenset[str]()))
    assert [line for line in one.swarm if line] == [line for line in two.swarm if line]


def test_runs_with_large_bodies_write_them_to_files() -> None:
    run = Run(5001, 0.5, features=frozenset({"bodies", "truncations"}))
    assert not run.go().violations
    files = chain.from_iterable(host.files.walk() for host in run.cluster.hosts.values())
    assert any(isinstance(node, File) and path.endswith("/bodies") and node.seen for path, node in files)


@pytest.mark.sample(2)
@pytest.mark.parametrize("feature", sorted(FEATURES.keys() - {"offline"}))
def test_each_feature_makes_a_run_of_its_own(feature: str) -> None:
    verbs = frozenset(FEATURES[feature])
    one, two = (Run(21, 0.4, allowed=verbs, features=frozenset({feature})).go() for _ in range(2))
    assert not one.violations, one.violations
    assert one.event_hash == two.event_hash != Run(21, 0.4, allowed=verbs).go().event_hash
    tried = [kind for verb in verbs for kind in FEATURES[feature][verb]]
    if tried:
        more = (Run(seed, 0.4, allowed=verbs, features=frozenset({feature})).go() for seed in range(22, 27))
        assert any(run.faults[kind] for run in chain([one], more) for kind in tried), one.swarm


@pytest.mark.parametrize(("forgets", "says"), [(True, "does not know its leader"), (False, "does not get nearer")])
def test_who_does_not_find_its_leader_or_falls_behind_is_noticed(
    forgets: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(9, 1.0, allowed=frozenset(), features=frozenset())
    step = Raft.step
    deaf: list[Core] = []
    monkeypatch.setattr(Raft, "step", lambda raft, message: None if raft in deaf else step(raft, message))

    def strike() -> None:
        name = run.work.groups[0].name
        held = [(number, run.cluster.replica(number, name)) for number in run.cluster.up]
        raft = next(one.raft for number, one in held if one is not None and not run.cluster.leads(number, name))
        deaf.append(raft)
        if forgets:
            raft.leader = 0

    run.loop.at(5.0, None, strike)
    (what,) = run.go().violations
    assert says in what


def test_terms_are_looked_at_in_groups_of_their_own() -> None:
    run = Run(23, 1.0, features=frozenset({"terms", "sleep"}))
    result = run.go()
    assert not result.violations, result.violations
    assert result.notes["terms.kv"] >= 3 and result.notes["terms.queue"] > 30
    assert all(group.good_s > 5 for group in run.terms.groups)
