"""What all tests share: how hypothesis runs. Everything else is a fixture beside the tests that use it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The machines that run this are shared and noisy: an example may take long without being wrong.
settings.register_profile("logyard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("logyard")
