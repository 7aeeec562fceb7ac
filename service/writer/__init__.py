"""The writer process of a node: `process` is the node's side, `child` the process, `jobs` what both run."""
