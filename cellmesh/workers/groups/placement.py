"""Chooses a rank's device and backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """A rank's device, and the backend string for ``init_process_group``."""

    device: torch.device
    backend: str


def choose_placement(
    backend: str, local_rank: int, num_local_ranks: int, num_gpus: int
) -> Placement:
    """Choose device and backend of a rank.

    Args:
        backend: ``auto``, ``gloo`` or ``nccl``.
        local_rank: rank on its host.
        num_local_ranks: ranks on its host.
        num_gpus: GPUs on its host.

    Returns:
        With ``auto``: NCCL for CUDA tensors where every rank has a GPU of its own, else gloo for
        all.
    """
    if num_gpus == 0:
        return Placement(torch.device("cpu"), "gloo")
    device = torch.device("cuda", local_rank % num_gpus)
    if backend == "gloo" or (backend == "auto" and num_local_ranks > num_gpus):
        return Placement(device, "cpu:gloo,cuda:gloo")
    return Placement(device, "cpu:gloo,cuda:nccl")
