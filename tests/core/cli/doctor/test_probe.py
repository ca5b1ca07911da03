"""What the probe reads of the GPU's driver, and of a torch that crashes or hangs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cellmesh.cli.doctor import probe
from cellmesh.cli.doctor.probe import Driver, run_probe


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
        NVML_COMPUTEMODE_EXCLUSIVE_PROCESS=3,
        **{
            "nvmlInit": lambda: None,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _: "A100",
            "nvmlDeviceGetComputeMode": lambda index: 3 * index,
            **calls,
        },
    )


@pytest.mark.parametrize(
    ("nvml", "driver"),
    [
        (None, Driver()),
        (_nvml(nvmlInit=_fails(_LibraryNotFound())), Driver()),
        (_nvml(nvmlInit=_fails(_NVMLError("mismatch"))), Driver(error="mismatch")),
        (_nvml(), Driver("570.1", (12, 8), ("A100", "A100"), exclusive=True)),
        (
            _nvml(nvmlDeviceGetComputeMode=_fails(_NVMLError("a slice"))),
            Driver("570.1", (12, 8), ("A100", "A100")),
        ),
    ],
    ids=["no package", "no driver", "broken driver", "exclusive", "slices"],
)
def test_driver_read_through_nvml(
    nvml: SimpleNamespace | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert probe._probe_driver() == driver


@pytest.mark.parametrize(
    ("code", "timeout_s", "error"),
    [
        ("import os; os.kill(os.getpid(), 4)", 60, "was killed by SIGILL"),
        ("raise SystemExit('libtorch is broken')", 60, "exited with code 1. libtorch is broken"),
        ("print('no JSON')", 60, "exited with code 0"),
        ("import select; select.select([], [], [], 60)", 1, "has not ended after 1 s"),
    ],
)
def test_torch_that_crashes_or_hangs_is_named(code: str, timeout_s: float, error: str) -> None:
    found = run_probe([sys.executable, "-c", code], timeout_s)
    assert found.torch is None
    assert error in found.error
