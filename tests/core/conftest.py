"""How torch runs: on one thread."""

from __future__ import annotations

import torch

# Two processes run these tests: threads of one would take the core of the other.
torch.set_num_threads(1)
