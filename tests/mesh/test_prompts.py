"""``input()`` and the debugger on ranks: the prompt is asked where their run is waited for.

The core's tests of stdin have the order of questions and the ways in which they end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted

from .conftest import Recorder

SUM = "dist.all_reduce(t := torch.ones(1))\nprint('sum', t.item())"


class Typist:
    """Stands in for ``input()`` and ``getpass()`` of this process; types what it was given, in
    order.

    Args:
        answers: what to type; an exception is raised, a function called.
    """

    def __init__(self, *answers: str | type[BaseException] | Callable[[], str]) -> None:
        self._left = list(answers)
        self.prompts: list[str] = []

    def __call__(self, prompt: str = "") -> str:
        self.prompts.append(prompt)
        assert self._left, f"nobody expected to be asked {prompt!r}"
        answer = self._left.pop(0)
        if isinstance(answer, str):
            return answer
        if isinstance(answer, type):
            raise answer
        return answer()


@pytest.fixture
def sit_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Typist]:
    """Have a typist take over the keyboard."""

    def give(*answers: str | type[BaseException] | Callable[[], str]) -> Typist:
        typist = Typist(*answers)
        monkeypatch.setattr("builtins.input", typist)
        monkeypatch.setattr("getpass.getpass", typist)
        return typist

    return give


Keyboard = Callable[..., Typist]


def plain(recorder: Recorder) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(text for _, text in recorder.lines()))


# ---- input()


def test_question_of_all_ranks_is_asked_once_after_what_was_printed(
    mesh: cm.Mesh, recorder: Recorder, sit_down: Keyboard
) -> None:
    seen: list[list[str]] = []

    def answer() -> str:
        seen.append([text for _, text in recorder.lines()])
        return "Ada"

    typist = sit_down(answer)
    mesh.submit_cell("print('half', end='')\nprint(input('name? '))", sink=recorder).result()
    assert typist.prompts == ["[0-3] name? "]
    assert seen == [["half"]]
    assert recorder.lines()[-1] == ((0, 1, 2, 3), "Ada")


def test_different_questions_are_asked_one_by_one(mesh: cm.Mesh, sit_down: Keyboard) -> None:
    typist = sit_down("a", "b", "c")
    mesh.cell("answer = input('even? ' if rank % 2 == 0 else f'{rank}? ')")
    assert sorted(typist.prompts) == ["[0,2] even? ", "[1] 1? ", "[3] 3? "]
    given = dict(zip(typist.prompts, "abc", strict=True))
    asked = ("[0,2] even? ", "[1] 1? ", "[0,2] even? ", "[3] 3? ")
    assert mesh.pull("answer").list == [given[prompt] for prompt in asked]


def test_end_of_input_and_ctrl_c_reach_the_ranks(mesh: cm.Mesh, sit_down: Keyboard) -> None:
    sit_down(EOFError, KeyboardInterrupt)
    with pytest.raises(cm.RankFailure, match="ranks 0-3 raised EOFError"):
        mesh.cell("input()")
    with pytest.raises(RanksInterrupted, match="ranks 0-3 raised KeyboardInterrupt"):
        mesh.cell("input()")


def wait_until_asked(mesh: cm.Mesh) -> None:
    for _ in range(2000):
        if {state.asks for state in mesh.states().values()} == {True}:
            return
    raise AssertionError(mesh.states())


def test_unattended_question_can_be_answered_later_or_interrupted(
    mesh: cm.Mesh, recorder: Recorder, sit_down: Keyboard
) -> None:
    run = mesh.submit_cell("print(input('late? '))", sink=recorder)
    wait_until_asked(mesh)
    sit_down("yes")
    run.result()
    assert recorder.lines() == [((0, 1, 2, 3), "yes")]
    run = mesh.submit_cell("input('never? ')", sink=recorder)
    wait_until_asked(mesh)
    assert run.cancel()
    assert run.wait(10.0)
    with pytest.raises(RanksInterrupted):
        run.raise_failure()


def test_a_thread_may_ask_while_its_cell_runs(
    mesh: cm.Mesh, recorder: Recorder, sit_down: Keyboard
) -> None:
    typist = sit_down("7")
    mesh[2:3].cell(
        "import threading\ngo, heard = threading.Event(), []\n"
        "def ask(): heard.append(input('thread? '))\n"
        "def late():\n    go.wait()\n    try: input()\n    except RuntimeError as e: print(e)\n"
        "thread = threading.Thread(target=ask); thread.start(); thread.join()"
    )
    assert typist.prompts == ["[2] thread? "]
    assert mesh[2].pull("heard") == ["7"]
    mesh[2:3].submit_cell(
        "thread = threading.Thread(target=late); thread.start()", sink=recorder
    ).result()
    mesh[2:3].cell("go.set(); thread.join()")
    recorder.wait_for_line("input() can ask only while the cell runs that it belongs to")


# ---- the debugger


def test_one_rank_is_debugged_while_the_others_wait(
    mesh: cm.Mesh, recorder: Recorder, sit_down: Keyboard
) -> None:
    typist = sit_down("p rank * 10", "c")
    mesh.submit_cell(f"if rank == 1:\n    breakpoint()\n    x = 1\n{SUM}", sink=recorder).result()
    assert typist.prompts == ["[1] (Pdb) "] * 2
    text = plain(recorder)
    assert re.search(r"In\[\d+\]\(3\)<module>", text)
    assert "----> 3     x = 1" in text
    assert "\n10\n" in text
    assert ((0, 1, 2, 3), "sum 4.0") in recorder.lines()


def test_leaving_fails_the_cell_there_and_releases_the_others(
    mesh: cm.Mesh, sit_down: Keyboard
) -> None:
    sit_down("q", KeyboardInterrupt)
    with pytest.raises(cm.RankFailure) as caught:
        mesh.cell(f"kept = rank\nif rank == 1:\n    breakpoint()\n{SUM}")
    assert re.match(
        r"rank 1 left the debugger \(line 4\); ranks 0,2-3 waited in all_reduce at line 4 "
        r"for \d\.\d s and were released$",
        str(caught.value),
    )
    assert mesh.pull("kept").list == [0, 1, 2, 3]
    with pytest.raises(RanksInterrupted, match="raised KeyboardInterrupt"):
        mesh.cell("breakpoint()\nx = 1")
    mesh.cell(SUM)


def test_breakpoints_in_imported_and_in_async_code(
    mesh: cm.Mesh, recorder: Recorder, sit_down: Keyboard, tmp_path: Path
) -> None:
    (tmp_path / "stopping.py").write_text("def twice(x):\n    breakpoint()\n    return 2 * x\n")
    sit_down("p x", "u", "p here", "c")
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom stopping import twice\n"
    mesh[0:1].submit_cell(f"{source}here = 'there'\ny = twice(21)", sink=recorder).result()
    shown = plain(recorder)
    assert "\n21\n" in shown
    assert "'there'" in shown
    typist = sit_down("p q", "n", "!q = 5", "c")
    mesh[0:1].cell("import asyncio\nq = 1\nbreakpoint()\nawait asyncio.sleep(0)\nq += 1")
    assert typist.prompts == ["[0] (Pdb) "] * 4
    assert mesh[0].pull("y, q") == (42, 6)
    mesh[0:1].cell("a = 2\na = 3")  # the next cell is not stepped through
    assert mesh[0].run(lambda: __import__("sys").gettrace()) is None


def test_post_mortem_stands_where_the_exception_was_raised(
    mesh: cm.Mesh, recorder: Recorder, sit_down: Keyboard, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(cm.RankFailure):
        mesh[3:4].cell("def divide(a, b):\n    return a / b\ndivide(rank, 0)")
    typist = sit_down("p (a, b)", "u", "w", "q")
    mesh[3].debug()
    assert typist.prompts == ["[3] (Pdb) "] * 4
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "(3, 0)" in text
    assert "----> 2     return a / b" in text.replace("[3] ", "")
    assert "cellmesh" not in text
    # IPython's own ways.
    sit_down("p b", "q")
    mesh[3:4].submit_cell("%debug", sink=recorder).result()
    assert "\n0" in plain(recorder)
    typist = sit_down("p word", "q")
    with pytest.raises(cm.RankFailure, match="KeyError"):
        mesh[3:4].cell("%pdb on\nword = 'there'\n{}[word]")
    mesh[3:4].cell("%pdb off")
    assert typist.prompts == ["[3] (Pdb) "] * 2
