"""The errors under the name that embedders know them by; they live in `protocol.errors`, one family for everybody."""

from __future__ import annotations

from logyard.protocol.errors import *  # noqa: F403
from logyard.protocol.errors import decode_error as decode_error
from logyard.protocol.errors import encode_error as encode_error
