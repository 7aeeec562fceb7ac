"""A program that test_tail kills: it fills a log, and drives an SQLite database from it.

Usage: DIRECTORY LAST STUCK: after STUCK (0: never) it waits for ever, in the middle of a transaction.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import trio

import logyard
from logyard.client.tail import SqliteCursor
from logyard.engine.config import SystemConfig

SMALL = SystemConfig(wal_file_bytes=1 << 20, generation_bytes=16 << 20, generation_transaction_bytes=1 << 20)


async def main(directory: Path, last: int, stuck: int) -> None:
    db = sqlite3.connect(directory / "accounts.db")
    db.execute("CREATE TABLE IF NOT EXISTS bookings (offset INTEGER, number INTEGER)")
    db.execute("CREATE TABLE IF NOT EXISTS balance (total INTEGER)")
    if db.execute("SELECT count(*) FROM balance").fetchone() == (0,):
        db.execute("INSERT INTO balance VALUES (0)")
    db.commit()
    cursor = SqliteCursor(db, "bookings")
    async with logyard.open_system(directory / "yard", SMALL) as system, trio.open_nursery() as nursery:
        log = await system.start_group("bookings", logyard.AppendLog())

        async def fill() -> None:
            producer = await log.producer("feed")
            # It remembers nothing: some of these are in the log, and stay there once.
            for number in range(max(1, producer.last - 5), last + 1):
                await producer.append(b"%d" % number, b"x" * 500, sequence=number)

        nursery.start_soon(fill)
        async for batch in log.tail(cursor.load(), max_records=7):
            with db:
                for record in batch.records:
                    number = int(record.metadata)
                    db.execute("INSERT INTO bookings VALUES (?, ?)", (record.offset, number))
                    db.execute("UPDATE balance SET total = total + ?", (number,))
                    print(number, flush=True)
                    if number == stuck:
                        sys.stdin.read()
                cursor.move(batch.cursor)
            if batch.cursor.offset == last:
                return


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
