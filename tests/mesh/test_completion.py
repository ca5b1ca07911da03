"""Tab and help over the Jupyter protocol, and in a terminal: names that live on the ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir, stop_process

from .test_kernel import WAIT_S, Notebook, open_notebook, plain

CELL = """%%dist
from torch import nn

class Net(nn.Module):
    "a net of two layers"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])

def double_it(value, times=2):
    "as many times as one likes"
    return value * times

net_of_ranks = Net()
weights_of_ranks = net_of_ranks.state_dict()
if rank == 2:
    only_on_two = 1
"""
LOOP = "%%dist --nowait\nimport time\nprint('begun')\nwhile True:\n    time.sleep(0.01)"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh\n%dist_start 3").status == "ok"
            # A loaded machine takes its time, and what is tested here is not how long.
            opened.run(
                "from cellmesh.magics.completion import hooks\nhooks._WAIT_S = hooks._HELP_S = 30"
            )
            opened.run("get_ipython().Completer.use_jedi = False\nname_in_notebook = [1]")
            assert opened.run(CELL).status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
        check_nothing_left(directory)


@dataclass(frozen=True)
class Completed:
    """An answer to a request for completions."""

    matches: list[str]
    replaced: str
    types: dict[str, str]


def reply_to(notebook: Notebook, request: str) -> dict[str, Any]:
    reply = notebook.client.get_shell_msg(timeout=WAIT_S)
    while reply["parent_header"].get("msg_id") != request:
        reply = notebook.client.get_shell_msg(timeout=WAIT_S)
    content: dict[str, Any] = reply["content"]
    assert content["status"] == "ok"
    return content


def complete(notebook: Notebook, code: str, cursor: int | None = None) -> Completed:
    content = reply_to(notebook, notebook.client.complete(code, cursor))
    details = content["metadata"].get("_jupyter_types_experimental", [])
    return Completed(
        content["matches"],
        code[content["cursor_start"] : content["cursor_end"]],
        {detail["text"]: detail["type"] for detail in details},
    )


def inspect(notebook: Notebook, code: str, cursor: int, detail: int = 0) -> str:
    content = reply_to(notebook, notebook.client.inspect(code, cursor, detail))
    return plain(content["data"]["text/plain"]) if content["found"] else ""


def pager(notebook: Notebook, code: str) -> str:
    """What a cell shows in the pager."""
    cell = notebook.client.execute(code)
    return "".join(
        plain(each["data"]["text/plain"]) for each in reply_to(notebook, cell)["payload"]
    )


# What is typed, with the cursor, what is offered, and what of the text that replaces.
COMPLETED: list[tuple[str, list[str], str]] = [
    ("%%dist\nx = 1\nnet_of|", ["net_of_ranks"], "net_of"),
    ("%%dist --ranks 1-2\nprint(net_of_ranks.layers[1].wei|)", ["weight"], "wei"),
    (
        "%%dist_profile --rows 3\nweights_of_ranks['layers.1.|",
        ["bias", "weight"],
        "layers.1.",
    ),
    ("%%dist\ngröße = '🙂'\nnet_of_ranks.lay| = 1", ["layers"], "lay"),
    # The chosen ranks are asked; if a line of options is not whole yet, the lowest one.
    ("%%dist --ranks 2\nonly_on|", ["only_on_two"], "only_on"),
    ("%%dist --at dp=2\nonly_on|", ["only_on_two"], "only_on"),
    ("%%dist --ranks 0-1\nonly_on|", [], ""),
    ("%%dist --ranks\nnet_of|", ["net_of_ranks"], "net_of"),
    ("%%time\n%%dist --ranks 2\nonly_on|", ["only_on_two"], "only_on"),
    # Plain cells, and what ranks do not know, are the notebook's.
    ("name_in|", ["name_in_notebook"], "name_in"),
    ("net_of|", [], ""),
    ("%%local\nname_in|", ["name_in_notebook"], "name_in"),
    ("%%dist\nname_in_notebook.app|", ["append"], ".app"),
    ("%%dist\nno_such_name.|", [], ""),
    ("%%dist --no-such-option\nname_in|", ["name_in_notebook"], "name_in"),
    ("%%dist --ranks 77\nname_in|", ["name_in_notebook"], "name_in"),
    # Options of magics.
    ("%%dist --ra|", ["--ranks"], "--ra"),
    ("x = 1\n%dist_start --backend n|", ["nccl"], "n"),
    ("%dist_pull net_of_ranks.layers[0].we|", ["weight"], "we"),
    ("%dist_inspect net_o|", ["net_of_ranks"], "net_o"),
    ("%dist_check net_o|", ["net_of_ranks"], "net_o"),
    ("%dist_save net_o|", ["net_of_ranks"], "net_o"),
    ("%dist_push name_i|", ["name_in_notebook"], "name_i"),
]


@pytest.mark.parametrize(("typed", "matches", "replaced"), COMPLETED)
def test_completions(notebook: Notebook, typed: str, matches: list[str], replaced: str) -> None:
    found = complete(notebook, typed.replace("|", ""), typed.index("|"))
    assert [text.rpartition(".")[2] for text in found.matches] == matches
    assert found.replaced == replaced or not matches


def test_kinds_and_large_modules(notebook: Notebook) -> None:
    assert complete(notebook, "%%dist\nnet_of").types == {"net_of_ranks": "variable"}
    matches = complete(notebook, "%%dist\ntorch.").matches
    assert len(matches) > 900
    assert {"ones", "nn", "zeros_like"} <= set(matches)
    assert len(complete(notebook, "%dist_attach ").matches) == 1


def test_functions_of_the_notebook_bring_their_source(notebook: Notebook) -> None:
    typed = dict(notebook.run("def halve(x):\n    # of nothing\n    return x / 0").messages)
    count = typed["execute_input"]["execution_count"]
    (shown,) = notebook.run("mesh.run(halve, 1)").errors()[:1]
    assert f"Cell In[{count}], line 3, in halve(x)" in plain("\n".join(shown["traceback"]))
    assert "# of nothing" in plain("\n".join(shown["traceback"]))
    notebook.run("%dist_push halve")
    help = pager(notebook, "%%dist\nhalve??")
    assert "# of nothing" in help
    assert re.search(rf"File: +In\[{count}\]\n", help)
    assert re.search(r"File: +In\[\d+\]\n", pager(notebook, "%%dist\ndouble_it??"))


def test_half_of_a_character_costs_no_completion_of_the_notebooks_own(notebook: Notebook) -> None:
    found = "[each.text for each in get_ipython().Completer.completions(code, len(code))]"
    outcome = notebook.run(
        "from IPython.core.completer import provisionalcompleter\n"
        f"code = '%%dist\\n# \\ud800\\nname_in'\nwith provisionalcompleter():\n    print({found})"
    )
    assert "name_in_notebook" in outcome.text()


def test_completion_leaves_out_names_of_the_notebook_and_offers_magics_and_files(
    notebook: Notebook,
) -> None:
    notebook.run("%%dist\nname_in_ranks = 1")
    assert complete(notebook, "%%dist\nname_in").matches == ["name_in_ranks"]
    notebook.run("%%dist\ndel name_in_ranks")
    assert "%time" in complete(notebook, "%%dist\n%tim").matches
    assert "/tmp/" in complete(notebook, "%%dist\nopen('/tm").matches
    assert "while" in complete(notebook, "%%dist\nwhil").matches


def test_auto_mode(notebook: Notebook) -> None:
    notebook.run("%dist_auto on")
    try:
        assert complete(notebook, "net_of").matches == ["net_of_ranks"]
        assert complete(notebook, "%%time\nnet_of_ranks.lay").matches == ["layers"]
        assert complete(notebook, "%%local\nname_in").matches == ["name_in_notebook"]
        assert complete(notebook, "%dist_auto o").matches == ["on", "off"]
        assert "as many times as one likes" in inspect(notebook, "double_it(1)", 3)
        assert "as many times as one likes" in pager(notebook, "double_it?")
        assert "return value * times" in pager(notebook, "??double_it")
        assert "a net of two layers" in pager(notebook, "# what is it\nnet_of_ranks?")
        assert "Example" in pager(notebook, "%dist_status?")
    finally:
        notebook.run("%dist_auto off")
    assert complete(notebook, "net_of").matches == []


def test_busy_ranks_complete_names_only(notebook: Notebook) -> None:
    cell = notebook.send(LOOP)
    notebook.read_until(cell, lambda outcome: "begun" in outcome.text())
    try:
        assert complete(notebook, "%%dist\nnet_of").matches == ["net_of_ranks"]
        assert complete(notebook, "%%dist\nnet_of_ranks.layers[0].bi").matches == []
        assert complete(notebook, "%dist_pull net_o").matches == ["net_of_ranks"]
        assert complete(notebook, "%dist_pull net_of_ranks.lay").matches == []
        when = "double_it: help is shown when no cell runs on the rank"
        assert when in inspect(notebook, "%%dist\ndouble_it(1)", 10, 1)
        assert when in pager(notebook, "%%dist\ndouble_it?")
    finally:
        notebook.run("%dist_interrupt")
        notebook.read_until(cell, lambda outcome: bool(outcome.errors()))


def test_help_shows_docstring_and_source(notebook: Notebook) -> None:
    code = "%%dist\nx = double_it(3)"
    assert "Signature: double_it(value, times=2)" in inspect(notebook, code, code.index("it(3"))
    assert "as many times as one likes" in inspect(notebook, code, len(code) - 1), (
        "inside its brackets"
    )
    indexed = "%%dist\nnet_of_ranks.layers[0].in_features"
    assert "String form: 2" in inspect(notebook, indexed, len(indexed) - 3)
    assert "ModuleList(\n  (0): Linear" in inspect(notebook, indexed, indexed.index("yers"))
    assert "as many times as one likes" in pager(notebook, "%%dist\ndouble_it?")
    source = pager(notebook, "%%dist --ranks 1\ndouble_it??")
    assert (
        'def double_it(value, times=2):\n    "as many times as one likes"\n    return value * times'
        in source
    )
    assert "a net of two layers" in pager(notebook, "%%dist\n??Net")
    assert "Linear(in_features=3" in pager(notebook, "%%dist\nnet_of_ranks.layers[1]?")


def test_help_for_what_is_unknown_is_ipythons(notebook: Notebook) -> None:
    assert notebook.run("%%dist\nno_such_name?").text() == "Object `no_such_name` not found.\n"
    assert "list" in pager(notebook, "%%dist\nname_in_notebook?")
    assert inspect(notebook, "%%dist\nno_such_name", 12) == ""


def test_help_leaves_no_trace_in_a_script(notebook: Notebook, tmp_path: Path) -> None:
    for code in ("%%dist\ndouble_it??", "name_in_notebook?"):
        pager(notebook, code)
    script = tmp_path / "script.py"
    assert notebook.run(f"%dist_export {script}").status == "ok"
    assert "pinfo" not in script.read_text()
    assert "double_it?" not in script.read_text()
    assert "name_in_notebook?" not in script.read_text()


def test_help_among_code_runs_on_the_ranks(notebook: Notebook) -> None:
    text = plain(notebook.run("%%dist\nx = 1\ndouble_it?").text())  # it is part of what ran
    assert "[0-2] Docstring: as many times as one likes" in text


def test_a_rank_that_does_not_answer_is_not_waited_for(notebook: Notebook) -> None:
    ran = notebook.run(
        "[stopped] = [info.pid for info in mesh.report() if info.rank == 1]\n"
        "hooks._WAIT_S = 0.15\n"
        "print(stopped)"
    )
    stopped = int(ran.text())
    stop_process(stopped)
    try:
        assert complete(notebook, "%%dist --ranks 1\nname_in").matches == ["name_in_notebook"]
    finally:
        os.kill(stopped, signal.SIGCONT)
        notebook.run("hooks._WAIT_S = 30")
    assert complete(notebook, "%%dist --ranks 1\nnet_of").matches == ["net_of_ranks"]


def test_unloading_the_extension_restores_completion() -> None:
    with own_runtime_dir() as directory, open_notebook() as notebook:
        notebook.run("get_ipython().Completer.use_jedi = False\nname_in_notebook = 1")
        notebook.run("%load_ext cellmesh\n%dist_start 1")
        notebook.run("%dist_stop\n%unload_ext cellmesh")
        left = notebook.run(
            "s = get_ipython()\nwrapped = {'completions', 'do_inspect'}\n"
            "print(sorted(wrapped & {*vars(s.Completer), *vars(s.kernel)}))\n"
            "print(s.Completer.custom_matchers, s.Completer.disable_matchers)"
        )
        assert left.text() == "[]\n[] []\n"
        assert complete(notebook, "%%dist\nname_in").matches == ["name_in_notebook"]
        check_nothing_left(directory)


TERMINAL = """
import warnings
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.terminal.ptutils import IPythonPTCompleter
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
import cellmesh.magics.completion.hooks

