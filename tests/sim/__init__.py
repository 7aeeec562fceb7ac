"""The simulator: the real engine of several nodes in one thread, over simulated disks, a network, clocks and a loop.

`python -m tests.sim --seed 1 --minutes 1` runs it; docs/decisions/0015 says why it is built this way.
"""
