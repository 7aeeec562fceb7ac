"""Jobs over logs on Spark: export, import, audit, digest. Each is a function and a verb of `logyard spark`."""
