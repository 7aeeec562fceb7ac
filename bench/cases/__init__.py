"""The cases of `logyard bench`: append, idle, recover."""
