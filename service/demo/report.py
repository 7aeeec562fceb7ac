"""The demo's summary table: the figures of `service.demo.run.run_demo` for a human, and what went wrong by name.

Called by `logyard demo`; with --json only the problems are shown, on standard error.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..cli.output import Output, bytes_text

ROWS = (
    ("logs", "logs", "count"),
    ("records", "records", "count"),
    ("payload", "payload_bytes", "bytes"),
    ("acknowledged", "acknowledged", "count"),
    ("lost", "lost", "count"),
    ("mismatched", "mismatched", "count"),
    ("stored twice by a retry", "duplicates", "count"),
    ("members read in full", "members_verified", "count"),
    ("read back and compared", "bytes_read_back", "bytes"),
    ("ingest, records a second", "records_per_s", "count"),
    ("ingest, MB a second", "mb_per_s", "count"),
    ("fdatasyncs, all nodes", "fdatasyncs", "count"),
    ("logs led by the killed node", "groups_led_by_killed", "count"),
    ("appends in flight at the kill", "in_flight_at_kill", "count"),
    ("failover", "failover_s", "seconds"),
    ("recovery of the killed node", "recovery_s", "seconds"),
    ("restart of all three", "restart_all_s", "seconds"),
    ("snapshots, one node", "snapshot_bytes", "bytes"),
    ("live in the WAL, per node", "live_bytes_in_wal", "bytes"),
    ("live in generations, per node", "live_bytes_in_generations", "bytes"),
    ("disk before truncation, per node", "disk_before", "bytes"),
    ("disk after truncation, per node", "disk_after", "bytes"),
    ("total time", "seconds", "seconds"),
)


def shown(value: object, unit: str) -> str:
    """Return one cell; a list is one number per node."""
    if isinstance(value, list):
        return "  ".join(shown(each, unit) for each in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if unit == "bytes":
        return bytes_text(value)
    if unit == "seconds":
        return f"{value:.2f} s"
    return f"{value:,}"


def show_summary(fields: Mapping[str, object], output: Output) -> None:
    """Show the table, then every goal that was missed and every problem by name."""
    output.table("logyard demo", ("what", "figure"), [(name, shown(fields.get(key), unit)) for name, key, unit in ROWS])
    goals = fields["goals"]
    assert isinstance(goals, dict)
    for goal, reached in goals.items():
        if not reached:
            output.say(f"MISSED: {goal}")
    problems = fields["problems"]
    assert isinstance(problems, list)
    for problem in problems:
        output.say(f"  {problem}")
    if fields["ok"]:
        output.say("Everything acknowledged was read back unchanged from all three members.")
