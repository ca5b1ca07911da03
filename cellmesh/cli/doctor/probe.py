"""Facts that need torch to be imported or the GPU's driver to be asked, in a process of its own.

Both may hang or crash where an installation is broken, and neither is to leave a trace in the
process that asks. The probe's process prints one `HostProbe` as JSON.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

_COMMAND = (sys.executable, "-m", __name__)
_PROBE_S = 180.0


class Driver(msgspec.Struct, frozen=True):
    """NVIDIA's driver.

    Attributes:
        version: "" where there is no driver.
        cuda: the newest CUDA that it runs, (major, minor).
        gpus: names of all GPUs, whatever CUDA_VISIBLE_DEVICES says.
        exclusive: whether one takes only one process at a time (compute mode EXCLUSIVE_PROCESS).
        error: what NVML says where it does not work.
    """

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[str, ...] = ()
    exclusive: bool = False
    error: str = ""


class Torch(msgspec.Struct, frozen=True):
    """The installed torch.

    Attributes:
        import_s: how long the import took, in seconds.
        num_threads: threads of the process after the import.
        has_gloo: whether torch.distributed is there, with gloo.
        nccl: NCCL's version, empty where torch is built without it.
        cuda: the CUDA that torch was built with, "" for none.
        num_gpus: GPUs that torch may use (CUDA_VISIBLE_DEVICES).
        initialized_cuda: whether the import set CUDA up, which spoils forks.
    """

    version: str
    import_s: float
    num_threads: int
    has_gloo: bool
    nccl: tuple[int, ...]
    cuda: str
    num_gpus: int
    initialized_cuda: bool


class HostProbe(msgspec.Struct, frozen=True):
    """What the probe's process found.

    Attributes:
        torch: None where it could not be imported.
        error: why it could not.
    """

    torch: Torch | None
    error: str
    driver: Driver


def run_probe(command: Sequence[str] = _COMMAND, timeout_s: float = _PROBE_S) -> HostProbe:
    """Run the probe's process.

    Args:
        command: starts it.
        timeout_s: how long it may take, in seconds.
    """
    # As the agent starts the zygote: OpenBLAS starts its threads when numpy is imported, unless
    # these variables forbid it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return HostProbe(None, f"import torch has not ended after {timeout_s:.0f} s", Driver())
    try:
        return msgspec.json.decode(
            done.stdout.splitlines()[-1] if done.stdout else b"", type=HostProbe
        )
    except msgspec.MsgspecError:
        code = done.returncode
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        ending = f"{killed or f'exited with code {code}'}. {last}".strip()
        return HostProbe(None, f"the process that imported torch {ending}", Driver())


def _probe_torch() -> Torch:
    """Import torch and look at it; CUDA is left alone."""
    started_at = time.perf_counter()
    import torch
    import torch.distributed as dist

    import_s = time.perf_counter() - started_at
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return Torch(
        version=str(torch.__version__),
        import_s=import_s,
        num_threads=len(os.listdir("/proc/self/task")),
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=tuple(torch.cuda.nccl.version()) if has_nccl else (),  # type: ignore[no-untyped-call]
        cuda=torch.version.cuda or "",
        # By NVML, as the zygote counts them.
        num_gpus=max(0, torch.cuda._device_count_nvml()) if torch.version.cuda else 0,
        initialized_cuda=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    )


def _probe_driver() -> Driver:
    """Ask NVML, which needs no CUDA."""
    try:
        import pynvml
    except ImportError:
        return Driver()
    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = [*map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))]
        return Driver(
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(map(pynvml.nvmlDeviceGetName, gpus)),
            exclusive=any(map(_is_exclusive, gpus)),
        )
    except pynvml.NVMLError_LibraryNotFound:
        return Driver()
    except pynvml.NVMLError as error:
        return Driver(error=str(error))


def _is_exclusive(gpu: object) -> bool:
    import pynvml

    try:
        mode: int = pynvml.nvmlDeviceGetComputeMode(gpu)
    except pynvml.NVMLError:  # a slice of a GPU has none
        return False
    return mode == int(pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)


def main() -> None:
    """Probe, and print the `HostProbe`."""
    torch, error = None, ""
    try:
        torch = _probe_torch()
    except Exception as exc:  # whatever a broken installation raises is the finding
        error = f"{type(exc).__name__}: {exc}"
    sys.stdout.buffer.write(msgspec.json.encode(HostProbe(torch, error, _probe_driver())) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
