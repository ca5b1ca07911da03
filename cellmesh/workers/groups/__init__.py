"""Process groups that are disconnected and reconnected in place, and a check that the installed
torch has the private functions and attributes that this needs.

These parts are not public in torch. The zygote checks them at its start, so that a torch version
without one of them is refused with the part's name, instead of failing later, during a heal.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator, Mapping

import torch

# For each module: paths of attributes, and calls with the names of parameters.
EXPECTED: Mapping[str, str] = {
    "torch.distributed.distributed_c10d": """
        _new_process_group_helper(group_size,group_rank,global_ranks_in_group,backend,store)
        _new_process_group_helper(group_name,backend_options,timeout,pg_tag,device_id,group_desc)
        _World _get_default_group _get_default_store _update_default_pg _world.group_count
        _world.pg_backend_config _world.pg_coalesce_state _world.pg_group_ranks _world.pg_map
        _world.pg_names _world.pg_to_tag _world.tags_to_pg
    """,
    "torch._C._distributed_c10d": """
        PrefixStore ProcessGroup ProcessGroupGloo TCPStore Work _create_work_from_future
        _register_comm_hook _register_process_group _resolve_process_group
        _unregister_process_group
    """,
    "torch.distributed.c10d_logger": "_get_msg_dict",
    "torch._C": "DisableTorchFunctionSubclass Future.wait",
    "torch.cuda": "_device_count_nvml",
}


def find_missing(expected: Mapping[str, str]) -> Iterator[str]:
    """Yield the expected functions, attributes and parameters that the installed torch lacks."""
    for module, parts in expected.items():
        for part in parts.split():
            path, _, parameters = part.rstrip(")").partition("(")
            try:
                found = pkgutil.resolve_name(f"{module}:{path}")
            except (ImportError, AttributeError):
                yield f"{module}.{path}"
                continue
            if parameters:
                lacking = set(parameters.split(",")) - inspect.signature(found).parameters.keys()
                yield from (f"{module}.{path}({name})" for name in sorted(lacking))


def check_torch(expected: Mapping[str, str] = EXPECTED) -> None:
    """Raise ImportError with the names of the functions, attributes and parameters of torch that
    ranks need, if the installed torch lacks any.
    """
    if missing := ", ".join(find_missing(expected)):
        raise ImportError(
            f"torch {torch.__version__} has no {missing}, which rebuilding process groups takes: "
            "cellmesh is tried with torch 2.11 to 2.15, install one of those"
        )
