"""Times that callers give: those that are none are bad requests, never an error of Python's numbers."""

from __future__ import annotations

from math import inf, nan
from typing import Any, cast

import pytest

from logyard.client.kv_requests import grant
from logyard.client.session_keeper import SessionKeeper
from logyard.client.sync import connect_sync
from logyard.protocol.errors import BadRequest
from logyard.protocol.queue import milliseconds

NONE = (inf, -inf, nan, -1.0, 0.0, 1e300)


@pytest.mark.parametrize("seconds", NONE)
def test_what_is_no_time_of_a_message_is_a_bad_request(seconds: float) -> None:
    with pytest.raises(BadRequest, match="a lease is a time in seconds"):
        milliseconds(seconds, "a lease")
    assert milliseconds(1.5, "a lease") == 1500 and milliseconds(None, "a lease") == 0


@pytest.mark.parametrize("seconds", NONE)
def test_what_is_no_time_of_a_lease_is_a_bad_request(seconds: float) -> None:
    with pytest.raises(BadRequest, match="lasts for some seconds"):
        next(grant(seconds, 0))
    next(grant(1.5, 0))


@pytest.mark.parametrize("seconds", (*NONE, None))
def test_what_is_no_time_to_live_of_a_session_is_refused_before_it_is_used(seconds: Any) -> None:
    """One without an end ended the asynchronous client at its first session."""
    with pytest.raises(BadRequest, match="session_ttl is a time in seconds"):
        SessionKeeper(cast(Any, None), seconds)
    with pytest.raises(BadRequest, match="session_ttl is a time in seconds"):
        connect_sync(["127.0.0.1:1"], session_ttl=seconds)
