"""Modules that ranks have in common are imported once, by the process that they are forked from."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

import cellmesh
from cellmesh.controller.session.living import find_waiting
from cellmesh.wire.preload import change_preloads, learn, list_path, read_preloads
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.conftest import run_python

from .test_prestart import prestarting, start, stop

WAIT_S = 100.0
SLOW = "import time\ntime.sleep(0.05)\n"


# What some of the modules start.
LEFT = ["sleep", "1001.5"]
# Modules that must not be preloaded, with the reason that users read.
BAD = {
    "raises": ("1 / 0", "raises ZeroDivisionError: division by zero"),
    "exits": ("import os; os._exit(0)", "ends the process"),
    "is_killed": ("import os; os.kill(os.getpid(), 9)", "ends the process"),
    "hangs": (
        f"import subprocess, time; subprocess.Popen({LEFT}); time.sleep(1000)",
        "takes more than 5 s",
    ),
    "starts": (
        "import threading; e = threading.Event()\n"
        "threading.Thread(target=e.wait, daemon=True).start()",
        "starts threads",
    ),
    "forks": ("import os\npid = os.fork()\nos._exit(0) if pid == 0 else os.wait()", "forks"),
    "leaves": (f"import subprocess, sys; p = subprocess.Popen({LEFT})", "forks"),
    "prints": ("print('hello')", "prints"),
    "writes": ("import os; os.write(2, b'hello')", "prints"),
    "changes": ("import sys; sys.path.append('/x')", "changes sys.path"),
    "sets": ("import os; os.environ['X_Y'] = '1'", "changes the environment"),
    "moves": ("import os; os.chdir('/')", "changes the working directory"),
    "handles": ("import signal; signal.signal(10, lambda *_: None)", "handles signals"),
    "opens": ("import os; f = os.open('/dev/null', 0)", "opens files"),
    "computes": ("f = open('/dev/full')", "uses CUDA"),
    "logs": ("import logging; logging.basicConfig()", "configures logging"),
    "replaces": ("import sys; sys.excepthook = print", "replaces streams or hooks"),
    "draws": ("import torch; torch.rand(3)", "draws random numbers"),
    "seeds": ("import random; random.seed(1)", "seeds random numbers"),
    "runs": (f"import os; os.system('{' '.join(LEFT)} &')", "forks"),
    "patches": ("import torch; torch.rand = print", "replaces functions of torch"),
    "has_own": ("import written", "imports modules of your own"),
    "asks": (
        "import os; os.getenv('RANK')",
        "reads variables of which each rank has its own, as RANK",
    ),
    "configures": (
        "import torch; torch.set_default_dtype(torch.float64)",
        "configures torch, NumPy or Python",
    ),
}

_LOAD = """
import gc, json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from cellmesh.workers import preload
preload._MAX_COPIES = 100
preload._DEVICES = ("/dev/full",)
loading = preload.Loading(
    [sys.argv[3:]], sys.argv[2], "argument", hangs_s=5.0
)
loading.finish()
is_frozen = gc.get_freeze_count() > len(gc.get_objects())
assert is_frozen or not loading.has.names, "forked processes collect what was imported"
print(json.dumps([loading.has.names, sorted(sys.modules.keys() & set(sys.argv[3:]))]))
"""


def load(folder: Path, *names: str) -> list[str]:
    """Load modules of a folder of installed packages; return those that are there."""
    done = run_python("-c", _LOAD, folder, folder / "list.json", *names)
    reported, found = json.loads(done.stdout)
    assert sorted(reported) == found
    return found


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, from which this test's processes import."""
    folder = tmp_path / "site-packages"
    folder.mkdir(mode=0o700)  # it has the list, too
    (folder / "good.py").write_text("import random; random.random()")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
    return folder


def reasons_of(folder: Path) -> dict[str, str]:
    left_out = read_preloads(folder / "list.json").left_out
    return {name: left.reason for name, left in left_out.items()}


def test_modules_that_must_not_be_preloaded_are_left_out(packages: Path) -> None:
    for name, (source, _) in BAD.items():
        (packages / f"{name}.py").write_text(source)
    (packages / "better.py").write_text("import good")
    (packages.parent / "written.py").touch()
    names = ("good", *BAD, "better", "not_there")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "3")  # of the process that started the notebook
        patch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{packages.parent}")
        assert load(packages, *names) == ["better", "good"]
    assert reasons_of(packages) == {name: reason for name, (_, reason) in BAD.items()}
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == LEFT]
    for process in left:
        process.kill()
    assert left == []


def test_a_package_is_left_out_once_with_all_that_is_in_it(packages: Path) -> None:
    for name, source in {"bad": "import os; os.getenv('RANK')", "lazy": ""}.items():
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(source)
        for number in range(7):
            (packages / name / f"part{number}.py").touch()
    (packages / "lazy" / "prints.py").write_text("print()")
    stamp = (packages / "bad" / "__init__.py").stat().st_mtime_ns
    parts = [f"bad.part{number}" for number in range(7)]
    found = load(packages, "good", *parts, "bad", "lazy", "lazy.part1", "lazy.prints")
    assert found == ["good", "lazy", "lazy.part1"]
    assert sorted(reasons_of(packages)) == ["bad", "lazy.prints"]
    # Not even tried: it would end the test's process.
    (packages / "bad" / "__init__.py").write_text("import os; os.kill(os.getppid(), 9)")
    os.utime(packages / "bad" / "__init__.py", ns=(stamp, stamp))
    assert load(packages, "bad.part1", "good") == ["good"]


