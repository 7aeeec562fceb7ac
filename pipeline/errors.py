"""What goes wrong in the pipeline. Errors cross to Spark as text, so their first line says what to do."""

from __future__ import annotations

from logyard.protocol.errors import LogyardError


class OptionError(LogyardError, ValueError):
    """An option of the data source that is missing, unknown or can't be read; the message begins with its name."""

    code = "bad_option"


class DataLoss(LogyardError):
    """Records that were asked for are not there any more: truncated, or their log was deleted. `details` has log,
    first and end."""

    code = "data_loss"
