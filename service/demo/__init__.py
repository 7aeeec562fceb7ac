"""The demo: a thousand replicated logs on three local nodes, and the same yard through Spark. Begins in `run`."""
