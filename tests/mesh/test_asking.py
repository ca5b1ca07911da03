"""``input()`` on ranks, answered where their run is waited for."""

from __future__ import annotations

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted

from .answering import Typist
from .conftest import Recorder


def test_question_of_all_ranks_is_asked_once(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    typist = Typist("Ada").sit_down(monkeypatch)
    mesh.submit_cell("name = input('name? ')\nprint('hello', name)", sink=recorder).result()
    assert typist.prompts == ["[0-3] name? "]
    assert recorder.lines() == [((0, 1, 2, 3), "hello Ada")]


def test_different_questions_are_asked_one_by_one(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    typist = Typist("a", "b", "c").sit_down(monkeypatch)
    mesh.cell("answer = input('even? ' if rank % 2 == 0 else f'{rank}? ')")
    assert sorted(typist.prompts) == ["[0,2] even? ", "[1] 1? ", "[3] 3? "]
    by_prompt = dict(zip(typist.prompts, "abc", strict=True))
    expected = [
        by_prompt[prompt] for prompt in ("[0,2] even? ", "[1] 1? ", "[0,2] even? ", "[3] 3? ")
    ]
    assert mesh.pull("answer").list == expected


def test_printed_output_precedes_the_question(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def look() -> str:
        seen.append([text for _, text in recorder.lines()])
        return ""

    Typist(look).sit_down(monkeypatch)
    mesh.submit_cell(
        "print('a line'); print('and half of one', end='')\ninput()", sink=recorder
    ).result()
    assert seen == [["a line", "and half of one"]]


def test_end_of_input_reaches_the_rank(mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    Typist(EOFError).sit_down(monkeypatch)
    with pytest.raises(cm.RankFailure, match="ranks 0-3 raised EOFError"):
        mesh.cell("input()")


def test_ctrl_c_at_the_question_interrupts_the_run(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    Typist(KeyboardInterrupt).sit_down(monkeypatch)
    with pytest.raises(RanksInterrupted, match="ranks 0-3 raised KeyboardInterrupt"):
        mesh.cell("name = 'before'\nname = input()")
    assert mesh.pull("name").list == ["before"] * 4


def test_unattended_question_is_shown_and_can_be_answered_later(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mesh.submit_cell("print(input('late? '))", sink=recorder)
    note = recorder.wait_for_note("late?")
    assert "[0-3] late?" in note
    assert ".result()" in note
    assert {state.asks for state in mesh.states().values()} == {True}
    Typist("yes").sit_down(monkeypatch)
    run.result()
    assert recorder.lines() == [((0, 1, 2, 3), "yes")]


def test_unanswered_question_can_be_interrupted(mesh: cm.Mesh, recorder: Recorder) -> None:
    run = mesh.submit_cell("input('late? ')", sink=recorder)
    recorder.wait_for_note("late?")
    assert run.cancel()
    assert run.wait(10.0)
    with pytest.raises(RanksInterrupted):
        run.raise_failure()
    assert not run.cancel()


def test_a_thread_of_a_cell_may_ask(mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("7").sit_down(monkeypatch)
    mesh[2].run(ask_in_a_thread)
    assert typist.prompts == ["[2] from a thread: "]


def ask_in_a_thread() -> None:
    import threading

    heard: list[str] = []
    thread = threading.Thread(target=lambda: heard.append(input("from a thread: ")))
    thread.start()
    thread.join()
    assert heard == ["7"]


def test_thread_of_an_ended_cell_may_not_ask(mesh: cm.Mesh, recorder: Recorder) -> None:
    mesh[0:1].submit_cell(
        "import threading\n"
        "go = threading.Event()\n"
        "def late():\n"
        "    go.wait()\n"
        "    try:\n"
        "        input()\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "thread = threading.Thread(target=late)\n"
        "thread.start()",
        sink=recorder,
    ).result()
    mesh[0:1].cell("go.set()\nthread.join()")
    recorder.wait_for_line("input() can ask only while the cell runs that it belongs to")
