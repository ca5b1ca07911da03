"""Two meshes of one notebook, in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import clean_runtime_dir

from .test_kernel import Notebook, open_notebook
from .test_shown_in_kernel import Dashboard

START = ("%dist_start 2", "%dist_start 2 --name generator")


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with clean_runtime_dir(), open_notebook() as opened:
        assert opened.run("import cellmesh as cm\n%load_ext cellmesh").status == "ok"
        started = [str(opened.run(line).messages) for line in START]
        assert "in use" not in started[0]
        assert "generator is in use, beside mesh-" in started[1]
        opened.run("first, = set(cm.meshes) - {'generator'}")
        yield opened


def error(notebook: Notebook, code: str) -> str:
    return str(notebook.run(code).errors()[-1]["evalue"])


def use(notebook: Notebook, name: str) -> str:
    return notebook.run(f"get_ipython().run_line_magic('dist_use', {name})").text()


def test_magics_act_on_the_mesh_that_their_line_names_else_on_the_one_in_use(
    notebook: Notebook,
) -> None:
    for _ in range(2):  # it may be in use already
        assert re.search("^generator: 2 ranks .*; in use, beside", use(notebook, "'generator'"))
    notebook.run("%%dist\nwhere = 'generator'")
    assert "; in use, beside generator" in use(notebook, "first")
    notebook.run("%%dist\nwhere = 'first'")
    shown = notebook.run("%%dist --on generator\nprint(where)").text()
    assert shown == "generator:\n[0-1] generator\n"
    notebook.run("%dist_pull where --rank 1 --on generator")
    assert "generator" in notebook.run("print(where)").text()
    assert "'first'" in notebook.run("%dist_pull where --rank 1\nprint([where])").text()
    assert "True" in notebook.run("print(mesh is cm.meshes[first])").text()
    notebook.run("%dist_auto on")
    assert "[0-1] first" in notebook.run("print(where)").text()
    notebook.run("%dist_auto on --on generator")
    assert "[0-1] generator" in notebook.run("print(where)").text()
    notebook.run("%dist_auto off")
    assert "did you mean 'generator'?" in error(notebook, "%dist_use generater")
    assert "did you mean 'generator'?" in error(notebook, "%%dist --on generater\n1")


def test_status_lists_all_and_starts_again_keep_both(notebook: Notebook) -> None:
    notebook.run("%%dist --on generator\nkept = 1")
    for line in START:
        assert "2 ranks are running and kept" in str(notebook.run(line).messages)
    assert "[0-1] 1" in notebook.run("%%dist\nprint(kept)").text()
    text = notebook.run("print(get_ipython().run_line_magic('dist_status', ''))").text()
    assert re.search(r"^generator +1 .*\nmesh-\S+ +0 ", text, re.MULTILINE)
    assert "<cellmesh generator: 2 ranks (dp=2), ready>, in use" in text
    assert "mesh-" not in str(notebook.run("%dist_status --on generator").messages)


def test_the_stop_button_reaches_the_mesh_that_the_cell_waits_for(notebook: Notebook) -> None:
    notebook.run("other = cm.meshes[first].submit_cell('import time\\ntime.sleep(3600)')")
    cell = notebook.send("%%dist --on generator\nprint('begun')\nimport time\ntime.sleep(3600)")
    notebook.read_until(cell, lambda outcome: "begun" in outcome.text())
    notebook.manager.interrupt_kernel()
    assert notebook.finish(cell).errors()[-1]["ename"] == "RanksInterrupted"
    assert "False" in notebook.run("print(other.done())").text()
    notebook.run("other.interrupt()")
    notebook.run("try:\n    other.result()\nexcept BaseException:\n    pass")


def test_names_are_completed(notebook: Notebook) -> None:
    for line in ("%dist_use g", "%dist_pull x --on g", "%%dist --on g"):
        notebook.client.complete(line, len(line))
        reply = notebook.client.get_shell_msg(timeout=60)
        assert reply["content"]["matches"] == ["generator"], line


def test_a_mesh_may_have_no_process_group(notebook: Notebook) -> None:
    started = str(notebook.run("%dist_start 1 --group off --name scorer").messages)
    assert "on cpu, no process group; scorer is in use" in started
    code = "%%dist\nprint(world_size, dist.is_initialized(), 'mesh' in globals())"
    assert "[0] 1 False False" in notebook.run(code).text()
    notebook.run("try:\n    mesh.cell('kept = 1; 1 / 0')\nexcept cm.RankFailure: pass")
    own_group = "dist.init_process_group('gloo')\nprint(kept, dist.get_world_size())"
    assert "[0] 1 1" in notebook.run(f"%%dist\n{own_group}\ndist.destroy_process_group()").text()
    notebook.run("%%dist\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    notebook.run("%dist_heal")
    assert "[0] 1 False False" in notebook.run(code).text()
    assert "no process group" in error(notebook, "%dist_mesh dp=1")
    assert "no process group" in error(notebook, "%dist_resize 2")
    assert "scorer has ended; generator is in use" in notebook.run("%dist_stop").text()


def test_each_mesh_is_exported_by_itself(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%%dist --on generator\nof_generator = 1")
    notebook.run(
        "get_ipython().run_cell_magic('dist', f'--on {first}', 'of_first = 1\\n')\nown = 3"
    )
    written = notebook.run(f"%dist_export {tmp_path}/g.py --on generator").text()
    text = (tmp_path / "g.py").read_text()
    assert "of_generator = 1" in text
    assert "of_first" not in text
    assert re.search(r"what ran on mesh-\S+ is not in it \(.*In \[\d+\]\)", written)
    assert "has run nothing on a mesh 'x'" in error(notebook, "%dist_export x.py --on x")


def test_a_reload_goes_to_all_meshes_or_to_one(notebook: Notebook, tmp_path: Path) -> None:
    module = tmp_path / "edited_here.py"
    read = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import edited_here; print(edited_here.x)"
    )
    shown = []
    use(notebook, "first")
    edits = (("x = 1", ""), ("x = 12", "%dist_reload --on generator"), ("x = 123", "%dist_reload"))
    for text, line in edits:
        module.write_text(text)
        notebook.run(line)
        cells = (f"%%dist{on}\n{read}" for on in ("", " --on generator"))
        shown.append([notebook.run(cell).text().split()[-1] for cell in cells])
    assert shown == [["1", "1"], ["1", "12"], ["123", "123"]]


def shown_by(notebook: Notebook, magic: str, line: str = "") -> str:
    return notebook.run(f"print(get_ipython().run_line_magic({magic!r}, {line!r}))").text()


def test_actors_memory_and_dashboard_are_shown_beside_a_call_that_waits(notebook: Notebook) -> None:
    notebook.run("class Server:\n    async def serve(self):\n        await asyncio.Event().wait()")
    notebook.run("%%dist --on generator\nimport asyncio")
    use(notebook, "first")
    notebook.run(
        "server = cm.meshes['generator'].spawn(Server)\n"
        "table = cm.meshes[first][1].spawn(dict, name='table')\n"
        "serving = server[1].serve.submit()\ncm.meshes['generator'].run(int)"
    )
    shown = shown_by(notebook, "dist_actors")
    served = r"server +Server +0-1 +1 +0: idle / 1: server\.serve waits in asyncio.Event at In"
    assert re.search(f"^generator +{served}", shown, re.MULTILINE)
    assert re.search(r"^mesh-\S+ +table +dict +1 +idle", shown, re.MULTILINE)
    assert "table" not in shown_by(notebook, "dist_actors", "--on generator")
    memory = shown_by(notebook, "dist_mem", "--on generator")
    assert re.findall(r"^([01]) +In.* MB", memory, re.MULTILINE) == ["0", "1"]
    dashboard = Dashboard(notebook, "--on generator")
    assert "<cellmesh generator: 2 ranks" in dashboard.data["text/plain"]
    dashboard.send(kind="do", action="interrupt")
    assert "rank 1" in dashboard.wait_for_state("told")["text"]
    notebook.run("serving.wait(60)")
    assert "idle / " not in shown_by(notebook, "dist_actors")
    notebook.run("cm.meshes['generator'].drop(server)\ncm.meshes[first].drop(table)")
    assert "Server" not in shown_by(notebook, "dist_actors")


def test_replicas_are_made_equal_on_one_mesh(notebook: Notebook) -> None:
    use(notebook, "first")
    for on in ("", " --on generator"):
        notebook.run(f"%%dist{on}\nweights = torch.full((2,), float(rank))")
    notebook.run("%dist_sync weights --from 1 --on generator")
    read = "%%dist{}\nprint(weights.tolist())"
    assert "[0-1] [1.0, 1.0]" in notebook.run(read.format(" --on generator")).text()
    assert "[0] [0.0, 0.0]\n[1] [1.0, 1.0]" in notebook.run(read.format("")).text()


def test_tabs_and_views_name_their_mesh(notebook: Notebook) -> None:
    log = "import cellmesh as cm\ncm.log(loss=1.0, step=0)\nprint('a\\n' * rank)"
    (tabs,) = notebook.run(f"%%dist --on generator\n{log}").data()
    assert "generator: by rank" in tabs["text/html"]
    for line in ("%dist_plot loss", "%dist_inspect rank"):
        assert notebook.run(f"{line} --on generator").text() == "generator:\n"


def test_left_meshes_are_attached_one_by_one_and_ended(notebook: Notebook) -> None:
    name = notebook.run("print(first)").text().strip()
    notebook.run("%%dist --on generator\nheld = 'by generator'")
    notebook.client.stop_channels()
    notebook.manager.restart_kernel(now=True)
    again = Notebook(notebook.manager)
    loaded = str(again.run("%load_ext cellmesh").messages)
    assert all(f"`%dist_attach {each}` has it again" in loaded for each in (name, "generator"))
    assert "there are 2 meshes: say which one" in error(again, "%dist_attach")
    assert "in use" not in str(again.run("%dist_attach generator").messages)
    assert f"{name} is in use, beside generator" in str(again.run("%dist_attach").messages)
    assert f"{name} is attached" in error(again, "%dist_attach")
    assert "generator is attached" in error(again, "%dist_attach generator --steal")
    assert again.run("%dist_detach").text() == (
        f"{name} lives on: `%dist_attach {name}` finds it again; generator is in use\n"
    )
    assert "[0-1] by generator" in again.run("%%dist\nprint(held)").text()
    assert f"{name} is in use, beside generator" in str(again.run(f"%dist_attach {name}").messages)
    assert again.run("%dist_stop").text() == f"{name} has ended; generator is in use\n"
    assert f"{name} has ended (stopped)" in error(again, f"%dist_use {name}")
    assert again.run("%dist_stop generator").text() == ""
    assert "no mesh is running" in error(again, "%dist_status")
    again.client.stop_channels()
