"""The catalogue in the simulator: real nodes with their keepers, one fault at every step of what changes a cluster."""
