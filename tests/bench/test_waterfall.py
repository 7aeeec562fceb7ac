"""The way of an append, found backwards over the processes; and the library that notes its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from logyard.bench import waterfall
from logyard.bench.call_times import Call, Traced, traced, tracing_environment
from logyard.bench.waterfall import middle, roles, table, used, way, ways

CLIENT, DOOR, PEER, OTHER = 50, 10, 60, 20


def call(kind: str, begin: int, end: int, result: int = 1, local: int = 0, remote: int = 0) -> Call:
    return Call(begin, end, result, kind, local, remote, 1)


def append(at: int) -> tuple[list[Call], list[Call], list[Call]]:
    """The calls of client, leader and follower for an append that begins at a time and takes 100."""
    client = [
        call("send", at, at + 4, 300, CLIENT, DOOR), call("epoll_ctl", at + 5, at + 6),
        call("epoll_wait", at + 6, at + 90), call("receive", at + 91, at + 92, 41, CLIENT, DOOR),
    ]  # fmt: skip
    leader = [
        call("epoll_wait", at - 10, at + 10), call("receive", at + 11, at + 12, 300, DOOR, CLIENT),
        call("send", at + 20, at + 22, 500, PEER, OTHER), call("write", at + 23, at + 30),
        call("sync", at + 30, at + 45), call("epoll_wait", at + 46, at + 71),
        call("receive", at + 72, at + 73, 120, PEER + 1, OTHER + 1),
        call("send", at + 80, at + 85, 41, DOOR, CLIENT),
    ]  # fmt: skip
    follower = [
        call("epoll_wait", at - 20, at + 26), call("receive", at + 27, at + 28, 500, OTHER, PEER),
        call("write", at + 35, at + 40), call("sync", at + 40, at + 60),
        call("send", at + 65, at + 67, 120, OTHER + 1, PEER + 1),
    ]  # fmt: skip
    return client, leader, follower


def run(appends: int) -> list[Traced]:
    parts: tuple[list[Call], ...] = ([], [], [])
    for number in range(appends):
        for calls, more in zip(parts, append(1000 + 100 * number), strict=True):
            calls += more
    names = ("python -m logyard.bench.load", "logyard serve --config 1", "logyard serve --config 2")
    return [Traced(number, name, calls) for number, (name, calls) in enumerate(zip(names, parts, strict=True))]


def test_the_way_goes_over_all_processes_and_its_parts_are_the_whole() -> None:
    processes = roles(run(10))
    assert [one.role for one in processes] == ["client", "leader", "follower 1"]
    parts = way(processes, 1300, 1400)
    assert parts is not None and sum(part.ns for part in parts) == 100
    names = [part.name for part in reversed(parts)]
    assert names[:3] == ["client: send", "from client's send to leader's wake-up", "leader: between calls"]
    # Of the leader's own sync nothing waits: the follower is later.
    assert "leader: sync" not in names and "follower: sync" in names
    assert names[-1] == "client: between calls"


def test_what_is_not_understood_is_left_out() -> None:
    processes = roles(run(10))
    assert way(processes, 1250, 1400) is None
    assert way(processes, 0, 5) is None


def test_means_of_the_parts_add_up() -> None:
    found = middle(list(ways(roles(run(40)))))
    shown = table(found)
    assert sum(shown.values()) == pytest.approx(0.1, abs=0.6) and next(iter(shown))


def test_calls_and_processor_time_of_an_append() -> None:
    found = run(1000)
    processes = roles(found)
    sends = [one for one in processes[0].calls if one.kind == "send"]
    row = used(processes[1], sends)
    assert (row["epoll_wait"], row["send"], row["sync"]) == (2.0, 2.0, 1.0)
    assert row["user us"] == 0.0


def test_a_run_without_a_client_is_refused() -> None:
    with pytest.raises(SystemExit, match="no trace"):
        roles(run(3)[1:])


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="there is no C compiler")
def test_the_library_notes_calls_with_their_connections(tmp_path: Path) -> None:
    program = """
import os, select, socket
one = socket.create_server(("127.0.0.1", 0))
two = socket.create_connection(one.getsockname())
three, _ = one.accept()
print(two.getsockname()[1], two.getpeername()[1], flush=True)
two.sendmsg([b"hello"])
epoll = select.epoll()
epoll.register(three, select.EPOLLIN)
epoll.poll(5)
assert os.readv(three.fileno(), [bytearray(9)]) == 5
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.pwritev(file, [b"abc"], 0)
os.fdatasync(file)
"""
    environment = {**os.environ, **tracing_environment(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, text=True, capture_output=True, check=True
    )
    near, far = map(int, done.stdout.split())
    (found,) = traced(tmp_path)
    assert "epoll.poll" in found.command
    told = [(one.kind, one.result, one.local, one.remote) for one in found.calls]
    for row in (("send", 5, near, far), ("receive", 5, far, near), ("write", 3, 0, 0), ("sync", 0, 0, 0)):
        assert row in told
    assert {"epoll_ctl", "epoll_wait", "usage", "switches"} <= {one.kind for one in found.calls}
    assert all(one.begin <= one.end for one in found.calls if one.kind not in ("usage", "switches"))


def test_the_command_line_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        waterfall.main(["--help"])
    assert left.value.code == 0 and "microsecond" in capsys.readouterr().out
