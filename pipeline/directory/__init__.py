"""A stopped node's directory as bytes: what `logyard check` judges, and what the pipeline reads records from."""
