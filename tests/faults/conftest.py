"""What the modules of this folder share."""

from __future__ import annotations

import pytest

from .rig import Losses, measure_losses


@pytest.fixture(scope="session")
def losses() -> Losses:
    """What a mesh gives to which nothing happens."""
    return measure_losses()
