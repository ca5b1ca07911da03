"""How hypothesis and torch run: the same examples each time, on one thread;
`--hypothesis-profile search` looks for new examples.
"""

from __future__ import annotations

import torch
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

# Two processes run these tests: threads of one would take the core of the other.
torch.set_num_threads(1)
