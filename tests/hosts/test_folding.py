"""What eight ranks on four hosts say alike is shown once, with all ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

import cellmesh as cm
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.errors import RankFailure
from tests.conftest import own_runtime_dir

from .netns import Host

STEPS = """
for step in range(20):
    dist.all_reduce(torch.ones(4))
    print("step", step)
"""


@pytest.fixture(scope="module")
def mesh(machines: list[Host]) -> Iterator[cm.Mesh]:
    with own_runtime_dir(), cm.start(hosts="cm1:2,cm2:2,cm3:2,cm4:2", lease_s=60) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def _nothing_is_left(mesh: cm.Mesh, machines: list[Host]) -> Iterator[None]:
    """As of `conftest`, for a mesh that goes on."""
    yield
    for host in machines:
        host.mend()


def shown(mesh: cm.Mesh, source: str) -> list[str]:
    """What a cell shows."""
    text = io.StringIO()
    run = mesh.submit_cell(source, sink=ConsoleSink(text, text))
    run.wait(60.0)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("is_slow", [False, True])
def test_lines_and_values_of_all_ranks_are_shown_once(
    is_slow: bool, mesh: cm.Mesh, machines: list[Host]
) -> None:
    if is_slow:
        machines[1].slow("1mbit")
    expected = [*(f"[0-7] step {step}" for step in range(20)), "[0-7] 7"]
    assert shown(mesh, f"{STEPS}\n7") == expected


def test_tracebacks_of_all_ranks_are_shown_once(
    mesh: cm.Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailure, match="ranks 0-7 raised ZeroDivisionError"):
        mesh.cell("1 / 0")
    text = "".join(capfd.readouterr())
    assert text.count("division by zero") == 1
    assert "[0-7]" in text
