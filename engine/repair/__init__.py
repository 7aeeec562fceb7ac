"""What was lost here comes back from other members: records of a group's log, and payloads."""
