"""The table of logs that is kept between looks: told of changes, it is what telling everything would make of it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from logyard.client.scans import Changed, LogRow
from logyard.pipeline.log_table import LogTable
from logyard.pipeline.network import merge_rows


def row(node: int, name: str, end: int, uid: int = 1, leader: int = 0) -> LogRow:
    return LogRow(name, uid, leader, 0, end, 0, (node,))


def everything(table: LogTable, heard: dict[int, list[LogRow]], missing: frozenset[int] = frozenset()) -> None:
    table.update([(node, Changed(1, True, rows, [])) for node, rows in heard.items()], missing)


def test_the_longest_row_counts_and_what_was_not_chosen_is_not_kept() -> None:
    table = LogTable(lambda name: name != "other")
    everything(table, {1: [row(1, "a", 5), row(1, "other", 1)], 2: [row(2, "a", 7)]})
    assert {name: info.end for name, info in table.infos.items()} == {"a": 7}
    table.update([(1, Changed(2, False, [row(1, "a", 9)], [])), (2, Changed(2, False, [], []))], frozenset())
    assert table.infos["a"].end == 9 and table.mark(1) == 2 and table.mark(3) == 0


def test_a_node_that_does_not_answer_counts_no_more_and_is_asked_for_everything_later() -> None:
    table = LogTable(lambda name: True)
    everything(table, {1: [row(1, "a", 5)], 2: [row(2, "a", 7), row(2, "b", 1)]})
    table.update([(1, Changed(2, False, [], []))], frozenset({2}))
    assert {name: info.end for name, info in table.infos.items()} == {"a": 5}
    assert table.mark(2) == 0 and table.missing == {2}


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_changes_add_up_to_what_there_is(seed: int) -> None:
    chance = random.Random(seed)
    nodes: dict[int, dict[str, LogRow]] = {1: {}, 2: {}, 3: {}}
    told: dict[int, dict[str, LogRow]] = {}
    table = LogTable(lambda name: name != "x")
    for mark in range(1, 12):
        for rows in nodes.values():
            for name in chance.sample("abcdx", 2):
                if chance.random() < 0.25:
                    rows.pop(name, None)
                else:
                    rows[name] = row(1, name, chance.randint(0, 9), chance.choice([1, 1, 1, 2]), chance.randint(0, 3))
        heard = {node: rows for node, rows in nodes.items() if chance.random() < 0.8}
        answers = []
        for node, rows in heard.items():
            whole = not table.mark(node) or chance.random() < 0.1
            known = {} if whole else told[node]
            changed = [found for name, found in rows.items() if known.get(name) != found]
            answers.append((node, Changed(mark, whole, changed, [name for name in known if name not in rows])))
            told[node] = dict(rows)
        table.update(answers, frozenset(nodes.keys() - heard.keys()))
        # In the order in which the nodes were first heard, which decides between rows that are equal.
        said = [found for node in table._rows for found in heard[node].values() if found.name != "x"]
        assert table.infos == {info.name: info for info in merge_rows(said)}
