"""The matrix of damages on a live cluster: every kind of file, every fault, on a leader and on a follower."""
