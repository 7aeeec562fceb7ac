"""The service: the only package that knows all the others. It composes the system, serves it and is the command
line."""
