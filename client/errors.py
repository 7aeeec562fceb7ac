"""The errors under the name that clients know them by; they live in `protocol.errors`, one family for everybody."""

from __future__ import annotations

from logyard.protocol.errors import *  # noqa: F403
from logyard.protocol.errors import KINDS as KINDS
from logyard.protocol.errors import classes as classes
from logyard.protocol.errors import error_of as error_of
