"""Seeds the random generators of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ranks import Ranks


def seed_ranks(ranks: Ranks, seed: int, per_rank: bool = False) -> list[str]:
    """Seed the generators of Python, numpy (where it is imported) and torch, on all devices.
    Blocks.

    Args:
        ranks: whose.
        seed: of all of them.
        per_rank: give each its rank more.

    Returns:
        Which were seeded, as people call them.
    """

    # A nested function travels as what it is: ranks import nothing of the controller's.
    def seed_all(seed: int, per_rank: bool) -> list[str]:
        import os
        import random
        import sys

        import torch

        number = seed + int(os.environ["RANK"]) if per_rank else seed
        random.seed(number)
        seeded = ["random"]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(number % 2**32)
            seeded.append("numpy")
        torch.manual_seed(number)
        seeded.append("torch")
        return seeded

    results = ranks.submit(seed_all, seed, per_rank).result()
    seeded: list[str] = results if isinstance(results, list) else max(results.values(), key=len)
    return seeded
