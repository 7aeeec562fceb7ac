"""`logyard check`: the directories of stopped nodes, each alone and against one another."""
