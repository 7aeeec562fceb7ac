"""Crash states: every disk call of a run, and every directory that a power cut could have left; see `__main__`."""
