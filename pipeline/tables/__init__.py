"""JSON records of logs as rows of Delta tables: by dimensions and hour, each record in the table or among its rejects.

`rules` says which row a record becomes, or why none; `kv_schema` reads the rules from a KV prefix; `files` is what a
task does; `commit` makes a batch visible, once; `compaction` merges the files of an hour. Used by `jobs.tables`.
"""
