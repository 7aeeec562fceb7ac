"""Sinks: rows of Spark become records of logs, once each where that is asked for. `writers` is what Spark calls, the
rest knows no Spark.

`options` parses; `rows` cuts a task's rows into frames; `record` is the sink's own log, which says what became of each
batch; `direct` and `staged` are the two ways from a task to the logs.
"""
