"""The zygote that waits for a notebook's next mesh: what is decided about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cellmesh.controller.session.launch.prestart import State, conditions, decide
from cellmesh.wire.marks import argument, kernel_of


@pytest.mark.parametrize(
    ("state", "has_changed", "expected"),
    [
        ("none", False, "make"),
        ("importing", False, "use"),
        ("ready", False, "use"),
        ("failed", False, "start cold"),
        ("ended", False, "make"),
        *[(state, True, "make") for state in ("none", "importing", "ready", "failed", "ended")],
    ],
)
def test_a_mesh_starts_from_a_zygote_that_fits(
    state: State, has_changed: bool, expected: str
) -> None:
    assert decide(state, {"TZ": "A"}, {"TZ": "B" if has_changed else "A"}) == expected


@pytest.mark.parametrize(
    ("variable", "matters"),
    [("TORCH_LOGS", True), ("WANDB_PROJECT", True), ("CUDA_MODULE_LOADING", False)],
)
def test_variables_matter_that_torch_does_not_set_itself(variable: str, matters: bool) -> None:
    assert (conditions({variable: "1"}, sys.path) != conditions({}, sys.path)) == matters


def test_another_torch_matters_and_another_directory_on_the_path_does_not(tmp_path: Path) -> None:
    before = conditions({}, sys.path)
    assert conditions({}, ["", str(tmp_path), *sys.path]) == before
    torch = tmp_path / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.touch()
    other = conditions({}, [str(tmp_path), *sys.path])
    assert other != before
    os.utime(torch, (1, 1))  # as when it is installed again
    assert conditions({}, [str(tmp_path), *sys.path]) not in (before, other)


def test_a_waiting_zygote_is_known_by_its_argument_under_one_root() -> None:
    root = Path("/run/user/me/cellmesh")
    words = ["python", "-c", "...", argument(root, 4711), "/proc/self/fd/0"]
    assert kernel_of(root, words) == 4711
    assert kernel_of(Path("/run/user/me"), words) == 0
    assert kernel_of(root, ["vi", f"{root}/zygote-of-x", f"{root}/mesh-1/ticket.json"]) == 0
