"""The engine: many small Raft groups on one write-ahead log. It imports nothing of ours but `payloads.reference`."""
