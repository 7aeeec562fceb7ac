"""What a data directory says of its groups: `rebuild` (pure) makes one group's image of it, `damage` judges what is
lost, `inspect` reads a stopped directory and touches nothing. A start (`engine.recovery.open`) uses the same code."""
