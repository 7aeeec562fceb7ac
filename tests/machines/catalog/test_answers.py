"""The newest answers: what is kept, what goes, and what a snapshot writes after one more."""

from __future__ import annotations

import random

from logyard.machines.catalog.answers import (
    ANSWERS_MAX,
    BYTES_MAX,
    SHARD_ANSWERS,
    SHARD_BYTES,
    Answers,
)


def request(number: int) -> bytes:
    return number.to_bytes(16, "big")


def kept(answers: Answers, count: int) -> list[int]:
    return [number for number in range(count) if answers.get(request(number)) is not None]


def test_the_newest_are_kept_in_whole_shards() -> None:
    answers = Answers()
    count = 5 * ANSWERS_MAX
    for number in range(count):
        answers.put(request(number), b"%d" % number)
        have = kept(answers, number + 1) if number % 97 == 0 else []
        assert not have or have == list(range(have[0], number + 1)), "the oldest go first"
    have = kept(answers, count)
    assert ANSWERS_MAX <= len(have) < ANSWERS_MAX + SHARD_ANSWERS
    assert answers.get(request(count - 1)) == b"%d" % (count - 1) and len(answers.shards()) <= 17


def test_large_ones_are_bounded_by_their_bytes_and_the_newest_is_kept_whatever_it_is() -> None:
    answers, reply = Answers(), bytes(64 << 10)
    for number in range(200):
        answers.put(request(number), reply)
    size = sum(map(len, answers.shards().values()))
    assert BYTES_MAX <= size < BYTES_MAX + 2 * len(reply)
    huge = bytes(3 * BYTES_MAX)
    answers.put(request(200), huge)
    assert answers.get(request(200)) == huge
    answers.put(request(201), b"x")
    assert kept(answers, 202) == [200, 201]


def test_a_snapshot_writes_the_newest_shard_alone() -> None:
    answers = Answers()
    for number in range(900):
        answers.put(request(number), b"x" * 40)
    before = answers.shards()
    answers.put(request(900), b"y")
    after = answers.shards()
    changed = [name for name in after if after[name] is not before.get(name)]
    assert len(changed) == 1 and len(after[changed[0]]) < 2 * SHARD_BYTES
    assert answers.shards() == after


def test_a_restored_copy_goes_on_like_the_one_it_is_of() -> None:
    draw, answers = random.Random(1), Answers()
    copy = Answers()
    for number in range(4000):
        reply = bytes(draw.choice((1, 10, 500, 9000, 64 << 10)))
        answers.put(request(number), reply)
        copy.put(request(number), reply)
        if draw.random() < 0.02:
            copy = Answers(dict(sorted(copy.shards().items(), key=lambda row: draw.random())))
    assert copy.shards() == answers.shards() and kept(copy, 4000) == kept(answers, 4000)
