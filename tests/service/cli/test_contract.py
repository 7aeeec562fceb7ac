"""The command line's contract: help with an example for every verb, exit codes, one JSON object, no traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from logyard.pipeline.directory.places import data_directories
from logyard.protocol.errors import NoSpace
from logyard.service.cli.cluster import newest
from logyard.service.cli.root import SUBJECTS, cli
from logyard.service.local_cluster import ClusterFailed, LocalCluster, free_ports

FLAGS = Path(__file__).with_name("flags.json")
VERBS = {
    "serve", "up", "demo", "check", "bench", "create", "list", "describe", "delete", "append", "read", "snapshot",
    "retain", "truncate", "compact", "scrub", "members", "transfer", "status", "leaders", "drain",
    "campaign", "command", "query", "force-shrink", "forget", "readmit", "skip", "forks", "tls", "spark", "kv",
    "queue", "etcd", "topic", "consume", "groups", "nodes", "plan", "cluster",
}  # fmt: skip


def every_command(command: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from every_command(each, (*path, name))


def run(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, list(words), input=text)


def test_every_verb_is_there() -> None:
    assert set(cli.commands) == VERBS
    assert {path[1] for path in every_command() if path[0] == "bench" and len(path) == 2} == {
        "append", "catchup", "churn", "cluster", "compare", "failover", "groups", "huge", "idle", "kv", "mixed",
        "queue", "recover", "replace", "replay", "run", "spark",
    }  # fmt: skip


def test_every_verb_stands_under_one_subject() -> None:
    listed = [name for names in SUBJECTS.values() for name in names]
    assert sorted(listed) == sorted(VERBS)
    shown = run("--help").stdout
    assert all(f"\n{title}:\n" in shown for title in SUBJECTS) and "\nCommands:" not in shown


def flags_of(path: tuple[str, ...]) -> set[str]:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return {
        option
        for parameter in command.params
        for option in (parameter.opts if isinstance(parameter, click.Option) else [f"<{parameter.name}>"])
    }


def test_no_flag_is_renamed_or_taken_away() -> None:
    """flags.json is what users wrote into their scripts: add to it, take nothing out."""
    kept = json.loads(FLAGS.read_text())
    found = {" ".join(path): flags_of(path) for path in every_command()}
    assert {verb: gone for verb, flags in kept.items() if (gone := sorted(set(flags) - found.get(verb, set())))} == {}
    assert set(found) <= set(kept), "a new verb: write its flags into flags.json"


@pytest.mark.parametrize("path", sorted(every_command()), ids=" ".join)
def test_every_verb_has_help_with_an_example(path: tuple[str, ...]) -> None:
    found = run(*path, "--help")
    assert found.exit_code == 0
    assert "Example" in found.stdout
    assert f"logyard {' '.join(path)}" in found.stdout


@pytest.mark.parametrize("path", sorted(every_command()), ids=" ".join)
def test_every_verb_but_servers_speaks_json(path: tuple[str, ...]) -> None:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    # A group of verbs does nothing itself; servers only say when they are ready.
    assert ("--json" in options) == (path not in (("serve",), ("etcd",)) and not isinstance(command, click.Group))


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["create"],
        ["create", "a", "--members", "one"],
        ["list", "--servers", "nowhere"],
        ["read", "a", "--follow", "--json"],
        ["read", "a", "--raw", "--json"],
        ["members", "a", "--add", "1", "--remove", "2"],
        ["truncate", "a"],
        ["up"],
        ["serve"],
        ["check", "/no/such/directory"],
        ["bench", "append", "--size", "1"],
        ["demo", "--logs", "0"],
        ["demo", "--source", "/no/such/directory"],
        ["demo", "--cluster", "--logs", "5"],
        ["bench", "cluster", "--nodes", "3"],
        ["create", "\udcff"],
        ["append", "a", "--metadata", "\udcff"],
        ["list", "--servers", "127.0.0.1:\u00b2"],
        ["read", "a", "--since", "\u00b2"],
        ["kv", "get", "a", "b", "--revision", f"{1 << 64}"],
        ["kv", "lease", "grant", "a", "nan"],
        ["queue", "create", "a", "--ttl", "inf"],
        ["queue", "consume", "a", "--wait", "nan"],
        ["topic", "create", "a", "--partitions", f"{10**22}"],
        ["topic", "send", "a", "--separator", ""],
        ["tls", "init", "certificates", "--nodes", "-1"],
        ["create", "a", "--arg", "limit=NaN"],
        ["create", "a", "--arg", f'limit={{"most": [{10**22}]}}'],
        ["create", "a", "--arg", f"limit={'[' * 100_000}"],
        ["list", "--servers", f"127.0.0.1:{'7' * 5000}"],
        ["read", "a", "--since", "7" * 5000],
        ["retain", "a", "--age", f"{'7' * 5000}s"],
        ["retain", "a", "--bytes", "7" * 5000],
    ],
    ids=lambda words: ascii(" ".join(words))[:60],
)
def test_bad_usage_is_exit_2_and_says_why(words: list[str]) -> None:
    found = run(*words)
    assert found.exit_code == 2
    assert "Error: " in found.stderr
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"success": [["put", "a", "1"]]}', "unknown key 'success'"),
        ('{"compare": [], "thn": []}', "unknown key 'thn'"),
        ("[]", "[] is no object"),
        ('"put"', '"put" is no object'),
        ('{"then": null}', "then is no list: null"),
        ('{"then": {"put": 1}}', "then is no list"),
        ('{"compare": [["a", "version", "="]]}', "['a', 'version', '='] is not [key,"),
        ('{"compare": [["a", "value", "=", 1]]}', "['a', 'value', '=', 1] is not [key,"),
        ('{"compare": [7]}', "7 is not [key,"),
        ('{"else": [["put", "a"]]}', "['put', 'a'] is not ["),
        ("{", "standard input is no transaction"),
        ("[" * 100_000, "recursion"),
        ('{"then": [["get", "\\ud800"]]}', "surrogates not allowed"),
    ],
)
def test_what_is_no_transaction_is_bad_usage_in_words(text: str, why: str) -> None:
    """Before anything is sent: there is no server."""
    found = run("kv", "txn", "settings", "--json", "--servers", "127.0.0.1:1", "--timeout", "0.5", text=text)
    assert found.exit_code == 2
    message = json.loads(found.stdout)["error"]["message"]
    assert message.startswith("standard input is no transaction: ") and why in message
    assert "object has no" not in message and "unpack" not in message
    if "unknown key" in why or "no object" in why:
        assert "compare, then, else" in message


def test_a_demo_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    found = run("demo", "--dir", str(tmp_path))
    assert found.exit_code == 2
    assert "not empty" in found.stderr


def test_a_bench_directory_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.bench.calibrate.filesystem_of", lambda path: "tmpfs")
    found = run("bench", "append", "--dir", str(tmp_path), "--json")
    assert found.exit_code == 2
    assert "in memory" in found.stderr
    assert "--volatile" in found.stderr


def closed_port() -> int:
    (port,) = free_ports(1)
    return port


def test_no_server_is_one_line_and_exit_1() -> None:
    found = run("list", "--servers", f"127.0.0.1:{closed_port()}", "--timeout", "0.5", "--json")
    assert found.exit_code == 1
    fields = json.loads(found.stdout.splitlines()[-1])
    assert fields["ok"] is False
    assert fields["error"]["code"]
    assert len(found.stderr.strip().splitlines()) == 1
    assert found.stderr.startswith("error: ")


class Filling:
    """A yard whose first batch has room, and no other."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.sent = 0

    def log(self, name: str) -> Filling:
        return self

    queue = topic = log

    def send_many(self, records: Sequence[object], **options: object) -> range:
        if self.sent:
            raise self.error
        self.sent = len(records)
        return range(7, 7 + self.sent)

    append_many = publish_many = send_many


