"""The client: frames, a sans-IO session, and two faces over it: `aio` (trio, asyncio) and `sync` (threads).

It imports nothing of ours but itself, and neither lmdb nor (from `sync`) trio, so that it installs on a Spark executor.
"""
