"""Questions of ranks over the Jupyter protocol: the kernel's own input requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir

from .test_kernel import WAIT_S, Notebook, open_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh\n%dist_start 3").status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
        check_nothing_left(directory)


def answer(notebook: Notebook, text: str) -> dict[str, object]:
    """Wait for an input request, and answer it."""
    request = notebook.client.get_stdin_msg(timeout=WAIT_S)
    assert request["msg_type"] == "input_request"
    notebook.client.input(text)
    content: dict[str, object] = request["content"]
    return content


def test_input_asks_in_the_cells_box(notebook: Notebook) -> None:
    cell = notebook.send("%%dist\nprint('hello', input('name? '))")
    assert answer(notebook, "Ada") == {"prompt": "[0-2] name? ", "password": False}
    assert notebook.finish(cell).text() == "[0-2] hello Ada\n"


def test_passwords_are_asked_hidden(notebook: Notebook) -> None:
    cell = notebook.send("%%dist --ranks 1\nimport getpass\nprint(len(getpass.getpass('token: ')))")
    assert answer(notebook, "secret") == {"prompt": "[1] token: ", "password": True}
    assert notebook.finish(cell).text() == "[1] 6\n"


def test_the_stop_button_at_the_prompt(notebook: Notebook) -> None:
    cell = notebook.send("%%dist\nkept = rank\nbreakpoint()\nkept = -1")
    assert notebook.client.get_stdin_msg(timeout=WAIT_S)["content"]["prompt"] == "[0-2] (Pdb) "
    notebook.manager.interrupt_kernel()
    outcome = notebook.finish(cell)
    assert outcome.status == "error"
    assert outcome.errors()[-1]["ename"] == "RanksInterrupted"
    assert notebook.run("%%dist\nkept == rank").text() == "[0-2] True\n"


def test_front_end_without_input_is_an_error(notebook: Notebook) -> None:
    notebook.client.allow_stdin = False
    try:
        outcome = notebook.run("%%dist\ninput('name? ')")
    finally:
        notebook.client.allow_stdin = True
    assert outcome.status == "error"
    assert "EOFError: nobody can answer 'name? ' here" in outcome.errors()[-1]["evalue"]
    assert "does not support input requests" in outcome.errors()[-1]["evalue"]


def test_a_box_goes_when_its_rank_dies(notebook: Notebook) -> None:
    cell = notebook.send(
        "%%dist --ranks 0\nimport os, threading\nthreading.Timer(1, os._exit, "
        "[3]).start()\ninput('gone? ')"
    )
    assert notebook.client.get_stdin_msg(timeout=WAIT_S)["content"]["prompt"] == "[0] gone? "
    outcome = notebook.finish(cell)
    assert "rank 0 exited with code 3" in outcome.errors()[-1]["evalue"]
    assert notebook.run("%dist_restart").status == "ok"