cellmesh.magics.completion.hooks._WAIT_S = 30
shell = TerminalInteractiveShell.instance()
shell.Completer.use_jedi = False
shell.run_cell("%load_ext cellmesh")
shell.run_cell("%dist_start 2")
shell.run_cell("%%dist\\nname_on_ranks = 'x'\\ndef f():\\n    'does much'")
completer = IPythonPTCompleter(shell=shell)
for code in ("%%dist\\nname_on", "%%dist\\nname_on_ranks.upp", "%%dist --ra", "%dist_pull name_"):
    found = completer.get_completions(Document(code), CompleteEvent())
    print(repr(code), [(each.text, each.start_position) for each in found])
shell.run_cell("%%dist\\nf?")
shell.run_cell("%dist_stop")
"""


def test_terminal_ipython() -> None:
    with own_runtime_dir() as directory:
        done = subprocess.run(
            [sys.executable, "-c", TERMINAL],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        check_nothing_left(directory)
    assert "'%%dist\\nname_on' [('name_on_ranks', -7)]" in done.stdout
    assert "'%%dist\\nname_on_ranks.upp' [('upper', -3)]" in done.stdout
    assert "'%%dist --ra' [('--ranks', -4)]" in done.stdout
    assert "'%dist_pull name_' [('name_on_ranks', -5)]" in done.stdout
    assert "does much" in plain(done.stdout)
