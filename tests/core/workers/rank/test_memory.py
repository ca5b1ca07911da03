"""How busy a GPU is, with an NVML that is made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cellmesh.workers.rank.memory import UNKNOWN, open_gpu


class FakeNvml:
    """NVML with one GPU, as the module `pynvml`; one of its functions may fail."""

    NVMLError = ValueError

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.called: list[str] = []

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self.failing:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("find")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> SimpleNamespace:
        self._call("read")
        return SimpleNamespace(gpu={"GPU-abc": 73}[gpu], memory=0)


def test_gpu_load_of_a_gpu_that_nvml_finds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = open_gpu("GPU-abc")
    assert [read(), read()] == [73, 73]
    assert nvml.called == ["init", "find", "read", "read"]


@pytest.mark.parametrize("failing", ["init", "find", "read"])
def test_gpu_load_where_nvml_fails(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(failing))
    read = open_gpu("GPU-abc")
    assert [read(), read()] == [UNKNOWN, UNKNOWN]


def test_gpu_load_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu("GPU-abc")() == UNKNOWN
