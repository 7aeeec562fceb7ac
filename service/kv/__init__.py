"""KV groups: questions whose answers name payloads, and watches."""
