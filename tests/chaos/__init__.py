"""Chaos on real daemons: faults on processes, disks and the network under load, and what must hold afterwards."""
