"""Detects that a rank's CUDA context is lost, after which the process can never use its GPU again
and must end.

A device-side assert, an illegal address and their like stay with the context: every later CUDA call
of the process returns the same error (CUDA Runtime API, "Error Handling", on sticky errors).
"""

from __future__ import annotations

import os

import torch


def find_lost_context() -> str:
    """Return the first line of the error that every CUDA call of this process returns; "" while
    CUDA works.

    Does not block: a stream is asked whether its work has ended, and nothing waits for that. A
    process that has not used its GPU is not made to.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:  # torch.AcceleratorError
        return next(iter(str(error).splitlines()), type(error).__name__)
    return ""


def report_lost_context(rank: int, error: str) -> None:
    """Write to descriptor 2 why the rank ends now; the report of its death shows these lines."""
    text = (
        f"cellmesh: rank {rank} ends: its CUDA context is lost ({error}), and this process can "
        "never use the GPU again.\n%dist_heal starts the rank again. To see the line that failed, "
        "set CUDA_LAUNCH_BLOCKING=1 before %dist_start.\n"
    )
    os.write(2, text.encode())
