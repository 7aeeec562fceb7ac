"""Quiescence: a group that nobody uses becomes a row on each of its nodes, and a member again when it is needed."""
