"""The files of a node: the door to its disk, the twin that fails on demand, the lock, and the disk's health."""
