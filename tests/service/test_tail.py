"""A database driven from a log, killed again and again: each record is applied once, and none is missing."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests.source_tree import ROOT

LAST = 400


def test_a_database_driven_from_a_log_survives_kill_9(tmp_path: Path) -> None:
    printed: list[int] = []
    for kill, ahead in ((30, 0), (95, 13), (130, 0), (170, 13), (260, 0), (0, 0)):
        # Two of them anywhere within so many records, the others in the middle of a transaction.
        stuck = kill + ahead
        command = [sys.executable, "-m", "tests.service.tailing", str(tmp_path), str(LAST), str(stuck)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(int(line))
                if printed[-1] == kill:
                    process.send_signal(signal.SIGKILL)
                    printed += map(int, process.stdout.read().split())
            assert process.wait() == (-signal.SIGKILL if kill else 0)
    with sqlite3.connect(tmp_path / "accounts.db") as db:
        rows = db.execute("SELECT offset, number FROM bookings ORDER BY rowid").fetchall()
        assert rows == [(number - 1, number) for number in range(1, LAST + 1)]
        assert db.execute("SELECT total FROM balance").fetchall() == [(LAST * (LAST + 1) // 2,)]
        assert db.execute("SELECT place FROM logyard_cursors").fetchall() == [(LAST,)]
    assert printed.count(30) == printed.count(260) == 2, "applied, taken back with its transaction, and applied again"
