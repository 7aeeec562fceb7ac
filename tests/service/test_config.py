"""node.toml and the environment: what is read, what is refused, and that docs/config.md says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from logyard.protocol.errors import BadRequest
from logyard.service.config import config_reference, load_config, make_secret, read_secret

ROOT = Path(__file__).resolve().parents[2]

MINIMAL = """
[node]
id = 1
directory = "data"
"""

FULL = """
[node]
id = 2
name = "second"
cluster = "orders"
directory = "data"
client_listen = "127.0.0.1:7002"
peer_listen = "[::1]:7102"
peer_secret_file = "peer.secret"
[peers]
"1" = "127.0.0.1:7101"
"3" = "localhost:7103"
[clients]
"1" = "127.0.0.1:7001"
[limits]
wal_file_bytes = "16 MiB"
tick_ms = 20
"""


PEER_TLS = "\n[tls]\nca = 'ca.pem'\ncertificate = 'node.pem'\nkey = 'node-key.pem'\n"
CLIENT_TLS = PEER_TLS.replace("[tls]", "[client_tls]")
PEER = "\n[peers]\n2 = '127.0.0.1:7102'\n"


def write(directory: Path, text: str) -> Path:
    path = directory / "node.toml"
    path.write_text(text)
    return path


def test_a_minimal_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), {})
    assert (config.id, config.name, config.cluster, config.nodes) == (1, "node-1", "logyard", (1,))
    assert config.directory == tmp_path / "data"
    assert config.client_listen == ("127.0.0.1", 7001)
    assert config.client_addresses == {1: ("127.0.0.1", 7001)}


@pytest.mark.parametrize(
    ("text", "environment", "want"),
    [("", {}, True), ("writer_process = false", {}, False), ("", {"LOGYARD_NODE_WRITER_PROCESS": "false"}, False)],
)
def test_a_writer_process_unless_told_otherwise(
    tmp_path: Path, text: str, environment: dict[str, str], want: bool
) -> None:
    assert load_config(write(tmp_path, MINIMAL + text), environment).writer_process is want
    for wrong in ('"maybe"', "1", "[]"):
        with pytest.raises(BadRequest, match=r"node\.writer_process"):
            load_config(write(tmp_path, f"{MINIMAL}writer_process = {wrong}"), {})


def test_a_full_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, FULL), {"HOME": "elsewhere", "LOGYARD_SERVERS": "127.0.0.1:7001"})
    assert config.nodes == (1, 2, 3)
    assert config.peers == {1: ("127.0.0.1", 7101), 3: ("localhost", 7103)}
    assert config.peer_listen == ("::1", 7102)
    assert config.client_addresses == {1: ("127.0.0.1", 7001), 2: ("127.0.0.1", 7002)}
    assert config.limits.wal_file_bytes == 16 << 20
    assert config.limits.tick_ms == 20


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environ = {
        "LOGYARD_NODE_ID": "5",
        "LOGYARD_NODE_DIRECTORY": str(tmp_path / "elsewhere"),
        "LOGYARD_NODE_CLIENT_LISTEN": "127.0.0.1:0",
        "LOGYARD_PEERS_4": "127.0.0.1:7104",
        "LOGYARD_LIMITS_WAL_FILE_BYTES": "8 MiB",
        "LOGYARD_LIMITS_REWRITE_LIVE_RATIO": "0.25",
    }
    config = load_config(write(tmp_path, FULL), environ)
    assert config.nodes == (1, 3, 4, 5)
    assert config.directory == tmp_path / "elsewhere"
    assert config.client_listen == ("127.0.0.1", 0)
    assert (config.limits.wal_file_bytes, config.limits.rewrite_live_ratio, config.limits.tick_ms) == (
        8 << 20,
        0.25,
        20,
    )


def test_with_tls_any_address_will_do(tmp_path: Path) -> None:
    addresses = "client_listen = '0.0.0.0:7001'\npeer_listen = '10.0.0.1:7101'\n[peers]\n2 = 'two.example:7101'\n"
    addresses += "[clients]\n1 = 'one.example:7001'\n2 = '10.0.0.2:7001'\n"
    environ = {
        "LOGYARD_NODE_TLS_KEY": "/run/secrets/key.pem",
        "LOGYARD_CLIENT_TLS_CA": "clients.pem",
        # A client's own: no business of the node's.
        "LOGYARD_TLS_CA": "other.pem",
        "LOGYARD_TLS_CERT": "other.pem",
    }
    config = load_config(write(tmp_path, MINIMAL + addresses + PEER_TLS + CLIENT_TLS), environ)
    assert config.tls is not None and config.client_tls is not None
    assert config.tls.ca == tmp_path / "ca.pem" and config.tls.key == Path("/run/secrets/key.pem")
    assert config.client_tls.ca == tmp_path / "clients.pem" and config.client_tls.key == tmp_path / "node-key.pem"
    assert config.client_addresses == {1: ("one.example", 7001), 2: ("10.0.0.2", 7001)}
    assert config.peers == {2: ("two.example", 7101)}
    own = "client_address = '[fd00::1]:7001'\n" + addresses.replace("1 = 'one.example:7001'\n", "")
    config = load_config(write(tmp_path, MINIMAL + own + PEER_TLS + CLIENT_TLS), environ)
    assert config.client_addresses == {1: ("fd00::1", 7001), 2: ("10.0.0.2", 7001)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node]\nid = 1", "node.directory is missing: set it in [node] or as LOGYARD_NODE_DIRECTORY"),
        ("", "node.id is missing"),
        ("[nodes]\nid = 1", "unknown key [nodes]; did you mean [node]?"),
        ("node = 1", "node: must be a table"),
        (MINIMAL + "directry = 'x'", "unknown key directry in [node]; did you mean directory?"),
        (MINIMAL + "[limits]\ntick_m = 5", "unknown key tick_m; did you mean tick_ms?"),
        (MINIMAL + "[limits]\ntick_ms = 1", "tick_ms = 1: must be between 5 and 10000"),
        (MINIMAL + "[peers]\ntwo = '127.0.0.1:1'", "peers: 'two' is not a node's number"),
        (MINIMAL + "[peers]\n1 = '127.0.0.1:1'", "peers.1: node 1 is this node"),
        (MINIMAL + "[peers]\n0 = '127.0.0.1:1'", "peers.0: a node's number is between"),
        (MINIMAL + "[peers]\n2 = '127.0.0.1:0'", 'peers.2 = "127.0.0.1:0": a port is between'),
        (MINIMAL + "[peers]\n2 = '10.0.0.2:7102'", "peers.2: 10.0.0.2 is not a loopback address"),
        (MINIMAL + "[peers]\n2 = '127.0.0.1:7102'", 'Add peer_secret_file = "peer.secret" to [node] on every node'),
        (MINIMAL + "peer_secret_file = ''", 'node.peer_secret_file = "": must name a file'),
        (MINIMAL + "peer_secret = 'no'", 'node.peer_secret = "no": must be one of required, optional'),
        (MINIMAL + "[clients]\n2 = '127.0.0.1:7002'", "clients.2: there is no such peer"),
        (MINIMAL + "client_listen = '0.0.0.0:7001'", "node.client_listen: 0.0.0.0 is not a loopback address"),
        (MINIMAL + "peer_listen = 'example.org:7001'", "node.peer_listen: example.org is not a loopback address"),
        (MINIMAL + "peer_listen = '10.0.0.1:7101'", "that needs TLS: set ca, certificate and key in [tls]"),
        (MINIMAL + "client_listen = '10.0.0.1:7001'", "that needs TLS: set ca, certificate and key in [client_tls]"),
        (MINIMAL + "client_listen = '10.0.0.1:7001'" + PEER_TLS, "set ca, certificate and key in [client_tls]"),
        (MINIMAL + "[peers]\n2 = '10.0.0.2:7102'" + CLIENT_TLS, "set ca, certificate and key in [tls]"),
        (MINIMAL + "client_listen = '0.0.0.0:7001'" + CLIENT_TLS, "node.client_address is missing: say where clients"),
        (
            MINIMAL + "client_listen = '0.0.0.0:7001'\nclient_address = '0.0.0.0:7001'" + CLIENT_TLS,
            "node.client_address: say where clients find",
        ),
        (MINIMAL + "client_address = 'one.example:7001'", "node.client_address: one.example is not a loopback address"),
        (MINIMAL + "client_address = '127.0.0.1:0'", 'node.client_address = "127.0.0.1:0": a port is between'),
        (MINIMAL + "[tls]\nca = 'ca.pem'\nkey = 'k'", "tls.certificate is missing: ca, certificate"),
        (MINIMAL + "[client_tls]\ncertificat = 'x'", "unknown key certificat in [client_tls]; did you"),
        (MINIMAL + "[tls]\nca = 1", "tls.ca = 1: must name a file"),
        (MINIMAL + "client_listen = '7001'", 'node.client_listen = \'7001\': must be "host:port"'),
        (MINIMAL + "client_listen = '::1:7001'", "must be \"host:port\""),
        (MINIMAL + "client_listen = '127.0.0.1:70000'", "a port is between"),
        (MINIMAL + "peer_listen = '127.0.0.1:0'" + PEER, "node.peer_listen: port 0 is any free one"),
        (MINIMAL + "peer_listen = '127.0.0.1:0'\ncatalog = true", "node.peer_listen: port 0 is any free one"),
        (MINIMAL + "client_listen = '[::1]:0'\ncatalog = true", "node.client_listen: port 0 is any free one"),
        (MINIMAL + "client_listen = 7001", "node.client_listen = 7001: must be text"),
        (MINIMAL + "name = 'a b'", 'node.name = "a b": must be 1 to 128 letters'),
        (MINIMAL + "cluster = '../x'", "node.cluster = "),
        ("[node]\nid = 0\ndirectory = 'd'", "node.id = 0: must be between 1 and 4294967295"),
        ("[node]\nid = true\ndirectory = 'd'", "node.id: True is not a node's number"),
        ("[node]\nid = 1\ndirectory = ''", "must name a directory"),
        ("[node\n", "not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(BadRequest) as caught:
        load_config(path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("LOGYARD_LIMITS_TICK_MSS", "unknown key tick_mss; did you mean tick_ms?"),
        ("LOGYARD_NODE_IDENT", "unknown key ident in [node]"),
        ("LOGYARD_PEERS_X", "peers: 'x' is not a node's number"),
    ],
)
def test_wrong_variables_are_named(tmp_path: Path, variable: str, message: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        load_config(write(tmp_path, MINIMAL), {variable: "1"})


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="can't read the configuration: No such file"):
        load_config(tmp_path / "absent.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="not UTF-8 text"):
        load_config(tmp_path / "binary.toml", {})


def test_the_documented_example_loads(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", config_reference(), re.DOTALL)
    assert example is not None
    config = load_config(write(tmp_path, example[1]), {})
    assert config.nodes == (1, 2, 3)
    assert config.cluster == "orders"


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_reference(), (
        "run: python -m logyard.service.config > docs/config.md"
    )


@pytest.mark.parametrize(
    "text", ['[node]\nid = 1\ndirectory = "~nobody-of-that-name"\n', '[tls]\nca = "~nobody-of-that-name/x"\n']
)
def test_the_home_of_nobody_is_refused(tmp_path: Path, text: str) -> None:
    more = text if text.startswith("[node]") else MINIMAL + text + 'certificate = "c"\nkey = "k"\n'
    with pytest.raises(BadRequest, match=r"(node\.directory|tls\.ca) = '~nobody.*home"):
        load_config(write(tmp_path, more), {})


def test_the_secret_of_the_nodes_is_its_owners_alone(tmp_path: Path) -> None:
    secret = tmp_path / "peer.secret"
    config = load_config(write(tmp_path, FULL), {"LOGYARD_NODE_PEER_SECRET": "optional"})
    with pytest.raises(BadRequest, match="can't read"):
        read_secret(config)
    make_secret(secret)
    text = secret.read_bytes()
    make_secret(secret)
    assert secret.read_bytes() == text and len(text) == 65 and secret.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.toml", "peer.secret"]
    found = read_secret(config)
    assert found is not None and found.key == text.strip() and not found.required
    secret.chmod(0o640)
    with pytest.raises(BadRequest, match=f"others than its owner: chmod 600 {secret}"):
        read_secret(config)
    secret.chmod(0o600)
    for wrong in (b"", b"  fifteen bytes..", b"x" * 5000):
        secret.write_bytes(wrong)
        with pytest.raises(BadRequest, match="a secret has 16 at least"):
            read_secret(config)
    assert read_secret(load_config(write(tmp_path, FULL + PEER_TLS), {})) is None, "certificates prove more"
