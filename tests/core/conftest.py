"""How hypothesis runs: the same examples each time; `--hypothesis-profile search` looks for new
ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable",
    deadline=None,
    max_examples=100,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("repeatable")
