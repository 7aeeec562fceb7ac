"""What --json prints, whatever becomes of a command: one object, with the rows that were printed before it failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner

from logyard.protocol.errors import NotLeader
from logyard.service.cli.output import Output, Rows, Terminated, Verbs, json_option


def run(work: Callable[[Output, Rows], object], *flags: str) -> tuple[int, str]:
    """(exit code, standard output) of a command that prints rows."""

    @click.group(cls=Verbs)
    def program() -> None:
        """Do something."""

    @program.command()
    @json_option
    def show(output: Output) -> None:
        """Show rows."""
        with output.rows("found", of="this") as rows:
            work(output, rows)

    done = CliRunner().invoke(program, ["show", *flags])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("good", [True, False])
def test_rows_and_what_is_behind_them_are_one_object(count: int, good: bool) -> None:
    def work(output: Output, rows: Rows) -> None:
        for number in range(count):
            rows.write({"number": number, "raw": b"\xff"})
        output.result({"ok": good, "count": count}, rows=rows)

    code, text = run(work, "--json")
    found = json.loads(text)
    assert (code, found["ok"], found["count"], found["of"]) == (1 - good, good, count, "this")
    assert found["found"] == [{"number": number, "raw": "ff"} for number in range(count)]
    assert ("error" in found) is not good and text.count("\n") == 1


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize(
    "error, code",
    [
        (NotLeader.told("a test"), "not_leader"), (KeyboardInterrupt(), "interrupted"), (Terminated(9), "interrupted"),
        (click.ClickException("a test"), "bad_request"), (OSError("a test"), "os"), (KeyError("x"), "internal"),
    ],
)  # fmt: skip
def test_what_fails_ends_the_object_and_leaves_the_rows(count: int, error: BaseException, code: str) -> None:
    def work(output: Output, rows: Rows) -> None:
        for number in range(count):
            rows.write({"number": number})
        raise error

    status, text = run(work, "--json")
    found = json.loads(text)
    assert status and found["ok"] is False and found["error"]["code"] == code
    assert len(found.get("found", [])) == count
    assert run(work)[0] == status


def test_half_a_row_is_left_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = click.echo

    def cut(text: Any = None, **how: Any) -> None:
        if "22" in str(text):
            plain(str(text)[:9], nl=False)
            raise KeyboardInterrupt
        plain(text, **how)

    def work(output: Output, rows: Rows) -> None:
        for number in (11, 22):
            rows.write({"number": number})

    with monkeypatch.context() as patch:
        patch.setattr(click, "echo", cut)
        _, text = run(work, "--json")
    first, last = text.splitlines()
    assert '"number": 11' in first and json.loads(last)["error"]["code"] == "interrupted"
