"""How busy a GPU is, with a driver's library that is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from cellmesh.workers.rank.gpu_load import UNKNOWN, GpuLoad


class Library:
    """What the driver's library offers, for one GPU."""

    def __init__(self, percent: int, failing: str = "") -> None:
        self.percent = percent
        self.failing = failing
        self.num_opened = 0

    def nvmlInit_v2(self) -> int:
        self.num_opened += 1
        return int(self.failing == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return int(uuid != b"GPU-abc")

    def nvmlDeviceGetUtilizationRates(self, handle: Any, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = self.percent
        return int(self.failing == "rates")


def test_the_driver_is_asked_and_opened_once() -> None:
    library = Library(73)
    load = GpuLoad("abc", lambda name: library)
    assert library.num_opened == 0
    assert [load.percent(), load.percent()] == [73, 73]
    assert library.num_opened == 1


@pytest.mark.parametrize(("uuid", "failing"), [("other", ""), ("abc", "init"), ("abc", "rates")])
def test_what_the_driver_does_not_tell_is_unknown(uuid: str, failing: str) -> None:
    load = GpuLoad(uuid, lambda name: Library(73, failing))
    assert [load.percent(), load.percent()] == [UNKNOWN, UNKNOWN]


def test_without_a_driver_it_is_unknown_and_not_looked_for_again() -> None:
    tries = []

    def missing(name: str) -> Any:
        tries.append(name)
        raise OSError(name)

    load = GpuLoad("abc", missing)
    assert [load.percent(), load.percent()] == [UNKNOWN, UNKNOWN]
    assert len(tries) == 1
