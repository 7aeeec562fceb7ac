"""Linearizability of recorded histories: registers, keys with appends, FIFO queues. See `__main__`."""
