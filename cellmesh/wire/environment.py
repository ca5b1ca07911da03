"""The environment variables of a mesh's ranks: those that users pass on, and the one that chooses
GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..errors import HostError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# By which gloo, TensorPipe and NCCL choose their interface. A chosen one comes before what a site's
# profile says; one that was found by the route does not.
SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# What Slurm gives to a step or a job, as numbers of the host's GPUs. It sets `VISIBLE` as well,
# unless a site has turned that off.
_GIVEN_BY_SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
# Each rank has a value of its own, or one that the mesh depends on. (OMP_NUM_THREADS, which the
# mesh sets as well, is taken from what users pass on.)
SET_BY_MESH = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "OPENBLAS_NUM_THREADS",
        "CELLMESH_MESH",
    }
)


class Surroundings(msgspec.Struct, frozen=True, array_like=True):
    """What ranks that are forked from now on have otherwise than their zygote.

    Attributes:
        environment: variables and their values; None for one that is removed.
        cwd: the working directory; empty for the zygote's.
    """

    environment: dict[bytes, bytes | None] = {}
    cwd: bytes = b""

    def __hash__(self) -> int:
        return hash((frozenset(self.environment.items()), self.cwd))

    def __repr__(self) -> str:
        return f"<Surroundings of {len(self.environment)} variables>"  # they may be secret


def choose_gpus(asked: Sequence[str] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Choose which GPUs the ranks of this host see, among those that an engine has given to it.

    Args:
        asked: indices into what was given, or UUIDs; None for all that was given.
        environment: of the agent, or of the notebook on one host.

    Returns:
        What to add to the ranks' environment.

    Raises:
        HostError: an index is beyond what was given.
    """
    source = next((name for name in (VISIBLE, *_GIVEN_BY_SLURM) if name in environment), "")
    text = environment.get(source, "")
    given = [each.strip() for each in text.split(",") if each.strip()]
    if asked is None:
        return {VISIBLE: ",".join(given)} if source in _GIVEN_BY_SLURM else {}
    chosen = []
    for each in asked:
        if each.isdecimal() and source:
            if int(each) >= len(given):
                raise HostError(
                    f"--gpus {','.join(asked)}: there is no GPU {each} among the {len(given)} that "
                    f"this host was given ({source}={text}), which are counted from 0"
                )
            each = given[int(each)]
        chosen.append(each)
    return {VISIBLE: ",".join(chosen)}
