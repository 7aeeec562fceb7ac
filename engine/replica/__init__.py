"""A replica: one group's member on this node. What waits to be proposed, what is replicated beside the machine, how an
entry is applied and how its payloads are read; nothing here knows the other groups or the node that composes it.
"""
