"""The payload store: where large bodies live once their WAL file is wanted back. It imports nothing of ours."""
