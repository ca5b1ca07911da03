"""What the process that starts a host's agent decides."""

from __future__ import annotations

import pytest

from cellmesh.workers.agent.on_host import is_engines


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RANK", True),
        ("MASTER_PORT", True),
        ("TORCHELASTIC_USE_AGENT_STORE", True),
        ("OMP_NUM_THREADS", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_variables_of_torchrun_are_kept_from_ranks(name: str, expected: bool) -> None:
    assert is_engines(name) == expected
