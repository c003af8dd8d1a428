"""Settings of hypothesis: every run has the same examples, and none fails because the machine is busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

CHECKS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
