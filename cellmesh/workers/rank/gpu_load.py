"""How busy a GPU is, as NVIDIA's driver tells: its library is called as it is, and no package
needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
UNKNOWN = -1


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class GpuLoad:
    """Reads the load of one GPU.

    The library is loaded at the first reading, which takes some ten milliseconds; later ones take a
    fraction of one.

    Args:
        uuid: the GPU's, without its ``GPU-``; numbers would be those of CUDA_VISIBLE_DEVICES.
        load: gives the driver's library.
    """

    def __init__(self, uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._uuid = uuid
        self._load = load
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        self._is_lost = False

    def percent(self) -> int:
        """In how much of the last moments something ran on it, by whomever; `UNKNOWN` where nobody
        tells.
        """
        if not self._is_lost and self._library is None:
            self._is_lost = not self._open()
        if self._is_lost:
            return UNKNOWN
        found = _Utilization()
        failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(found))
        return UNKNOWN if failed else int(found.gpu)

    def _open(self) -> bool:
        try:
            library = self._load(_LIBRARY)
            uuid = f"GPU-{self._uuid}".encode()
            if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
                uuid, ctypes.byref(self._handle)
            ):
                return False
        except (OSError, AttributeError):  # there is no such driver, or an old one
            return False
        self._library = library
        return True
