"""Programs that are failed, stopped and killed in the middle of a step, and run again each time:
they compute in the end what their scripts do, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from tests.conftest import clean_runtime_dir
from tests.exactness.comparing import Losses, difference
from tests.exactness.launching import EXACT, Job
from tests.mesh.conftest import Recorder
from tests.programs.conftest import TORCH
from tests.programs.running import FAULTS, STEPS, Program, job_of

pytestmark = pytest.mark.timeout(200)

PROGRAMS = [
    Program("ddp_example"),
    Program("managed_gloo"),
    Program("run_argparse", count=6, argv=("--steps=3", "--lr=0.1"), is_whole=True),
]


@pytest.fixture(scope="module")
def quick() -> Iterator[cm.Mesh]:
    """Two ranks that are released a moment after one has failed."""
    with clean_runtime_dir(), cm.start(2, settle_s=0.1, preload=TORCH) as started:
        yield started


class RankIsNew(Exception):
    """A program has to be run again from its first cell."""


class Pressed:
    """A program on a mesh, whose ``steps`` are struck before they are run to their end."""

    def __init__(self, program: Program, mesh: cm.Mesh, folder: Path) -> None:
        self.program, self.mesh, self.folder = program, mesh, folder
        folder.mkdir()
        mesh.restart()
        self.enter(mesh)

    def enter(self, ranks: cm.Ranks) -> None:
        """Have ranks that are new work in the folder, and know how to be struck."""
        ranks.cell(f"import os\nos.chdir({str(self.folder)!r})\n{FAULTS}")

    def run(self, *strikes: Callable[[str], None]) -> Losses:
        """Run the cells, and ``steps`` also once by each of `strikes`; return their results."""
        for mark, text in self.program.cells():
            if mark == STEPS:
                for strike in strikes:
                    strike(text)
            self.mesh.cell(text, argv=self.program.argv)
        return {
            rank: [float.fromhex(each) for each in numbers]
            for rank, numbers in enumerate(self.mesh.pull(EXACT).list)
        }

    def _arm(self, action: str) -> cm.Ranks:
        program = self.program
        ranks = self.mesh[program.rank]
        ranks.cell(f"strike_{program.fault}({program.count}, {action})")
        return ranks

    def fail(self, steps: str) -> None:
        """One rank raises."""
        self._arm("fail")
        with pytest.raises(cm.RankFailure, match="injected"):
            self.mesh.cell(steps, argv=self.program.argv)

    def stop(self, steps: str) -> None:
        """The stop button is pressed while one rank computes and the other waits for it."""
        self._arm("hold")
        recorder = Recorder()
        run = self.mesh.submit_cell(steps, argv=self.program.argv, sink=recorder)
        recorder.wait_for_line("held")
        run.interrupt()
        with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
            run.result(timeout_s=60)

    def kill(self, steps: str) -> None:
        """One rank ends, with what it holds; it is replaced by one that holds nothing."""
        self._arm("die")
        with pytest.raises(cm.RankFailure, match="SIGKILL"):
            self.mesh.cell(steps, argv=self.program.argv)
        self.mesh.heal()
        self.enter(self.mesh[self.program.rank])
        raise RankIsNew


def test_program(
    program: Program, quick: cm.Mesh, launch: Callable[[Job], Losses], tmp_path: Path
) -> None:
    wanted = launch(job_of(program, tmp_path / "script"))
    assert any(wanted.values()), "the program left no losses"
    pressed = Pressed(program, quick, tmp_path / "cells")
    found = {"after a failure and a stop": pressed.run(pressed.fail, pressed.stop)}
    found["run again"] = pressed.run()
    with pytest.raises(RankIsNew):
        pressed.run(pressed.kill)
    found["after a death"] = pressed.run()
    differences = [difference(way, each, "as a script", wanted) for way, each in found.items()]
    assert not any(differences), "\n".join(filter(None, differences))
