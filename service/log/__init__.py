"""Append logs: reading them, one and many, what becomes of them, and audits of what is stored."""
