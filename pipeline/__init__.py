"""The data pipeline on Spark. Not there yet; docs/status.md says what is."""
