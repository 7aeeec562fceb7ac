"""The verbs of the client's handles, written once; `python -m logyard.client._async.generate` makes `_sync` of them.

A verb says what is asked; how it is asked (gathered into a lane's frame, or in a call of its own) is its face's, which
fills in the abstract methods. Nothing here knows trio, asyncio or threads. Used by `aio`, `kv`, `queue`, `machine` and
`network`, and their blocking twins by `sync`, `sync_log`, `kv_sync`, `queue_sync` and `machine_sync`.
"""
