"""A torchrun script's ``dist.init_process_group`` finds the mesh's group instead of failing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

torch_init_process_group = c10d.init_process_group


def adopt_init_process_group(
    backend: str, arguments: Callable[[], dict[str, Any]], timeout: timedelta
) -> None:
    """Replace torch's function by one that knows the mesh's group.

    After the script's ``destroy_process_group`` a further call makes a new group over the mesh's store.

    Args:
        backend: the mesh's backend string.
        arguments: store, rank and world size for a new group over the mesh's store.
        timeout: of a group for which the script names none.
    """

    def init_process_group(backend_asked: str | None = None, *args: Any, **kwargs: Any) -> None:
        wanted = kwargs.pop("backend", backend_asked)
        if dist.is_initialized():
            plain = backend.replace("cpu:", "").replace("cuda:", "").split(",")
            if wanted is not None and str(wanted) not in (backend, *plain):
                raise ValueError(
                    f"the mesh's process group is {backend!r}, not {wanted!r}: call "
                    f"dist.destroy_process_group() first, or %dist_stop and start with --backend {wanted}"
                )
            return
        method = args[0] if args else kwargs.get("init_method")
        if kwargs.get("store") is None and method in (None, "env://"):  # which means the mesh's store
            args = ()
            kwargs.update(init_method=None, **arguments())
            kwargs.setdefault("timeout", timeout)
        torch_init_process_group(backend if wanted is None else wanted, *args, **kwargs)

    init_process_group.__doc__ = torch_init_process_group.__doc__
    dist.init_process_group = init_process_group  # type: ignore[assignment]
    c10d.init_process_group = init_process_group  # type: ignore[assignment]
