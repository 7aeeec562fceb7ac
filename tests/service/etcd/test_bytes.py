"""A conversation with the gateway, byte by byte, over raw connections: the file says what goes and what comes.

`python -m tests.service.etcd.test_bytes` writes the answers anew, from what is asked; look at the difference then. Only
the date is not compared.
"""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

from .server import WAIT_S, EtcdServer, etcd_server

FILE = Path(__file__).with_name("conversation.txt")
DATE = re.compile(rb"date: [^\r]{29}\r\n")
SILENCE_S = 0.5
FLAGS = ("--initial-cluster-token=etcd-cluster", "--host-whitelist=etcd")
"""Without a token each cluster has a number of its own; the file names a host."""


class Exchange(NamedTuple):
    """`connection`: its name; exchanges of one name share it. What is asked may be nothing: more is heard."""

    connection: str
    asked: bytes
    answer: bytes


def read() -> list[Exchange]:
    """The file: ``=> name``, the request; ``<=``, the answer. Its line ends are CR LF on the wire, but in bodies."""
    found = []
    for block in FILE.read_text().split("=> ")[1:]:
        name, _, rest = block.partition("\n")
        asked, _, answer = rest.partition("<=\n")
        found.append(Exchange(name, wire(asked), wire(answer)))
    return found


def wire(text: str) -> bytes:
    return text.encode().replace(b"\n", b"\r\n").replace(b"\\n\r\n", b"\n").replace(b"\\\r\n", b"")


def shown(found: bytes) -> str:
    """The opposite of `wire`."""
    lines = DATE.sub(b"date: DATE\r\n", found).split(b"\r\n")
    text = b"\n".join(line.replace(b"\n", b"\\n\n") for line in lines).decode()
    # A line feed of a message is followed by the end of its chunk.
    return text if text.endswith("\n") else text + "\\\n"


def heard(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or what there is when none come any more."""
    found = b""
    while len(DATE.sub(b"date: DATE\r\n", found)) < size:
        more = connection.recv(65_536)
        if not more:
            break
        found += more
    return found


def converse(server: EtcdServer, sizes: dict[int, int] | None) -> list[tuple[Exchange, bytes]]:
    """Every exchange and what was heard; without `sizes`: all that comes until there is silence."""
    found = []
    connections: dict[str, socket.socket] = {}
    try:
        for number, one in enumerate(read()):
            connection = connections.get(one.connection)
            if connection is None:
                connection = connections[one.connection] = socket.create_connection((server.host, server.port))
            connection.settimeout(WAIT_S if sizes is not None else SILENCE_S)
            if one.asked:
                connection.sendall(one.asked)
            answer = b""
            try:
                if sizes is not None:
                    answer = heard(connection, sizes[number])
                else:
                    while more := connection.recv(65_536):
                        answer += more
            except TimeoutError:
                assert sizes is None, one.asked
            found.append((one, answer))
    finally:
        for connection in connections.values():
            connection.close()
    return found


def test_every_byte_is_as_written(tmp_path: Path) -> None:
    expected = read()
    assert len(expected) > 10
    with etcd_server(tmp_path, *FLAGS) as server:
        sizes = {number: len(one.answer) for number, one in enumerate(expected)}
        for one, answer in converse(server, sizes):
            assert shown(answer) == shown(one.answer), one.asked.decode()


def test_the_file_is_read_as_it_is_written() -> None:
    for data in (b"a: b\r\n\r\n{}", b"3\r\n{}\n\r\n0\r\n\r\n", b"x\r\n"):
        assert wire(shown(data)) == data


def written(found: list[tuple[Exchange, bytes]]) -> str:
    """The file of a conversation."""
    return "".join(
        [f"=> {one.connection}\n{shown(one.asked) if one.asked else ''}<=\n{shown(answer)}" for one, answer in found]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, etcd_server(Path(directory), *FLAGS) as running:
        FILE.write_text(written(converse(running, None)))
