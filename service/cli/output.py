"""How a command speaks: one JSON object as the last line of standard output with --json, tables and text without.

With --json everything but that object goes to standard error. Exit 0 good, 1 a check or the work failed, 2 bad usage;
an error is one clear line, never a traceback (LOGYARD_DEBUG=1 shows it). Used by every verb of `service.cli.root`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])
EXIT_FAILED = 1
EXIT_USAGE = 2
JSON_WANTED = "logyard.json"
DONE = "logyard.done"
"""What `Output.did` was told last: fields and text."""
SHOWN = 40
"""Characters of a number that is too long."""
SHORT_HELP = 100
"""Characters of a verb's line in the list: its first sentence, on two lines if need be."""


def failure(code: str, message: str) -> dict[str, object]:
    """Return what --json prints for an error."""
    return {"ok": False, "error": {"code": code, "message": message}}


INTERRUPTED = failure("interrupted", "interrupted before it was done")


class Terminated(SystemExit):
    """SIGTERM came; the code is the process's."""


class Rows:
    """Rows under one key of a command's JSON object, printed while they come, what else it says behind them. `fail`
    completes it with an error, so that what was printed is not lost with what failed later."""

    __slots__ = ("_before", "_begun", "_half", "_ended")

    def __init__(self, key: str, fields: Mapping[str, object]) -> None:
        self._before = f"{_text(fields)[:-1]}, {_text(key)}: ["
        self._begun = self._half = self._ended = False

    def write(self, row: Mapping[str, object]) -> None:
        """Print a row: it has left this process when this returns."""
        text = self._before + _text(row)
        self._begun = self._half = True
        click.echo(text, nl=False)
        self._before, self._half = ", ", False

    def end(self, fields: Mapping[str, object]) -> None:
        """Print the rest of the object."""
        self._ended = True
        click.echo(f"{'' if self._begun else self._before}], {_text(fields)[1:]}")

    def fail(self, error: BaseException) -> bool:
        """Print the rest of the object: why there is no more. Return False where the error is to be printed as an
        object of its own: nothing is printed yet, or half a row, whose line ends."""
        if self._half:
            click.echo()
        elif self._begun and not self._ended:
            self.end(failure_of(error))
        return self._ended


