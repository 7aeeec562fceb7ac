"""Snapshots: a group's state at an index, without its payload bytes, plus the exact set of payloads that are live
there."""
