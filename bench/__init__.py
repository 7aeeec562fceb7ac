"""Benchmarks: nodes and load in separate processes, over sockets. Called by `logyard bench`."""
