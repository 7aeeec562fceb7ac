"""The host: what drives every Raft core of a node, one turn for all groups, and owns its tasks, its threads and its
files.

One turn (`ready_loop`): queued client frames become entries, each dirty core gives one `Ready`, messages leave in one
frame a peer, all entries and hard states go to the WAL as one batch (`log.group_commit`), committed entries are applied
(`replica.applier`).
"""