def test_parts_of_torch_may_set_variables(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = "from cellmesh.workers.rank.shell import make_shell\nmake_shell()\n"
    with_shell = _LOAD.replace("loading =", f"{shell}loading =").replace("=5.0", "=60.0")
    monkeypatch.setitem(globals(), "_LOAD", with_shell)
    own = "cellmesh.workers.warm_up"  # it may not set any
    assert load(packages, "torch.no_such", "torch._dynamo", "torch._dynamo.no", own, "good") == [
        own,
        "good",
        "torch._dynamo",
    ]
    assert not (packages / "list.json").exists(), "a part that this torch lacks is noted"


def test_a_module_of_the_users_own_is_not_preloaded(packages: Path, tmp_path: Path) -> None:
    (packages / "own").symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("1 / 0")
    assert load(packages, "own", "good") == ["good"]
    assert not (packages / "list.json").exists()


def test_many_failing_modules_cost_the_stage_only(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        (packages / f"bad{number}.py").write_text("1 / 0")
    monkeypatch.setitem(globals(), "_LOAD", _LOAD.replace("preload._MAX_COPIES = 100\n", ""))
    assert load(packages, *(f"bad{number}" for number in range(7)), "good") == []


_TIMES = """
import json, os, sys, traceback
import torch
from cellmesh.workers.preload import ImportTimes
times = ImportTimes()
times.install()
sys.path[:0] = sys.argv[1:]
import mine
import slow, slow
total_s, took_s, asked = times.take()
import slow
again = times.take()
try:
    import raises_here
except ZeroDivisionError:
    text = traceback.format_exc()
shown = [text.count("File"), "preload" in text]
import sets_one
import slow_too
os.environ["OF_USER"] = "1"
import reads_it
later = times.take()[1]
print(json.dumps([list(took_s), asked, total_s > 0.09, again, *shown, list(later)]))
"""


def test_ranks_report_installed_modules_and_those_that_user_code_names(tmp_path: Path) -> None:
    installed, own = tmp_path / "site-packages", tmp_path / "own"
    installed.mkdir()
    own.mkdir()
    wait = "import time; time.sleep(0.03)\n"
    (own / "mine.py").write_text(f"{wait}import dependency, mine_too")
    (own / "mine_too.py").write_text(f"{wait}import of_mine_too")
    (own / "raises_here.py").write_text("1 / 0")
    for name, source in {
        "dependency": f"import nested\n{wait}",
        "nested": wait,
        "of_mine_too": wait,
        "slow": wait,
        "sets_one": f"{wait}import os; os.environ['OF_PACKAGE'] = '1'",
        "slow_too": wait,
        "reads_it": wait,
    }.items():
        (installed / f"{name}.py").write_text(source)
    done = run_python("-c", _TIMES, own, installed)
    names, asked, is_long, again, num_frames, is_shown, later = json.loads(done.stdout)
    assert names == ["nested", "dependency", "of_mine_too", "slow"]
    assert asked == ["dependency", "of_mine_too", "slow"]
    assert is_long
    assert again == [0.0, {}, []]
    assert (num_frames, is_shown) == (2, False), "tracebacks show no frame of the clock"
    assert later == ["sets_one", "slow_too"], "but not after user code has set a variable"


def wait_until_loaded(
    title: str = "cellmesh-preloaded-all",
    of_parent: Sequence[str] = (),
    process: psutil.Process | None = None,
) -> psutil.Process:
    """Wait until a process (the waiting one by default), or a copy in its place, has all of its
    modules; or for a copy of this title whose parent has another.
    """
    process = process or find_waiting(runtime_root())[0]
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline, "the modules were not loaded"
        for copy in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = copy.parent()
                own = parent.cmdline()[:1] if parent is not None else []
                if copy.cmdline()[:1] == [title] and own == list(of_parent or own):
                    return copy
        psutil.wait_procs(process.children(), timeout=0.05)


def test_what_a_copy_has_replaced_serves_again(runtime_dir: Path, tmp_path: Path) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        copy = wait_until_loaded()
        copy.kill()
        psutil.wait_procs([copy], timeout=WAIT_S)
        start(notebook)
        assert notebook.run("%%dist\nimport sys").status == "ok"
        stop(notebook)


def test_a_start_does_not_wait_for_a_module_that_takes_long(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    (packages / "takes_long.py").write_text("import time\ntime.sleep(1000)")
    own = tmp_path / "notebook"
    change_preloads(list_path(str(own)), lambda found: learn(found, "", {"takes_long": 1.0}))
    with prestarting(own) as notebook:
        wait_until_loaded("cellmesh-preloads", ["cellmesh-preloaded"])
        deadline = time.monotonic() + WAIT_S
        while not (packages / "__pycache__").exists():  # Python writes it before the module runs
            assert time.monotonic() < deadline, "the module was not imported"
            threading.Event().wait(0.01)
        start(notebook)
        have = "%%dist\nimport sys\nprint({'torch._dynamo', 'takes_long'} & sys.modules.keys())"
        assert notebook.run(have).text() == "[0-1] {'torch._dynamo'}\n"
        stop(notebook)
        (process,) = find_waiting(runtime_root())
        copies = process.children(recursive=True)
        process.kill()
        assert not psutil.wait_procs(copies, timeout=WAIT_S)[1], "copies outlive what they replace"
        start(notebook)
        stop(notebook)


def test_modules_that_all_ranks_import_are_there_in_the_next_kernel(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    for name in ("of_all", "of_one", "prints_once"):
        (packages / f"{name}.py").write_text(SLOW)
    own = tmp_path / "project"
    own.mkdir()
    (own / "pyproject.toml").write_text("")
    (own / "mine.py").write_text(f"{SLOW}import of_all")
    to_project = f"import sys; sys.path.insert(0, {str(own)!r})"
    first = "%%dist --time\nimport mine\nif rank == 0: import of_one\nimport prints_once"
    names = ("mine", "of_all", "of_one", "prints_once")
    have = f"%%dist\nimport sys\nprint([name for name in {names} if name in sys.modules])"
    with prestarting(own / "first") as notebook:
        notebook.run(to_project)
        start(notebook)
        assert notebook.run(have).text() == "[0-1] []\n"
        assert " ms in imports" in notebook.run(first).text()
        stop(notebook)
    (path,) = (runtime_dir / "cellmesh-preload").glob("*.json")
    assert [*read_preloads(path).modules] == ["of_all", "prints_once"]
    (packages / "prints_once.py").write_text("print('hello')")
    with prestarting(own / "second") as notebook:
        wait_until_loaded()
        start(notebook)
        assert notebook.run(have).text() == "[0-1] ['of_all']\n"
        shown = str(notebook.run("%dist_status --debug").messages)
        assert "parts of torch and modules that this project's ranks import, of of_all, in" in shown
        assert "not preloaded: prints_once, which prints" in shown
        stop(notebook)


def test_preload_of_nothing_imports_torch_only(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    (packages / "of_all.py").write_text(SLOW)
    own = tmp_path / "notebook"
    own.mkdir()
    (own / "pyproject.toml").write_text("[tool.cellmesh]\npreload = []")
    with prestarting(own) as notebook:
        start(notebook)
        notebook.run("%%dist\nimport of_all")
        seen = notebook.run("%%dist\nimport sys\nprint('torch.distributed.fsdp' in sys.modules)")
        assert seen.text() == "[0-1] False\n"
        shown = str(notebook.run("%dist_status --debug").messages)
        assert "nothing was imported before the fork but torch" in shown
        stop(notebook)
    assert not (runtime_dir / "cellmesh-preload").exists()


def test_a_script_has_what_its_last_run_imported(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    (packages / "of_all.py").write_text(SLOW)
    (packages / "ends.py").write_text(SLOW)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
            import json, sys
            import cellmesh as cm

            def imports(is_again):
                had = [name for name in ("of_all", "ends") if name in sys.modules]
                import of_all
                if not is_again:
                    import ends
                return had

            if __name__ == "__main__":
                with cm.start(2) as mesh:
                    print(json.dumps(mesh.run(imports, "again" in sys.argv).list))
            """)
    )

    def run(*arguments: str) -> list[list[str]]:
        done = run_python(script, *arguments)
        seen: list[list[str]] = json.loads(done.stdout)
        return seen

    assert run() == [[], []]
    assert run() == [["of_all", "ends"]] * 2
    (packages / "ends.py").write_text("import os; os._exit(0)")
    assert run("again") == [["of_all"]] * 2


@pytest.mark.timeout(WAIT_S * 2)
def test_a_zygote_that_began_with_torch_alone_imports_the_rest_for_later_ranks(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[bool, str | None, str]:
        import os
        import sys

        return "torch.distributed.fsdp" in sys.modules, os.environ.get("X_Y"), os.getcwd()

    monkeypatch.chdir(tmp_path)
    with cellmesh.start(2, prestart=False) as mesh:
        session = mesh.rank_set.session
        assert mesh.run(look).list == [(False, None, str(tmp_path))] * 2
        monkeypatch.setenv("X_Y", "later")
        agent = psutil.Process(read_ticket(session.ticket.path).agent_pid)
        copy = wait_until_loaded("cellmesh-preloads", process=agent)
        mesh.restart()  # with the change, which the copy lacks
        assert mesh.run(look).list == [(False, "later", str(tmp_path))] * 2
        psutil.wait_procs([copy], timeout=WAIT_S)
        wait_until_loaded(process=agent)
        mesh.restart()
        assert mesh.run(look).list == [(True, "later", str(tmp_path))] * 2
        assert "parts of torch" in "".join(session.describe_transitions())
