"""A node's part in the catalogue: proposing to it, looking up in it, and doing what it says."""
