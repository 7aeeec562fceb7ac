"""Bytes that nobody wrote: every parser of bytes from disk and wire, and the golden files with every bit wrong."""
