"""The calls about many logs: what a stranger may ask, and what is refused before anything is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from logyard.client.scans import logs_call, scan_call, seek_call
from logyard.protocol.errors import BadRequest
from logyard.protocol.verbs import LOG_ROWS, RANGES_MAX
from logyard.service.door.dispatch import SystemPort, serve_call
from logyard.service.door.scan_calls import Data


class Asked:
    """Notes what it is asked."""

    node_id = 1

    def __init__(self) -> None:
        self.seen: list[object] = []

    async def log_rows(self, *arguments: object) -> list[list[Any]]:
        self.seen.append(arguments)
        return [["a", 7, 1, 0, 5, 0, [1, 2]]]

    async def scan(self, *arguments: object) -> tuple[dict[str, Any], Sequence[bytes]]:
        self.seen.append(arguments)
        return {"node": 1}, [b"x"]

    async def seek(self, *arguments: object) -> list[int]:
        self.seen.append(arguments)
        return [3]


async def ask(system: Asked, method: str, **arguments: object) -> object:
    return await serve_call(cast(SystemPort, system), method, arguments)


async def test_what_the_client_asks_is_understood() -> None:
    system = Asked()
    logs = logs_call(2, "a", ["b"])
    (row,) = logs.decode(await ask(system, logs.method, **logs.arguments))
    assert (row.name, row.uid, row.members) == ("a", 7, (1, 2))
    one = [("log", (1 << 64) - 1, 5, 10)]
    for bodies in (None, 100):
        scan = scan_call((1,), one, max_bytes=10, max_records=20, body_bytes=bodies)
        assert await ask(system, scan.method, **scan.arguments) == Data({"node": 1}, [b"x"])
    seek = seek_call((1,), [("log", 5, 99)])
    assert seek.decode(await ask(system, seek.method, **seek.arguments)) == [3]
    assert system.seen == [
        ("a", ["b"], LOG_ROWS), (one, 10, 20, None), (one, 10, 20, 100), ([("log", 5, 99)],),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("logs", {"limit": 0}),
        ("logs", {"names": "a"}),
        ("scan", {"ranges": [["a", 1, 2]], "max_bytes": 1, "max_records": 1}),
        ("scan", {"ranges": [["a", 1, 2, -3]], "max_bytes": 1, "max_records": 1}),
        ("scan", {"ranges": [["a", 1 << 64, 2, 3]], "max_bytes": 1, "max_records": 1}),
        ("scan", {"ranges": [["a", 1, True, 3]], "max_bytes": 1, "max_records": 1}),
        ("scan", {"ranges": [[5, 1, 2, 3]], "max_bytes": 1, "max_records": 1}),
        ("scan", {"ranges": [["a", 1, 2, 3]] * (RANGES_MAX + 1), "max_bytes": 1, "max_records": 1}),
        ("scan", {"ranges": [["a", 1, 2, 3]], "max_bytes": 0, "max_records": 1}),
        ("scan", {"ranges": [["a", 1, 2, 3]], "max_bytes": 1, "max_records": 0}),
        ("scan", {"ranges": [["a", 1, 2, 3]], "max_bytes": 1, "max_records": 1, "body_bytes": -1}),
        ("seek", {"times": [["a", 1, 2, 3]]}),
        ("seek", {}),
    ],
)
async def test_anything_else_is_refused(method: str, arguments: dict[str, object]) -> None:
    system = Asked()
    with pytest.raises(BadRequest):
        await ask(system, method, **arguments)
    assert not system.seen
