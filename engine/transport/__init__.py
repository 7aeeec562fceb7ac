"""Everything between two nodes: frames, links, the listener, node-level liveness, and an in-memory twin.

A node opens two connections (lanes) to each peer and accepts two: control for votes, replies, reads and liveness, bulk
for appends and blobs, so that liveness never waits behind payloads. One frame carries a whole turn's messages of all
groups to one peer and lane. Nothing here is per group (law 10), no queue is unbounded (law 9), payload bytes go from
the entry's buffers to the socket unjoined (law 6). `engine.host` calls `peers.Peers`; see docs/wire.md for the bytes.
"""
