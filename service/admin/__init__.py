"""What an operator wants of many groups: the plan for one, and carrying it out over all."""
