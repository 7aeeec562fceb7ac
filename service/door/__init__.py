"""The client door: connections, their calls by the table of verbs, what is pushed, and the bytes all of them hold."""
