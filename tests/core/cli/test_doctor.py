"""The checks of ``cellmesh doctor`` on made-up machines, and its probe of torch and the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.cli import doctor
from cellmesh.cli.doctor import Driver, Finding, Probe, Torch, run_probe
from cellmesh.errors import HostError

GB = 10**9
TORCH = Torch("torch 2.13.0+cpu", 0.9, True, (), "", 0)
GPU_TORCH = msgspec.structs.replace(TORCH, cuda="13.0", nccl=(2, 28, 9), num_gpus=2)
H100S = Driver("580.65", (13, 0), ("NVIDIA H100",) * 2)


def torch(of: Torch = TORCH, **changes: Any) -> Probe:
    driver = H100S if of is GPU_TORCH else Driver()
    return Probe(msgspec.structs.replace(of, **changes), "", driver)


def with_driver(**changes: Any) -> Probe:
    return Probe(GPU_TORCH, "", msgspec.structs.replace(H100S, **changes))


def examine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    probe: Probe = torch(),  # noqa: B008
    available: int = 16 * GB,
    shm: Any = 16 * GB,
    runtime: Any = 50 * GB,
    trial: Any = "2 ranks with gloo",
    num_ranks: int = 4,
) -> dict[str, Finding]:
    """Run all checks on a machine that is healthy but for what is given; an exception is raised by
    what is tried.
    """

    def returns(value: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return call

    def usage(path: str | Path) -> Any:
        free = shm if str(path) == "/dev/shm" else runtime
        if isinstance(free, OSError):
            raise free
        return SimpleNamespace(free=free, total=16 * GB)

    for name, value in {
        "run_probe": probe,
        "free_bytes": available,
        "make_directory": runtime if isinstance(runtime, Exception) else Path("/run/x"),
        "remove_directory": None,
        "runtime_root": Path("/run/cellmesh"),
        "_try_mesh": trial,
    }.items():
        monkeypatch.setattr(f"cellmesh.cli.doctor.{name}", returns(value))
    monkeypatch.setattr("cellmesh.cli.doctor.shutil.disk_usage", usage)
    found = list(doctor.examine(num_ranks, True))
    monkeypatch.undo()
    return {each.title: each for each in found}


@pytest.mark.parametrize("probe", [torch(), torch(GPU_TORCH, num_gpus=4)], ids=["CPU", "GPUs"])
def test_a_healthy_machine_has_nothing_but_ok(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examine(monkeypatch, probe=probe)
    assert list(found) == list(doctor.CHECKS)
    assert {(each.status, each.remedy) for each in found.values()} == {("ok", "")}
    if probe.driver.gpus:
        assert "NVIDIA H100" in found["GPUs"].text
        assert "NCCL 2.28.9, for up to 4 ranks" in found["GPUs"].text
        found = examine(monkeypatch, probe=with_driver(cuda=(13, 0)))
        assert found["GPUs"].status == "ok", "an older minor version of the driver will do"
        found = examine(monkeypatch, probe=probe, available=2 * GB)
        assert found["memory"].status == "problem", "ranks on GPUs take more"


W, P = "warning", "problem"


@pytest.mark.parametrize(
    ("changes", "title", "status", "text", "remedy"),
    [
        ({"probe": Probe(error="libcudart")}, "torch", P, "libcudart", "-c 'import torch'"),
        ({"probe": torch(GPU_TORCH, cuda="", num_gpus=0)}, "GPUs", W, "without CUDA", "CUDA build"),
        ({"probe": with_driver(cuda=(12, 8))}, "GPUs", P, "built for CUDA 13.0", "CUDA 12"),
        ({"probe": torch(GPU_TORCH, num_gpus=0)}, "GPUs", W, "hides all", "unset CUDA_VISIBLE"),
        ({"available": 280_000_000}, "memory", P, "280.0 MB available", "at most 2,"),
        ({"shm": 64_000_000}, "/dev/shm", W, "64.0 MB of 16.0 GB", "--shm-size"),
        ({"shm": OSError(2, "No such file")}, "/dev/shm", W, "No such file", "mount"),
        ({"runtime": HostError("chmod 700")}, "runtime directory", P, "chmod", "JUPYTER_RUNTIME"),
        ({"runtime": 10**6}, "runtime directory", P, "1.0 MB free", "free some space"),
        ({"trial": HostError("no")}, "a real mesh", P, "HostError: no", "doctor --json"),
    ],
)
def test_one_thing_wrong_gives_one_finding(
    changes: Any, title: str, status: str, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = examine(monkeypatch, **changes)
    found = findings[title]
    assert (found.status, text in found.text, remedy in found.remedy) == (status, True, True), found
    others = {each.title for each in findings.values() if each.status != "ok"} - {title}
    assert others <= ({"GPUs", "memory"} if title == "GPUs" else set())


class _NVMLError(Exception):
    pass


class _LibraryNotFound(_NVMLError):
    pass


def _fails(error: Exception) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise error

    return call


def _nvml(**calls: object) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=_NVMLError,
        NVMLError_LibraryNotFound=_LibraryNotFound,
        **{
            "nvmlInit": lambda: None,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _: "A100",
            **calls,
        },
    )


TWO = Driver("570.1", (12, 8), ("A100", "A100"))


@pytest.mark.parametrize(
    ("nvml", "driver"),
    [
        (None, Driver()),
        (_nvml(nvmlInit=_fails(_LibraryNotFound())), Driver()),
        (_nvml(nvmlInit=_fails(_NVMLError("mismatch"))), Driver(error="mismatch")),
        (_nvml(), TWO),
    ],
    ids=["no package", "no driver", "broken driver", "two GPUs"],
)
def test_driver_read_through_nvml(
    nvml: SimpleNamespace | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert doctor.probe_driver() == driver


@pytest.mark.parametrize(
    ("code", "timeout_s", "error"),
    [
        ("import os; os.kill(os.getpid(), 4)", 60, "was killed by SIGILL"),
        ("raise SystemExit('libtorch is broken')", 60, "exited with 1. libtorch is broken"),
        ("import select; select.select([], [], [], 60)", 1, "has not ended after 1 s"),
    ],
)
def test_torch_that_crashes_or_hangs_is_named(code: str, timeout_s: float, error: str) -> None:
    found = run_probe([sys.executable, "-c", code], timeout_s)
    assert found.torch is None
    assert error in found.error
