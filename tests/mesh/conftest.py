"""Real processes on gloo."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.output.bars import Bars
from cellmesh.controller.output.fold import Block, Gap, Line, Live, Rich, Trace
from cellmesh.controller.ranks import Ranks
from cellmesh.controller.session import start as starting
from cellmesh.controller.session.launch.prestart import Prestart, conditions
from cellmesh.wire.status import RankState
from tests.conftest import FOLD, PATIENCE_S, clean_runtime_dir
from tests.support.shared_prestart import SharedPrestart


def state_of(ranks: Ranks, rank: int) -> RankState:
    """Return what a rank does now; a rank of a busy machine may answer after `states` has given
    up.
    """
    for _ in range(30):
        if (state := ranks.states().get(rank)) is not None:
            return state
    raise AssertionError(f"rank {rank} does not answer")


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in PATIENCE_S.items():
            patch.setattr(f"{FOLD}.{name}", seconds)
        yield


@pytest.fixture(scope="session")
def fit_prestart(shared_prestart: SharedPrestart) -> Callable[[], Prestart | None]:
    """Give the zygote that waits for all meshes, unless a test has changed what an import of torch
    reads.
    """
    made_in = conditions(os.environ, sys.path)
    return lambda: shared_prestart if conditions(os.environ, sys.path) == made_in else None


@pytest.fixture(scope="module", autouse=True)
def _prestart(
    request: pytest.FixtureRequest,
    shared_prestart: SharedPrestart,
    fit_prestart: Callable[[], Prestart | None],
) -> Iterator[None]:
    """Fork a module's meshes from one waiting zygote, which saves two seconds of a core for each
    mesh.

    The meshes of a module with `STARTS_COLD = True` import torch, as those of scripts do.
    """
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "STARTS_COLD", False):
            patch.setattr(shared_prestart, "is_lent", False)
        else:
            patch.setattr(starting, "own_prestart", fit_prestart)
        yield


@pytest.fixture
def starts_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test's own meshes import torch, as those of scripts do."""
    monkeypatch.setattr(starting, "own_prestart", lambda: None)


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    """Four ranks, 2 x 2, shared by a module's tests."""
    with clean_runtime_dir(), cm.start(4, mesh={"dp": 2, "tp": 2}) as started:
        yield started


@pytest.fixture(scope="module")
def quick() -> Iterator[cm.Mesh]:
    """Two ranks, which are released soon after a failure, shared by a module's tests."""
    with clean_runtime_dir(), cm.start(2, settle_s=0.1) as started:
        yield started


@pytest.fixture(scope="module")
def meshes() -> Iterator[tuple[cm.Mesh, cm.Mesh]]:
    """A mesh of two ranks, and one of a single rank without a group, shared by a module's tests."""
    with (
        clean_runtime_dir(),
        cm.start(2, name="left") as left,
        cm.start(1, name="right", group=False) as right,
    ):
        yield left, right


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory of the test's own, in which nothing is left in the end."""
    with clean_runtime_dir() as directory:
        yield directory


@pytest.fixture
def own_mesh(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Two ranks for one test that harms them."""
    started = cm.start(2)
    yield started
    started.stop()


class Recorder:
    """A sink that remembers, and wakes who waits for something to be shown."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.notes: list[str] = []
        self._changed = threading.Condition()

    def show(self, blocks: Sequence[Block]) -> None:
        with self._changed:
            self.blocks += blocks
            self._changed.notify_all()

    def note(self, text: str) -> None:
        with self._changed:
            self.notes.append(text)
            self._changed.notify_all()

    def status(self, text: str, final: bool) -> None:
        self.note(text)

    def lines(self) -> list[tuple[tuple[int, ...], str]]:
        return [
            (block.ranks, block.item.text) for block in self.blocks if isinstance(block.item, Line)
        ]

    def items(self, kind: type[Rich | Trace | Gap | Bars | Live]) -> list[Block]:
        return [block for block in self.blocks if isinstance(block.item, kind)]

    def wait_for_line(self, text: str, timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(text == line for _, line in self.lines()), timeout_s
            ), f"{text!r} was not shown: {self.lines()}"

    def wait_for_trace(self, ranks: tuple[int, ...], timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(block.ranks == ranks for block in self.items(Trace)), timeout_s
            ), f"no traceback of {ranks} was shown"

    def wait_for_note(self, part: str, timeout_s: float = 20.0) -> str:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(part in note for note in self.notes), timeout_s
            ), f"{part!r} was not noted: {self.notes}"
            return next(note for note in self.notes if part in note)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
