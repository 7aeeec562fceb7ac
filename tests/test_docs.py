"""Documentation that is wrong fails here: code blocks, commands and their options, make targets, links, named files.

A fence marked ``python tested`` is a whole program and runs in an empty directory, one marked ``python network`` as
well, beside a node whose address takes the place of 127.0.0.1:7001. There is no other, but on pages that another test
runs: what is only compiled may lack an import, or stand outside a function. (docs/config.md is compared with the code
in tests/service/test_config.py.)
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from logyard.service.cli.etcd import EtcdCommand
from logyard.service.local_cluster import LocalCluster

from .source_tree import PACKAGES, ROOT

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_FILE = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs)/[\w/.-]+\.\w+)`")


class Block(NamedTuple):
    """One fenced block: where it stands, its language and the rest of its first line."""

    page: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> Iterator[Block]:
    for page in pages():
        text = page.read_text("utf-8")
        for match in FENCE.finditer(text):
            language, *marks = match[1].split() or [""]
            line = text.count("\n", 0, match.start()) + 1
            yield Block(str(page.relative_to(ROOT)), line, language, tuple(marks), match[2])


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


PYTHON = [block for block in blocks() if block.language == "python"]
TESTED = [block for block in PYTHON if "tested" in block.marks]
NETWORK = [block for block in PYTHON if "network" in block.marks]
RUN_ELSEWHERE = {"docs/guides/spark.md": "tests/pipeline/test_guide.py"}


def test_the_readme_has_a_tested_example() -> None:
    assert any(block.page == "README.md" for block in TESTED)


@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_python_blocks_are_python(block: Block) -> None:
    compile(block.text, named(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_python_block_runs() -> None:
    left = [block for block in PYTHON if block.page not in RUN_ELSEWHERE and not {"tested", "network"} & {*block.marks}]
    assert not left, [named(block) for block in left]
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text("utf-8")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node of its own for the blocks that ask one."""
    with LocalCluster(tmp_path_factory.mktemp("docs"), 1) as cluster:
        cluster.start()
        yield cluster.addresses[0]


@pytest.mark.parametrize("block", NETWORK, ids=named)
def test_blocks_that_ask_a_node_run(block: Block, address: str, tmp_path: Path) -> None:
    assert "127.0.0.1:7001" in block.text
    ran(block, block.text.replace("127.0.0.1:7001", address), tmp_path)


@pytest.mark.parametrize("block", TESTED, ids=named)
def test_marked_blocks_run(block: Block, tmp_path: Path) -> None:
    for name in block.marks[1:]:
        # The page's first program, as the module that the others import.
        (first,) = [one for one in TESTED if one.page == block.page and one.marks == ("tested",)][:1]
        (tmp_path / f"{name}.py").write_text(first.text, "utf-8")
    # Whoever reads the first page tries it more than once, on what the first run left.
    for _ in range(2 if block.page == "README.md" else 1):
        ran(block, block.text, tmp_path)


def ran(block: Block, text: str, where: Path) -> None:
    """Run a block as a file, as a reader would have it: what starts processes of its own finds the program again."""
    (where / "example.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}", "utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=where, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{named(block)}\n{done.stdout}\n{done.stderr}"


def cli() -> click.Command:
    from logyard.service.cli.root import cli as root

    assert isinstance(root, click.Command)
    return root


def commands(command: click.Command, path: tuple[str, ...] = ("logyard",)) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))
    else:
        yield path


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    missing = [" ".join(path) for path in commands(cli()) if not re.search(rf"{' '.join(path)}\b", text)]
    assert not missing, f"docs/cli.md does not have {missing}"


def unknown_words(line: str, root: click.Command) -> list[str]:
    """The words of a `logyard ...` command line that are no command and no option of it."""
    words = shlex.split(line, comments=True)[1:]
    command, path = root, ["logyard"]
    unknown = []
    for word in words:
        if isinstance(command, click.Group) and not word.startswith("-"):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return [f"{' '.join(path)} has no command {word}"]
            command = found
            path.append(word)
        elif word in ("|", ">", "<", "&&", "&"):
            break
        elif word.startswith("--"):
            options = {
                option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]
            }
            if isinstance(command, EtcdCommand):
                options |= command.options
            if word.split("=")[0] not in options | {"--help"}:
                unknown.append(f"{' '.join(path)} has no option {word}")
    return unknown