class Output:
    """Where a command's words go. `json_wanted` is the --json flag."""

    __slots__ = ("json_wanted",)

    def __init__(self, json_wanted: bool) -> None:
        self.json_wanted = json_wanted

    @property
    def console(self) -> Console:
        """A rich console on standard error with --json, on standard output otherwise."""
        from rich.console import Console

        return Console(stderr=self.json_wanted, highlight=False)

    def did(self, fields: Mapping[str, object], text: str) -> None:
        """Keep what is done so far: it is said beside the error, if one follows."""
        click.get_current_context().meta[DONE] = fields, text

    def say(self, text: str) -> None:
        """Print one line for a human."""
        click.echo(text, err=self.json_wanted)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table for a human; nothing with --json, whose object says the same."""
        if self.json_wanted:
            return
        from rich.markup import escape
        from rich.table import Table

        shown = Table(*columns, title=title, title_justify="left")
        for row in rows:
            shown.add_row(*(escape(str(cell)) for cell in row))
        self.console.print(shown)

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar for a human on a terminal; the block calls what it gets with each advance. Nothing elsewhere."""
        console = self.console
        if not console.is_terminal:
            yield lambda count: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task(what, total=total)
            yield lambda count: shown.advance(task, count)

    @contextlib.contextmanager
    def rows(self, key: str, **fields: object) -> Iterator[Rows]:
        """Open the JSON object with these fields and a list of rows, for as long as the block lasts. `result` ends it;
        what the block raises does so as well."""
        found = Rows(key, fields)
        try:
            yield found
        except BaseException as error:
            if found.fail(leaf_of(error)):
                # Not once more.
                click.get_current_context().meta[JSON_WANTED] = False
            raise

    def result(
        self,
        fields: Mapping[str, object],
        text: str | None = None,
        error: str | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Print the outcome: the JSON object, or its end behind `rows`; else `text`. Leaves the command with exit 1 if
        `fields["ok"]` is false; the object then has an error: what `fields` has, or one with `error`, else `text`, for
        its message."""
        good = fields.get("ok", True)
        if self.json_wanted:
            added = {} if good else failure("failed", error or text or "not everything is well: see the other keys")
            said = {**added, **fields}
            if rows is not None:
                rows.end(said)
            else:
                click.echo(_text(said))
        elif text:
            click.echo(text)
        if not good:
            raise click.exceptions.Exit(EXIT_FAILED)


def _text(value: object) -> str:
    return json.dumps(value, default=plain)


def plain(value: object) -> object:
    """Return what JSON cannot say by itself: bytes as text or hex, sets and tuples as lists, paths as text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return text_or_hex(bytes(value))
    if isinstance(value, (set, frozenset, tuple, range)):
        return list(value)
    return str(value)


def text_or_hex(data: bytes) -> str:
    """Return UTF-8 text where it is text, hexadecimal otherwise."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def json_option(command: F) -> F:
    """Add --json; the command receives an `output: Output`, and values that are fit for what is beneath: text is UTF-8,
    numbers have 64 bits and an end; others are bad usage."""

    def convert(context: click.Context, _parameter: click.Parameter, value: bool) -> Output:
        context.meta[JSON_WANTED] = value
        return Output(value)

    @functools.wraps(command)
    def checked(**values: Any) -> Any:
        for name, value in values.items():
            if why := _unfit(value):
                context = click.get_current_context()
                named = next((each for each in context.command.params if each.name == name), None)
                raise click.BadParameter(why, context, named)
        return command(**values)

    return click.option(
        "--json", "output", is_flag=True, callback=convert, help="Print one JSON object, the last line of output."
    )(cast("F", checked))


def _unfit(value: object) -> str:
    """Return why no command can take a value; "" if one may."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{os.fsencode(value)!r} is not UTF-8"
    elif isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is no number that can be counted to"
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return f"{str(value)[:SHOWN]} has more than 64 bits"
    elif isinstance(value, dict):
        return _unfit([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        return next(filter(None, map(_unfit, value)), "")
    return ""


def leaf_of(error: BaseException) -> BaseException:
    """Return the first plain exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Verbs(click.Group):
    """A group of commands that turns every error into one line and an exit code. `subjects`: the titles that its help
    lists them under, with their names in order; without any they stand in one list."""

    subjects: Mapping[str, Sequence[str]] = {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by subject."""
        if not self.subjects:
            super().format_commands(ctx, formatter)
            return
        width = max(map(len, self.commands))
        for title, names in self.subjects.items():
            with formatter.section(title):
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(SHORT_HELP)) for name in names]
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether JSON is wanted before the command's own options are parsed, for that may fail."""
        ctx.meta[JSON_WANTED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command; see the module docstring for what becomes of its errors."""
        try:
            return super().invoke(ctx)
        except BaseException as error:
            found = leaf_of(error)
            # `meta` is one mapping for all nested contexts: the sub-command's own context is gone by now.
            fields, text = ctx.meta.get(DONE, ({}, ""))
            if ctx.meta.get(JSON_WANTED):
                if isinstance(found, click.ClickException):
                    click.echo(_text({**failure("bad_request", found.format_message()), **fields}))
                elif isinstance(found, (KeyboardInterrupt, Terminated, click.Abort)):
                    click.echo(_text({**INTERRUPTED, **fields}))
            elif text and isinstance(found, (click.ClickException, KeyboardInterrupt, Terminated, click.Abort)):
                click.echo(text, err=True)
            if isinstance(found, (click.ClickException, click.exceptions.Exit, click.Abort)):
                raise found from None
            if isinstance(found, (KeyboardInterrupt, GeneratorExit)):
                raise click.Abort from None
            if isinstance(found, SystemExit) or os.environ.get("LOGYARD_DEBUG"):
                raise
            raise click.exceptions.Exit(report(found, bool(ctx.meta.get(JSON_WANTED)), fields, text)) from None


def told(error: BaseException) -> tuple[str, str]:
    """Return the code and the message of an error."""
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return code, str(error)
    if isinstance(error, OSError):
        return "os", f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if type(error).__module__.startswith("logyard."):
        return "failed", str(error)
    return "internal", f"internal error: {type(error).__name__}: {error} (LOGYARD_DEBUG=1 shows where)"


def failure_of(error: BaseException) -> dict[str, object]:
    """Return what --json prints for whatever a command raised."""
    if isinstance(error, click.ClickException):
        return failure("bad_request", error.format_message())
    if isinstance(error, click.Abort) or not isinstance(error, Exception):
        return INTERRUPTED
    return failure(*told(error))


def report(error: BaseException, json_wanted: bool, fields: Mapping[str, object], text: str) -> int:
    """Print the one line (and the JSON object), with what was done before; return the exit code."""
    code, message = told(error)
    click.echo(f"error: {message}; {text}" if text else f"error: {message}", err=True)
    if json_wanted:
        click.echo(_text({**failure(code, message), **fields}))
    return EXIT_USAGE if code == "bad_request" else EXIT_FAILED


def bytes_text(count: float) -> str:
    """Return a byte count for a human, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
