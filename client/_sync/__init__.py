"""The verbs of the blocking handles: made from `_async`, file by file. See there."""
