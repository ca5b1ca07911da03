"""Maps torchrun's options to those of a start, for ``cellmesh run``. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MeshUsageError
from ..wire.verbs import StreamName

_HOSTS = (
    "several hosts are --hosts a:4,b:4 (by ssh), or --nodes 2 --nproc-per-node 4 with --launch "
    "slurm, ray or torchrun"
)
_LOCAL = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?|0\.0\.0\.0)?(:\d*)?")
BOTH: tuple[StreamName, ...] = ("stdout", "stderr")
_STREAMS = {"0": BOTH[:0], "1": BOTH[:1], "2": BOTH[1:], "3": BOTH}

# Options of torchrun that mean the same here only with some values: a pattern of these, and the
# meaning of the others here.
_ON_ONE_HOST: Mapping[str, tuple[str, str]] = {
    "nnodes": ("1|1:1", _HOSTS),
    "node_rank": ("0", _HOSTS),
    "rdzv_endpoint": (_LOCAL.pattern, _HOSTS),
    "master_addr": (_LOCAL.pattern, _HOSTS),
    "max_restarts": ("0", "a failed script ends; -i and --keep leave its ranks to you"),
    "start_method": ("spawn", "ranks are forked from a process that has imported torch"),
}
# Those that choose between ways of torchrun's own, or that the mesh chooses itself.
_WITHOUT_MEANING = (
    "rdzv_backend rdzv_id rdzv_conf master_port local_addr monitor_interval event_log_handler role"
)
_REFUSED: Mapping[str, str] = {
    "no_python": "a program that is not Python needs torchrun",
    "logs_specs": "--log-dir, --redirects and --tee choose where output goes",
    "duplicate_stdout_filters": "filter the files of --log-dir, as with grep",
    "duplicate_stderr_filters": "filter the files of --log-dir, as with grep",
    "numa_binding": "start torchrun for it, or bind in the script (torch.numa)",
    "virtual_local_rank": "each rank sees all GPUs (--gpus chooses them), and takes LOCAL_RANK's",
    "signals_to_handle": "SIGINT interrupts the script; SIGTERM, SIGHUP and SIGQUIT are passed on",
}
FLAGS = ("no_python", "virtual_local_rank", "standalone", "run_path")
# All options of torchrun's that need no further mention in the help.
UNSEEN = (*_ON_ONE_HOST, *_WITHOUT_MEANING.split(), *_REFUSED, "standalone", "run_path")


def check(given: Mapping[str, Any]) -> None:
    """Check options of torchrun that have no effect here.

    Args:
        given: name -> value, for the options that were given.

    Raises:
        MeshUsageError: an option has a value that means something else here; says how to get it.
    """
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if name in _REFUSED:
            raise MeshUsageError(f"{option} is not supported: {_REFUSED[name]}")
        pattern, instead = _ON_ONE_HOST.get(name, ("", ""))
        if instead and not re.fullmatch(pattern, value):
            raise MeshUsageError(f"{option} {value} means nothing here: {instead}")


def count_ranks(text: str, num_gpus: Callable[[], int], num_cores: int) -> int:
    """Return the number of ranks that ``--nproc-per-node`` asks for.

    Args:
        text: a number, ``auto`` (as ``gpu``, or ``cpu`` without GPUs), ``gpu`` or ``cpu``.
        num_gpus: returns the number of GPUs that ranks may use.
        num_cores: number of cores of this host.

    Raises:
        MeshUsageError: the text is none of these, or there is no GPU for ``gpu``.
    """
    if text == "cpu":
        return num_cores
    if text in ("gpu", "auto"):
        num = num_gpus()
        if not num and text == "gpu":
            raise MeshUsageError("--nproc-per-node gpu: this host has no GPU: say cpu or a number")
        return num or num_cores
    if not re.fullmatch(r"[1-9]\d*", text):
        raise MeshUsageError(
            f"--nproc-per-node {text} is no number of ranks: say one from 1, auto, gpu or cpu"
        )
    return int(text)


def streams_of(option: str, text: str, num_ranks: int) -> dict[int, tuple[StreamName, ...]]:
    """Return rank -> the streams that ``--redirects`` or ``--tee`` name.

    Args:
        option: ``--redirects`` or ``--tee``.
        text: ``1`` for stdout, ``2`` for stderr, ``3`` for both, of all ranks; or ``0:1,2:3``.
        num_ranks: number of ranks.

    Raises:
        MeshUsageError: the text does not have that form, or names a rank that is not there.
    """
    if text in _STREAMS:
        return dict.fromkeys(range(num_ranks), _STREAMS[text])
    chosen: dict[int, tuple[StreamName, ...]] = {}
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*:\s*([0-3])\s*", word)
        if found is None or int(found[1]) >= num_ranks:
            raise MeshUsageError(
                f"{option} {text}: say 1 (stdout), 2 (stderr) or 3 (both) for all ranks, or for "
                f"single ranks below {num_ranks} like 0:3,1:2"
            )
        chosen[int(found[1])] = _STREAMS[found[2]]
    return chosen
