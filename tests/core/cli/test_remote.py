"""Acts of commands: which mesh they are for, and their output as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cellmesh.cli.main import main
from cellmesh.controller.acts import QUIET_S, Exec, Heal, Recorder, Thrown, _result
from cellmesh.controller.output.fold import AlikeLines, Block, Gap, Line, Live, Rich
from cellmesh.wire.peer_calls import PEER_RUNS
from tests.core.cli.test_rendering import put


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tickets lie; a short path, as pytest's own may be too long for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="cm") as directory:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", directory)
        yield Path(directory) / "cellmesh"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["exec", "1"], "no mesh is running: `cellmesh start 4` starts one"),
        (["status", "dev"], "there is no mesh 'dev': `cellmesh start 4` starts one"),
        (["exec"], "give the mesh's name and the code, like `dev 'print(rank)'`"),
        (["pull", "a", "b", "c"], "give the mesh's name and the expression, like `dev loss`"),
    ],
)
@pytest.mark.usefixtures("root")
def test_a_command_without_a_mesh_says_in_one_line_how_to_get_one(
    words: list[str], error: str
) -> None:
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"Error: {error}\n")


def test_code_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\n'\xe4'\n")
    done = CliRunner().invoke(main, ["exec", "-f", str(tmp_path / "a.py")])
    assert (done.exit_code, done.stderr) == (1, "Error: line 2 of the code is not UTF-8\n")


def test_a_mesh_whose_agent_has_ended_is_named_as_such(root: Path) -> None:
    put(root, "ghost")
    done = CliRunner().invoke(main, ["exec", "ghost", "1"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ghost has ended: `cellmesh ps` removes")


def test_a_holder_that_takes_no_commands_is_named(root: Path) -> None:
    put(root, "held", agent_pid=os.getpid(), agent_ticks=_own_ticks())
    done = CliRunner().invoke(main, ["stacks", "held"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: held is held by process 1, which takes no commands")


def _own_ticks() -> int:
    from cellmesh.wire.host import started_ticks

    return started_ticks(os.getpid())


def rich(kind: Any, text: str) -> Rich:
    return Rich(kind, json.dumps({"data": {"text/plain": text}, "metadata": {}}).encode())


def test_output_is_recorded_by_rank_and_equal_ranks_are_one_group() -> None:
    recorder = Recorder(range(4))
    lines = tuple((rank, Line("stdout", f"loss {rank // 3}")) for rank in range(4))
    recorder.show([Block((0, 1, 2, 3), AlikeLines(lines)), Block((3,), Line("stderr", "odd"))])
    recorder.show([Block((0, 1, 2), rich("display", "<Figure>")), Block((3,), Gap(7, 900))])
    recorder.show([Block((0, 1, 2), rich("result", "42")), Block((3,), Live((((3,), "50 %"),)))])
    recorder.note("healed")
    told = recorder.data({3: Thrown("ValueError", "bad", "...", 2, released=True)})
    assert (told["released"], told["notes"]) == ([3], ["healed"])
    first, last = told["groups"]
    assert first == {
        "ranks": (0, 1, 2),
        "stdout": "loss 0\n",
        "stderr": "",
        "displays": ("<Figure>",),
        "value": "42",
        "exception": None,
    }
    assert last["stdout"] == "loss 1\n... 7 lines are left out, and in the rank's log\n"
    assert (last["stderr"], last["exception"].line) == ("odd\n", 2)
    json.dumps(msgspec.to_builtins(told))


def test_the_holders_line_has_the_first_line_of_a_cell_or_the_ranks() -> None:
    assert Exec(source="\nprint(1)\nprint(2)\n").subject == "print(1) ..."
    assert Exec(source="loss").subject == "loss"
    assert (Heal().subject, Heal(ranks="0-2").subject) == ("all ranks", "0-2")


def test_the_run_before_a_command_is_named_and_no_call_that_waits_beside() -> None:
    notes = list[str]()

    def still_runs(limit_s: float | None) -> str:
        if limit_s == QUIET_S:
            raise TimeoutError
        return "value"

    own = SimpleNamespace(number=9, ranks=(0,), interleaves=False, result=still_runs)
    beside = SimpleNamespace(number=3, title="gen.serve", interleaves=True)
    call = SimpleNamespace(number=PEER_RUNS.start, title="gen.sample for t 0", interleaves=False)
    for runs, name in (((beside, own), None), ((beside, own, call), call.title)):
        session = SimpleNamespace(runs=SimpleNamespace(on=lambda _, runs=runs: runs))
        mesh: Any = SimpleNamespace(name="dev", rank_set=SimpleNamespace(session=session))
        caller: Any = SimpleNamespace(sink=SimpleNamespace(note=notes.append))
        assert _result(mesh, own, caller, None) == "value"  # type: ignore[arg-type]
        text = f"waits for {name}, which still runs: `cellmesh interrupt dev` interrupts both"
        assert notes == ([text] if name else [])
