"""Environment variables of ranks: variables that users pass on, and the one that selects GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..errors import HostError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Variables by which gloo, TensorPipe and NCCL choose their interface. An interface that the user
# chose overrides a site's profile; one that was found by the route does not.
SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Variables that users cannot pass on: each rank has its own value, or the mesh depends on it.
# (OMP_NUM_THREADS, which the mesh sets as well, may be passed on.)
_SET_BY_MESH = """
RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
ROLE_NAME MASTER_ADDR MASTER_PORT OPENBLAS_NUM_THREADS CELLMESH_MESH TORCHELASTIC_RESTART_COUNT
TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE
TORCHELASTIC_SIGNALS_TO_HANDLE
"""
SET_BY_MESH = frozenset(_SET_BY_MESH.split())
# Variables that torch sets in a process that uses it, and reads only when it needs them.
SET_BY_TORCH = ("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR")


class Surroundings(msgspec.Struct, frozen=True, array_like=True):
    """Differences in environment and working directory between new ranks and the zygote, the
    process from which they are forked.

    Attributes:
        environment: variable -> its value; None to remove the variable.
        cwd: working directory; empty for the zygote's.
    """

    environment: dict[bytes, bytes | None] = {}
    cwd: bytes = b""

    def __hash__(self) -> int:
        return hash((frozenset(self.environment.items()), self.cwd))

    def __repr__(self) -> str:
        return f"<Surroundings of {len(self.environment)} variables>"  # they may be secret


def choose_gpus(asked: Sequence[str] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Choose which GPUs the ranks of this host see, among those that the job scheduler has given to
    the host.

    Args:
        asked: indices into the given GPUs, or UUIDs; None for all given GPUs.
        environment: environment of the agent, or of the notebook for a mesh on one host.

    Returns:
        Variables to add to the ranks' environment.

    Raises:
        HostError: an index exceeds the number of given GPUs.
    """
    if asked is None:
        return {}
    text = environment.get(VISIBLE, "")
    given = [each.strip() for each in text.split(",") if each.strip()]
    chosen = []
    for each in asked:
        if each.isdecimal() and VISIBLE in environment:
            if int(each) >= len(given):
                raise HostError(
                    f"--gpus {','.join(asked)}: there is no GPU {each} among the {len(given)} that "
                    f"this host was given ({VISIBLE}={text}), which are counted from 0"
                )
            each = given[int(each)]
        chosen.append(each)
    return {VISIBLE: ",".join(chosen)}
