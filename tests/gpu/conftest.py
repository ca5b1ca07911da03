"""A machine with one GPU or more; without one, the tests that can do so run the same code on the
CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import cellmesh as cm
from tests.conftest import clean_runtime_dir
from tests.mesh.conftest import Recorder

NUM_GPUS = max(0, torch.cuda._device_count_nvml()) if torch.backends.cuda.is_built() else 0
DEVICE_TYPE = "cuda" if NUM_GPUS else "cpu"

Note = Callable[[str], None]


def needs_gpus(number: int) -> pytest.MarkDecorator:
    """Skip a test where there are fewer GPUs."""
    return pytest.mark.skipif(number > NUM_GPUS, reason=f"needs {number} GPU(s), found {NUM_GPUS}")


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Add a line to what docs/gpu.md says of the test."""
    return lambda text: record_property("seen", text)


@pytest.fixture
def recorder() -> Recorder:
    """A sink that remembers what a cell has shown."""
    return Recorder()


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    """Four ranks on gloo, which share the GPUs; without a GPU they compute on the CPU."""
    with clean_runtime_dir(), cm.start(4, backend="gloo") as started:
        yield started