def test_every_command_line_in_the_docs_exists() -> None:
    wrong, seen = [], 0
    for block in blocks():
        if block.language in ("sh", "bash", "console", "shell"):
            for line in block.text.replace("\\\n", " ").splitlines():
                line = line.removeprefix("$ ").strip()
                if line.startswith("logyard "):
                    seen += 1
                    wrong += [f"{named(block)}: {problem}" for problem in unknown_words(line, cli())]
    assert not wrong, "\n" + "\n".join(wrong)
    assert seen


def test_a_wrong_command_line_is_noticed() -> None:
    @click.group()
    def root() -> None: ...

    @root.command()
    @click.option("--json")
    def status(json: str) -> None: ...

    assert unknown_words("logyard status --json # fine", root) == []
    assert unknown_words("logyard stauts", root) == ["logyard has no command stauts"]
    assert unknown_words("logyard status --yaml", root) == ["logyard status has no option --yaml"]
    assert unknown_words("logyard etcd --name=a", cli()) == []
    assert unknown_words("logyard etcd --nane a", cli()) == ["logyard etcd has no option --nane"]


def test_every_make_target_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in pages():
        for target in re.findall(r"`make ([a-z-]+)", page.read_text("utf-8")):
            assert target in targets, f"{page.name}: make {target}"
    for block in blocks():
        for target in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE) if block.language == "sh" else ():
            assert target in targets, f"{named(block)}: make {target}"


def shown_by() -> Iterator[tuple[str, str, list[str]]]:
    """The rows of docs/status.md: a capability, its state, and what shows it."""
    for line in (ROOT / "docs" / "status.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("capability", "---"):
            named = re.findall(r"`([^`]+)`|\]\(([^)]+)\)", cells[2])
            yield cells[0], cells[1], [code or f"docs/{link}" for code, link in named]


def problem_of(named: str) -> str:
    """What is wrong with a command, test, module or page that the status names; nothing where it is there."""
    if named.startswith("logyard "):
        return "; ".join(unknown_words(named, cli()))
    if named.startswith("make "):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return "" if named.split()[1] in targets else "no such target"
    if named.startswith("pytest "):
        return ""
    path = ROOT / (named if "/" in named else named.replace(".", "/"))
    there = path.exists() and (path.is_file() or "/" in named or (path / "__main__.py").exists())
    return "" if there or path.with_suffix(".py").exists() else "not there"


def test_what_the_status_names_exists() -> None:
    rows = list(shown_by())
    wrong = [f"{row}: {name}: {problem}" for row, _, names in rows for name in names if (problem := problem_of(name))]
    assert not wrong, "\n" + "\n".join(wrong)
    for row, state, names in rows:
        assert re.split("[;: ]", state)[0] in ("works", "partly", "missing"), row
        assert names or state == "missing", f"{row}: what shows it?"
    assert len(rows) > 40


@pytest.mark.parametrize("named", ["logyard stauts", "make tset", "tests/absent", "tests.absent", "docs/absent.md"])
def test_what_is_not_there_is_noticed_in_the_status(named: str) -> None:
    assert problem_of(named)


def test_no_page_speaks_of_plans_that_do_not_ship() -> None:
    words = re.compile(r"design group|\b(?:first|second|third|fourth|fifth|sixth|seventh) issue|\bissues? \d", re.I)
    found = [f"{page.name}: {match[0]}" for page in pages() for match in words.finditer(page.read_text("utf-8"))]
    assert not found, found


def test_links_lead_somewhere() -> None:
    dead = []
    for page in pages():
        for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
            if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.split("#")[0]).exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead, "\n" + "\n".join(dead)


def test_named_files_exist() -> None:
    absent = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        if page.name != "CHANGELOG.md"
        for name in NAMED_FILE.findall(page.read_text("utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not absent, "\n" + "\n".join(absent)


def test_named_tests_exist() -> None:
    absent, seen = [], 0
    for page in pages():
        for file, name in NAMED_TEST.findall(page.read_text("utf-8")):
            seen += 1
            path = ROOT / file
            if not path.exists() or not re.search(rf"^(?:async )?def {name}\(", path.read_text("utf-8"), re.MULTILINE):
                absent.append(f"{page.relative_to(ROOT)}: {file}::{name}")
    assert not absent, "\n" + "\n".join(absent)
    assert seen