@pytest.mark.parametrize(
    ("words", "fields", "said"),
    [
        (
            ["append", "orders"],
            {"log": "orders", "records": 512, "payload_bytes": 1024, "first": 7, "last": 518},
            "512 records before it are stored, at offsets 7 to 518",
        ),
        (
            ["queue", "publish", "orders"],
            {"queue": "orders", "messages": 512, "first": 7, "last": 518},
            "512 messages before it are published, with ids 7 to 518",
        ),
        (["topic", "send", "orders"], {"topic": "orders", "records": 512}, "512 records before it are sent"),
    ],
    ids=["append", "publish", "send"],
)
def test_what_was_done_before_an_error_is_said_beside_it(
    words: list[str], fields: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(error: BaseException, *more: str) -> Result:
        for module in ("logs", "queue", "topic"):
            monkeypatch.setattr(f"logyard.service.cli.{module}.opened", lambda servers: nullcontext(Filling(error)))
        return run(*words, *more, text="xx\n" * 600)

    found = tried(NoSpace("the disk is full"), "--json")
    error = {"code": "no_space", "message": "the disk is full"}
    assert found.exit_code == 1 and json.loads(found.stdout) == {"ok": False, "error": error, **fields}
    assert tried(NoSpace("the disk is full")).stderr == f"error: the disk is full; {said}\n"
    found = tried(KeyboardInterrupt(), "--json")
    shown = json.loads(found.stdout.splitlines()[-1])
    assert shown.pop("error")["code"] == "interrupted" and shown == {"ok": False, **fields}
    for ends in (KeyboardInterrupt(), click.UsageError("a record with --key has up to 1 MiB")):
        assert said in tried(ends).stderr


def test_a_line_without_a_key_says_what_was_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Filling(NoSpace("the disk is full"))
    monkeypatch.setattr("logyard.service.cli.topic.opened", lambda servers: nullcontext(yard))
    found = run("topic", "send", "orders", "--separator", ":", "--json", text="a:b\nc:d\ne\n")
    fields = json.loads(found.stdout)
    assert found.exit_code == 2 and "the 2 lines before it are sent" in fields["error"]["message"]
    assert (fields["ok"], fields["topic"], fields["records"]) == (False, "orders", 2)


def test_an_error_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGYARD_DEBUG", raising=False)
    monkeypatch.setattr("logyard.service.cli.logs.opened", lambda servers: 1 / 0)
    found = run("list")
    assert found.exit_code == 1
    assert "internal error: ZeroDivisionError" in found.stderr
    assert "Traceback" not in found.output


def test_a_bad_configuration_is_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[node]\nid = 1\ndirectory = "data"\nclient_lissten = "127.0.0.1:1"\n')
    done = subprocess.run(
        [sys.executable, "-m", "logyard.service.cli", "serve", "--config", str(path)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "client_listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_starts_without_the_engine() -> None:
    code = (
        "import sys, logyard.service.cli\n"
        "bad = {'trio', 'lmdb', 'rich', 'logyard.engine', 'logyard.client'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_check_finds_the_directories_of_a_cluster(tmp_path: Path) -> None:
    assert data_directories(tmp_path) == [tmp_path]
    for name in ("10", "2", "2.bak", "old"):
        (tmp_path / f"node-{name}").mkdir()
        (tmp_path / f"node-{name}" / "node.toml").touch()
    assert data_directories(tmp_path) == [tmp_path / "node-2" / "data", tmp_path / "node-10" / "data"]
    assert data_directories(tmp_path / "node-2") == [tmp_path / "node-2" / "data"]


def test_the_newest_copy_is_the_one_that_an_election_would_choose() -> None:
    """Node 4 has voted for a leader that it has nothing of: what was committed with node 3 is on node 3 alone."""
    copies: dict[int, dict[str, object]] = {
        3: {"state": "running", "term": 5, "last_term": 5, "last": 100},
        4: {"state": "running", "term": 6, "last_term": 4, "last": 90},
        5: {"state": "running", "term": 5, "last_term": 5, "last": 99},
        6: {"state": "stopped", "term": 9, "last_term": 9, "last": 200},
    }
    assert newest(copies) == 3
    # Of a release that does not say the last one, the term is all there is.
    assert newest({node: {**copies[node], "last_term": copies[node]["term"]} for node in (3, 5)}) == 3
    assert newest({6: copies[6]}) == 6


def test_a_cluster_keeps_its_ports_and_refuses_another_size(tmp_path: Path) -> None:
    first = LocalCluster(tmp_path, 3)
    first.prepare()
    again = LocalCluster(tmp_path, 3)
    again.prepare()
    assert again.addresses == first.addresses
    assert len(set(first.addresses)) == 3
    for count in (2, 4):
        with pytest.raises(ClusterFailed, match="another size"):
            LocalCluster(tmp_path, count).prepare()


def test_written_configurations_are_ones_that_serve_accepts(tmp_path: Path) -> None:
    from logyard.service.config import load_config

    strange = tmp_path / 'with "quotes" and \\'
    cluster = LocalCluster(strange, 2, limits={"tick_ms": 20, "wal_file_bytes": "8 MiB"})
    cluster.prepare()
    config = load_config(cluster.nodes[2].config_path, {})
    assert config.id == 2
    assert config.directory == strange / "node-2" / "data"
    assert config.limits.tick_ms == 20
    assert config.limits.wal_file_bytes == 8 << 20
    host, port = config.clients[1]
    assert f"{host}:{port}" == cluster.addresses[0]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterFailed, match=f"port {port} is in use"):
            LocalCluster(tmp_path, 1, first_port=port).prepare()


def test_a_node_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 1) as cluster:
        cluster.prepare()
        cluster.nodes[1].config_path.write_text("[node]\nid = 1\n")
        cluster.nodes[1].process = None
        with pytest.raises(ClusterFailed, match=r"ended with code 2 at start:\n.*directory"):
            cluster.start()
        assert cluster.nodes[1].process is None
