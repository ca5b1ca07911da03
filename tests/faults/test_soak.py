"""A part of the soak, and of `endurance`; and that their judgement of growth can fail."""

from __future__ import annotations

import dataclasses

import pytest

from .endurance import KINDS, enduring_mesh, repeat_kind, repeat_starts
from .growth import ROLES, Growth, Sample
from .rig import Losses
from .soak import run_soak
from .watching import PATIENCE

NUM_STEPS = 11  # of this seed: every outcome, two deaths at once, an attach
STEADY = Sample(rss_bytes=100 << 20, num_fds=20, num_threads=3)


@pytest.mark.timeout(240)
def test_random_faults_lose_nothing(losses: Losses) -> None:
    soak = run_soak(
        seed=226,
        minutes=3.0,
        losses=losses,
        num_steps=NUM_STEPS,
        sample_every_s=0.0,
        patience=PATIENCE,
    )
    print(soak.summary())
    # So few steps are mostly warm-up: memory gets more room than in half an hour. So do ranks'
    # descriptors: which groups are there depends on what has struck. If each of the nine strikes
    # between left one, there would be more.
    soak.growth.check(memory_share=0.25, num_rank_fds=8)


def test_each_kind_is_repeated_and_reported() -> None:
    with enduring_mesh() as mesh_and_directory:
        texts = [repeat_kind(kind, 0.002, *mesh_and_directory) for kind in KINDS]
    for text in [*texts, repeat_starts(0.002)]:
        assert text.startswith(tuple("123456789"))
        assert "| controller |" in text


def growth_of(samples: list[Sample]) -> Growth:
    return Growth({role: list(samples) for role in ROLES})


def test_constant_measure_passes() -> None:
    growth_of([STEADY] * 40).check()


@pytest.mark.parametrize(
    ("what", "growth"), [("rss_bytes", 1 << 20), ("num_fds", 1), ("num_threads", 1)]
)
def test_growing_measure_fails(what: str, growth: int) -> None:
    grown = [
        dataclasses.replace(STEADY, **{what: getattr(STEADY, what) + growth * i}) for i in range(40)
    ]
    with pytest.raises(AssertionError, match="controller"):
        growth_of(grown).check()
