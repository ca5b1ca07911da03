"""Which GPUs ranks see, of those that an engine has given."""

from __future__ import annotations

import pytest

from cellmesh.errors import HostError
from cellmesh.wire.environment import SET_BY_MESH, choose_gpus

CUDA, STEP, JOB = "CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"


@pytest.mark.parametrize(
    ("asked", "environment", "chosen"),
    [
        (None, {}, {}),
        (None, {CUDA: "4,5"}, {}),  # the ranks inherit it
        (None, {JOB: "4,5"}, {CUDA: "4,5"}),
        (None, {JOB: "4,5,6", STEP: "6"}, {CUDA: "6"}),
        (None, {CUDA: "0", JOB: "4"}, {}),
        (("0", "2"), {}, {CUDA: "0,2"}),
        (("0", "2"), {CUDA: "4,5,6,7"}, {CUDA: "4,6"}),
        (("1",), {CUDA: " GPU-aa, GPU-bb "}, {CUDA: "GPU-bb"}),
        (("1", "0"), {JOB: "4,5"}, {CUDA: "5,4"}),
        (("1",), {CUDA: "0,1", JOB: "4,5"}, {CUDA: "1"}),
        (("GPU-aa",), {CUDA: "4,5"}, {CUDA: "GPU-aa"}),
        ((), {CUDA: "4,5"}, {CUDA: ""}),
    ],
)
def test_gpus_are_chosen_among_those_given(
    asked: tuple[str, ...] | None, environment: dict[str, str], chosen: dict[str, str]
) -> None:
    assert choose_gpus(asked, environment) == chosen


@pytest.mark.parametrize("environment", [{CUDA: "4,5"}, {CUDA: ""}, {JOB: "4,5"}])
def test_gpu_that_was_not_given_is_refused(environment: dict[str, str]) -> None:
    (source, text), *_ = environment.items()
    with pytest.raises(HostError, match=rf"--gpus 0,2: .* \({source}={text}\)"):
        choose_gpus(("0", "2"), environment)


def test_variables_of_torchrun_are_the_meshs() -> None:
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} < SET_BY_MESH
