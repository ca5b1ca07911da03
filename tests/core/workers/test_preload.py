"""Modules that a zygote imports for ranks, in copies of itself; and imports of ranks, timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from cellmesh.wire.preload import read_preloads
from cellmesh.workers.preload import Preloaded, timed

# Modules that must not be preloaded, with the reason that users read.
BAD = {
    "raises": ("1 / 0", "raises ZeroDivisionError: division by zero"),
    "exits": ("import os; os._exit(0)", "ends the process"),
    "is_killed": ("import os; os.kill(os.getpid(), 9)", "ends the process"),
    "hangs": ("import time; time.sleep(1000)", "takes more than 5 s"),
    "starts": (
        "import threading; e = threading.Event()\n"
        "threading.Thread(target=e.wait, daemon=True).start()",
        "starts threads",
    ),
    "forks": ("import os\npid = os.fork()\nos._exit(0) if pid == 0 else os.wait()", "forks"),
    "leaves": ("import subprocess, sys; p = subprocess.Popen(['sleep', '1000'])", "forks"),
    "prints": ("print('hello')", "prints"),
    "writes": ("import os; os.write(2, b'hello')", "prints"),
    "changes": ("import sys; sys.path.append('/x')", "changes sys.path"),
    "sets": ("import os; os.environ['X_Y'] = '1'", "changes the environment"),
    "moves": ("import os; os.chdir('/')", "changes the working directory"),
    "handles": ("import signal; signal.signal(10, lambda *_: None)", "handles signals"),
    "opens": ("import os; f = os.open('/dev/null', 0)", "opens files"),
    "logs": ("import logging; logging.basicConfig()", "configures logging"),
    "replaces": ("import sys; sys.excepthook = print", "replaces streams"),
    "configures": (
        "import torch; torch.set_default_dtype(torch.float64)",
        "configures torch",
    ),
}

_LOAD = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from cellmesh.workers import preload
preload._MAX_COPIES = 100
loading = preload.Loading(
    [preload.Stage(tuple(sys.argv[3:]), True)], sys.argv[2], "argument", hangs_s=5.0
)
before = torch.get_rng_state()
loading.finish()
is_same = bool((torch.get_rng_state() == before).all())
print(json.dumps([loading.has.learned, sorted(sys.modules.keys() & set(sys.argv[3:])), is_same]))
"""


def load(folder: Path, *names: str) -> tuple[list[str], list[str], bool]:
    """Load modules of a folder of installed packages; return those reported, and those there."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(folder), str(folder / "list.json"), *names],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    learned, found, is_same = json.loads(done.stdout)
    return learned, found, is_same


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, (source, _) in BAD.items():
        (folder / f"{name}.py").write_text(source)
    (folder / "good.py").write_text("import torch\nx = torch.rand(3)")
    (folder / "for_torch.py").write_text("import os; os.environ['PYTORCH_X'] = '1'")
    (folder / "better.py").write_text("import good")
    return folder


def test_modules_that_must_not_be_preloaded_are_left_out(packages: Path) -> None:
    learned, found, is_same = load(packages, "good", *BAD, "better", "not_there")
    assert learned == found == ["good", "better"] or sorted(learned) == found
    assert is_same, "an import has drawn random numbers, which ranks would draw again"
    reasons = {
        name: left.reason for name, left in read_preloads(packages / "list.json").left_out.items()
    }
    assert reasons == {name: reason for name, (_, reason) in BAD.items()}


def test_modules_may_set_variables_of_torch(packages: Path) -> None:
    assert load(packages, "torch._dynamo", "for_torch")[0] == ["torch._dynamo", "for_torch"]


def test_a_module_of_the_users_own_is_not_preloaded(packages: Path, tmp_path: Path) -> None:
    (packages / "own").symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("1 / 0")
    assert load(packages, "own", "good")[0] == ["good"]
    assert not (packages / "list.json").exists()


def test_many_failing_modules_cost_the_stage_only(packages: Path) -> None:
    for number in range(7):
        (packages / f"bad{number}.py").write_text("1 / 0")
    source = _LOAD.replace("preload._MAX_COPIES = 100\n", "")
    names = [*(f"bad{number}" for number in range(7)), "good"]
    done = subprocess.run(
        [sys.executable, "-c", source, str(packages), str(packages / "list.json"), *names],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert json.loads(done.stdout)[:2] == [[], []], done.stderr


def test_the_sentence_on_preloaded_modules() -> None:
    assert Preloaded().describe() == ""
    learned = tuple(f"m{i}" for i in range(9))
    text = Preloaded(8, learned, 90 << 20, 2.5).describe()
    assert text == (
        "imported before the fork: parts of torch and 9 modules that this project's ranks import "
        "(m0, m1, m2, m3, m4, m5, m6, m7, ...), in 2.5 s and 90 MB, once for all ranks"
    )


_TIMES = """
import json, sys, traceback
import torch
from cellmesh.workers.preload import ImportTimes
times = ImportTimes()
times.install()
sys.path[:0] = sys.argv[1:]
import mine
import slow, slow
total_s, took_s = times.take()
import slow
again = times.take()
try:
    import raises_here
except ZeroDivisionError:
    text = traceback.format_exc()
print(json.dumps([list(took_s), total_s > 0.09, again, text.count("File"), "preload" in text]))
"""


def test_ranks_report_the_installed_modules_that_user_code_imports(tmp_path: Path) -> None:
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
    }.items():
        (installed / f"{name}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", _TIMES, str(own), str(installed)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names, is_long, again, num_frames, is_shown = json.loads(done.stdout)
    assert names == ["dependency", "of_mine_too", "slow"]
    assert is_long
    assert again == [0.0, {}]
    assert (num_frames, is_shown) == (2, False), "tracebacks show no frame of the clock"


def test_a_failed_import_is_not_reported() -> None:
    ends: list[tuple[str, bool]] = []

    def plain(name: str, import_: object) -> object:
        if name == "bad":
            raise ImportError(name)
        return name

    assert isinstance(plain, FunctionType)
    find = timed(
        plain, lambda name: None, lambda name, begun, is_whole: ends.append((name, is_whole))
    )
    assert find("good", None) == "good"
    with pytest.raises(ImportError):
        find("bad", None)
    assert ends == [("good", True), ("bad", False)]
