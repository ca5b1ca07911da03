"""The debugger on ranks: its prompt is asked where the run is waited for."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted

from .answering import Typist
from .conftest import Recorder

SUM = "dist.all_reduce(t := torch.ones(1))\nprint('sum', t.item())"


def plain(recorder: Recorder) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(text for _, text in recorder.lines()))


def check_all_reduce(mesh: cm.Mesh) -> None:
    mesh.cell("check = torch.ones(1)\ndist.all_reduce(check)")
    assert mesh.pull("check.item()").list == [4.0] * 4


def test_one_rank_is_debugged_while_the_others_wait(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    typist = Typist("p rank * 10", "c").sit_down(monkeypatch)
    mesh.submit_cell(f"if rank == 1:\n    breakpoint()\n    x = 1\n{SUM}", sink=recorder).result()
    assert typist.prompts == ["[1] (Pdb) "] * 2
    text = plain(recorder)
    assert re.search(r"In\[\d+\]\(3\)<module>", text)
    assert "----> 3     x = 1" in text
    assert "\n10\n" in text
    assert ((0, 1, 2, 3), "sum 4.0") in recorder.lines()


def test_ranks_at_the_same_prompt_are_served_by_one_box(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    typist = Typist("n", "p y + rank", "c").sit_down(monkeypatch)
    mesh.submit_cell("y = 5\nbreakpoint()\ny = 6\nz = 7", sink=recorder).result()
    assert typist.prompts == ["[0-3] (Pdb) "] * 3
    assert {((rank,), str(6 + rank)) for rank in range(4)} <= set(recorder.lines())


@pytest.mark.parametrize("leave", ["q", EOFError])
def test_leaving_fails_the_cell_there_and_releases_the_others(
    mesh: cm.Mesh,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    leave: str | type[BaseException],
) -> None:
    Typist(leave).sit_down(monkeypatch)
    with pytest.raises(cm.RankFailure) as caught:
        mesh.submit_cell(
            f"kept = rank\nif rank == 1:\n    breakpoint()\n{SUM}", sink=recorder
        ).result()
    assert re.match(
        r"rank 1 left the debugger \(line 4\); ranks 0,2-3 waited in all_reduce at line 4 "
        r"for \d\.\d s and "
        r"were released$",
        str(caught.value),
    )
    assert mesh.pull("kept").list == [0, 1, 2, 3]
    check_all_reduce(mesh)


def test_the_stop_button_leaves_the_debugger(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    Typist("p 1", KeyboardInterrupt).sit_down(monkeypatch)
    with pytest.raises(RanksInterrupted, match="raised KeyboardInterrupt"):
        mesh.cell("breakpoint()\nx = 1")
    check_all_reduce(mesh)


def test_the_next_cell_is_not_stepped_through(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    typist = Typist("n", "n", "n").sit_down(monkeypatch)
    mesh[0:1].cell("breakpoint()\na = 1")
    assert len(typist.prompts) in (2, 3)
    typist.prompts.clear()
    mesh[0:1].cell("a = 2\na = 3")
    assert typist.prompts == []
    assert mesh[0].run(current_trace) is None


def current_trace() -> object:
    import sys

    return sys.gettrace()


def test_breakpoints_in_imported_code(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stopping_module.py").write_text(
        "def twice(x):\n    breakpoint()\n    return 2 * x\n"
    )
    typist = Typist("p x", "u", "p here", "c").sit_down(monkeypatch)
    source = f"""\
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from stopping_module import twice
        here = "the cell"
        print(twice(21))"""
    mesh[3:4].submit_cell(textwrap.dedent(source), sink=recorder).result()
    assert typist.prompts == ["[3] (Pdb) "] * 4
    text = plain(recorder)
    assert "stopping_module.py(3)twice" in text
    assert "\n21\n" in text
    assert "'the cell'" in text
    assert text.endswith("42")


def test_breakpoints_in_a_function_that_was_sent(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(x: int) -> int:
        breakpoint()
        return x // 2

    typist = Typist("!x = 84", "c").sit_down(monkeypatch)
    assert mesh[0].run(halve, 3) == 42
    assert typist.prompts == ["[0] (Pdb) "] * 2


def test_breakpoints_in_an_async_cell(mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("p q", "n", "!q = 5", "c").sit_down(monkeypatch)
    mesh[0:1].cell("import asyncio\nq = 1\nbreakpoint()\nawait asyncio.sleep(0)\nq += 1")
    assert typist.prompts == ["[0] (Pdb) "] * 4
    assert mesh[0].pull("q") == 6
    assert mesh[0].run(current_trace) is None


def test_post_mortem_stands_where_the_exception_was_raised(
    mesh: cm.Mesh,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(cm.RankFailure):
        mesh[3:4].submit_cell(
            "def divide(a, b):\n    return a / b\ndivide(rank, 0)", sink=recorder
        ).result()
    typist = Typist("p (a, b)", "u", "w", "q").sit_down(monkeypatch)
    mesh[3].debug()
    assert typist.prompts == ["[3] (Pdb) "] * 4
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "(3, 0)" in text
    assert "----> 2     return a / b" in text.replace("[3] ", "")
    assert "cellmesh" not in text


def test_post_mortem_of_nothing_says_so(own_mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure, match="nothing has been raised on this rank"):
        own_mesh[1].debug()


def test_ipythons_own_debug_magic_works_on_ranks(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(cm.RankFailure):
        mesh[0:1].submit_cell("value = 11\n[][value]", sink=recorder).result()
    typist = Typist("p value", "q").sit_down(monkeypatch)
    mesh[0:1].submit_cell("%debug", sink=recorder).result()
    assert typist.prompts == ["[0] (Pdb) "] * 2
    assert "\n11" in plain(recorder)


def test_pdb_mode_opens_at_each_exception(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh[0:1].cell("%pdb on")
    typist = Typist("p word", "q").sit_down(monkeypatch)
    try:
        with pytest.raises(cm.RankFailure, match="KeyError"):
            mesh[0:1].submit_cell("word = 'there'\n{}[word]", sink=recorder).result()
    finally:
        mesh[0:1].cell("%pdb off")
    assert typist.prompts == ["[0] (Pdb) "] * 2
