"""What can only be learnt by importing torch or asking the GPU's driver; runs in a process of its
own.

Both may hang or crash where an installation is broken, and neither is to leave a trace in the
process that asks. The process prints one `Probe` as JSON.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

import msgspec

# NVML's constants (nvml.h).
_NAME_BYTES = 96
_EXCLUSIVE_PROCESS = 3


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of this machine, as its driver knows it.

    Attributes:
        name: the product.
        total_bytes: its memory.
        free_bytes: how much of that is free.
        exclusive: whether it takes only one process at a time (compute mode EXCLUSIVE_PROCESS).
    """

    name: str
    total_bytes: int
    free_bytes: int
    exclusive: bool = False


class Driver(msgspec.Struct, frozen=True):
    """NVIDIA's driver.

    Attributes:
        version: "" where there is no driver.
        cuda: the newest CUDA that it runs, (major, minor).
        gpus: all GPUs, whatever CUDA_VISIBLE_DEVICES says.
        error: what NVML says where it does not work.
    """

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


class Torch(msgspec.Struct, frozen=True):
    """The installed torch.

    Attributes:
        version: of torch.
        import_s: how long the import took, in seconds.
        num_threads: threads of the process after it.
        has_distributed: whether torch.distributed is there.
        has_gloo: whether gloo is.
        has_nccl: whether NCCL is.
        nccl: NCCL's version.
        cuda: the CUDA that torch was built with, "" for none.
        num_gpus: GPUs that it may use (CUDA_VISIBLE_DEVICES).
        initialized_cuda: whether the import set CUDA up, which spoils forks.
    """

    version: str
    import_s: float
    num_threads: int
    has_distributed: bool
    has_gloo: bool
    has_nccl: bool
    nccl: tuple[int, ...]
    cuda: str
    num_gpus: int
    initialized_cuda: bool


class Probe(msgspec.Struct, frozen=True):
    """What the process found.

    Attributes:
        torch: None where it could not be imported.
        error: why it could not.
        driver: the GPU's side.
    """

    torch: Torch | None
    error: str
    driver: Driver


def probe_torch() -> Torch:
    """Import torch and look at it; CUDA is left alone."""
    started_at = time.perf_counter()
    import torch
    import torch.distributed as dist

    import_s = time.perf_counter() - started_at
    num_threads = len(os.listdir("/proc/self/task"))
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return Torch(
        version=str(torch.__version__),
        import_s=import_s,
        num_threads=num_threads,
        has_distributed=dist.is_available(),
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        has_nccl=has_nccl,
        nccl=tuple(torch.cuda.nccl.version()) if has_nccl else (),  # type: ignore[no-untyped-call]
        cuda=torch.version.cuda or "",
        # By NVML, as the zygote counts them.
        num_gpus=max(0, torch.cuda._device_count_nvml()) if torch.version.cuda else 0,
        initialized_cuda=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlError(Exception):
    pass


def probe_driver(library: str = "libnvidia-ml.so.1") -> Driver:
    """Ask NVML, which needs no CUDA.

    Args:
        library: NVML's shared library.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return Driver()
    try:
        _call(nvml, "nvmlInit_v2")
        return _read_driver(nvml)
    except _NvmlError as error:
        return Driver(error=str(error))


def _call(nvml: ctypes.CDLL, name: str, *args: object) -> None:
    try:
        status = getattr(nvml, name)(*args)
    except AttributeError:
        raise _NvmlError(f"the driver is too old: it has no {name}") from None
    if status != 0:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise _NvmlError(f"{name}: {nvml.nvmlErrorString(status).decode(errors='replace')}")


def _read_driver(nvml: ctypes.CDLL) -> Driver:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    number = ctypes.c_int()
    count = ctypes.c_uint()
    _call(nvml, "nvmlSystemGetDriverVersion", text, _NAME_BYTES)
    version = text.value.decode(errors="replace")
    _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    gpus = []
    for index in range(count.value):
        device, memory, mode = ctypes.c_void_p(), _Memory(), ctypes.c_int()
        _call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
        _call(nvml, "nvmlDeviceGetName", device, text, _NAME_BYTES)
        _call(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        try:
            _call(nvml, "nvmlDeviceGetComputeMode", device, ctypes.byref(mode))
        except _NvmlError:  # a slice of a GPU has none
            mode.value = 0
        gpus.append(
            Gpu(
                name=text.value.decode(errors="replace"),
                total_bytes=memory.total,
                free_bytes=memory.free,
                exclusive=mode.value == _EXCLUSIVE_PROCESS,
            )
        )
    cuda = (number.value // 1000, number.value % 1000 // 10)
    return Driver(version=version, cuda=cuda, gpus=tuple(gpus))


def main() -> None:
    """Probe, and print the `Probe`."""
    torch, error = None, ""
    try:
        torch = probe_torch()
    except Exception as exc:  # whatever a broken installation raises is what is to be told
        error = f"{type(exc).__name__}: {exc}"
    sys.stdout.buffer.write(msgspec.json.encode(Probe(torch, error, probe_driver())) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
