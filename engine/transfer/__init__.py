"""Snapshots on their way between nodes: taken, offered, pulled piece by piece from whoever has it, installed; and what
is kept for that meanwhile.
"""
