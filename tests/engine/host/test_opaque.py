"""Law 5: applying and replaying need no payload byte, so a log whose bodies are all ruined is as live as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.protocol.errors import Corrupt

from .cluster import KIB, cluster, until
from .test_storage import damage


@pytest.mark.parametrize("home", ["wal", "segment"])
async def test_apply_and_replay_never_look_at_payloads(tmp_path: Path, home: str) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 6, 40 * KIB)
        # The last batch of a WAL is verified whole: it is this one.
        await c.append(1, [(b"", b"intact")])
        if home == "segment":
            await c.roll(1)
        path = min((tmp_path / "node-1" / "wal").glob("*.wal"))
        await c.crash(1)
        for body in bodies:
            damage(path, body[:30])
        await c.start(1)
        await c.leader()
        await until(lambda: c.log(1).end == 7)
        assert c.member(1).state == "running" and c.log(1).start == 0
        for offset in range(6):
            with pytest.raises(Corrupt):
                await c.read(1, offset, 1)
        assert (await c.append(1, [(b"", b"more")])).start == 7
        await c.nodes[1].truncate("log", 6)
        assert [body for _, body in await c.read(1, 6)] == [b"intact", b"more"]
