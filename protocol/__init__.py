"""What client and node must agree on: errors, frames, verbs, records. The lowest floor: the standard library and
msgpack alone, so that it loads wherever a client does."""
