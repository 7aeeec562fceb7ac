"""True power cuts: a node on a file system that is shut down under it; see `__main__`."""
