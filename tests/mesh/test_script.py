"""Scripts as ``__main__`` of ranks: what they find, and how they end, is as under torchrun."""

from __future__ import annotations

import collections
import difflib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.rank_set import signal_ranks, submit_script
from cellmesh.controller.ranks import Ranks
from cellmesh.controller.run import Run
from cellmesh.errors import RankFailure
from cellmesh.wire.messages import Died, Done, describe_place
from cellmesh.wire.verbs import InputRequest, Output

Texts = dict[tuple[int, str], str]

FACTS = '''
import asyncio, atexit, builtins, concurrent.futures, dataclasses, faulthandler, getpass, inspect
import io, locale, logging, multiprocessing, os, pickle, signal, subprocess, sys, threading, time
import warnings

@dataclasses.dataclass
class Point:
    """A point."""
    x: int

    def __del__(self):
        print("freed", self.x)

# Variables of a mesh and its gloo groups; the last is set by shells.
OWN = {"CELLMESH_MESH", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OPENBLAS_NUM_THREADS", "_"}

def square(x):
    return x * x

def tell(queue, point):
    queue.put((point.x, __name__, type(point).__module__, sys.argv))

def fail():
    raise RuntimeError("of a thread")

if __name__ == "__main__":
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    print({name: value for name, value in vars().items() if name.startswith("__")})
    print(sys.modules["__main__"].__dict__ is vars(), [n for n in vars() if not n.startswith("__")])
    print(sys.argv, sys.orig_argv, sys.path[0], sys.warnoptions, hasattr(sys, "ps1"))
    print(sys.flags)
    print(sys.excepthook, sys.displayhook, sys.breakpointhook, input, getpass.getpass)
    print([hasattr(builtins, n) for n in ("get_ipython", "display", "__IPYTHON__")], exit, quit)
    print(bool("IPython" in sys.modules and sys.modules["IPython"].get_ipython()))
    for file in (sys.stdin, sys.stdout, sys.stderr):
        print(file.name, file.mode, file.fileno(), file.isatty(), file.encoding, file.writable())
    print(sys.stdout is sys.__stdout__, sys.stdin.read(), locale.setlocale(locale.LC_ALL))
    print({name: os.environ[name] for name in sorted(os.environ)
           if name.startswith(("TORCH", "LOCAL", "GROUP", "ROLE", "WORLD", "OMP", "RANK"))
           and name not in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")})
    print(sorted(set(os.environ) - OWN))
    print(inspect.getsource(square), inspect.getfile(Point), inspect.getdoc(Point))
    print(pickle.loads(pickle.dumps(Point(3))), faulthandler.enable())
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=tell, args=(queue, Point(2)))
        process.start()
        told = queue.get()
        process.join()
        print(method, told)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        print(pool.submit(square, 4).result(), asyncio.run(asyncio.sleep(0, 5)))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        print(signal.getsignal(number))
        signal.signal(number, lambda number, frame: print("signal", number))
        os.kill(os.getpid(), number)
    print("before")
    subprocess.run(["echo", "a child"])
    os.system("echo another")
    print("after", end="")
    sys.stdout.buffer.write(b" bytes \\xff\\xfe\\n")
    os.write(1, b"of descriptor 1 \\xe2\\n")
    print("é", end=" ")
    os.write(1, b"in one line\\n")
    sys.stdout.reconfigure(line_buffering=True)
    if os.fork() == 0:
        print("forked")
        os._exit(3)
    print(os.wait()[1])
    print(dist.is_initialized(), dist.is_torchelastic_launched())
    dist.init_process_group("gloo")
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        print(error)
    ones = torch.ones(2) * dist.get_rank()
    dist.all_reduce(ones)
    print(ones, dist.get_rank() == rank, dist.get_world_size(), dist.get_backend())
    dist.destroy_process_group()
    print(dist.is_initialized(), torch.get_num_threads(), os.getcwd())
    for _ in range(2):
        warnings.warn("once")
        warnings.warn("old", DeprecationWarning)
    logging.warning("logged")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    atexit.register(print, "last")
    atexit.register(fail)
    threading.Thread(target=lambda: (time.sleep(0.1), print("outlived"))).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    kept = open(f"{sys.argv[1]}{rank}.txt", "w")
    kept.write("flushed")
    os.chdir("/")
'''
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class Recorder(Printer):
    """Records the text that each rank prints, and answers a script's requests for input."""

    def __init__(self, mesh: Ranks, data: bytes = b"") -> None:
        super().__init__(mesh.ranks, ConsoleSink())
        self._bytes: dict[tuple[int, str], bytes] = collections.defaultdict(bytes)
        self.have_printed = threading.Event()
        self._mesh, self._data = mesh, data

    @property
    def texts(self) -> Texts:
        texts = {of: data.decode(errors="surrogateescape") for of, data in self._bytes.items()}
        return collections.defaultdict(str, texts)

    def feed(self, ranks: Any, verb: Any, now: float) -> None:
        for rank in ranks:
            if type(verb) is Output:
                self._bytes[rank, verb.stream] += verb.data or verb.text.encode()
                if {each for each, _ in self._bytes} >= {*self._mesh.ranks}:
                    self.have_printed.set()
            elif type(verb) is InputRequest:
                assert verb.is_raw
                text, self._data = self._data[:7].decode("latin-1"), self._data[7:]
                self._mesh.rank_set.session.runs.reply({rank: verb.request}, text, not text)


def start(mesh: Ranks, path: Path, *argv: str, **options: Any) -> tuple[Run[Any], Recorder]:
    recorder = Recorder(mesh, options.pop("data", b""))
    return submit_script(mesh.rank_set, str(path), argv, printer=recorder, **options), recorder


def run(mesh: Ranks, path: Path, *argv: str, **options: Any) -> tuple[dict[int, Any], Texts]:
    """Run a script to its end; how it ended on each rank, and what each has printed."""
    started, recorder = start(mesh, path, *argv, **options)
    assert started.wait(60), started
    return {rank: parcel.verb for rank, parcel in started._outcomes.items()}, recorder.texts


@pytest.fixture
def fresh(quick: cm.Mesh, tmp_path: Path) -> cm.Mesh:
    """Two new ranks, in a test's directory."""
    quick.restart()
    quick.run(os.chdir, str(tmp_path))
    return quick


def test_script_finds_the_state_that_it_finds_under_torchrun(
    own_mesh: cm.Mesh, tmp_path: Path
) -> None:
    own_mesh.run(os.chdir, str(tmp_path))
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--redirects", "3", "--log-dir", str(tmp_path / "logs"), "facts.py", "theirs"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    subprocess.run(torchrun, cwd=tmp_path, check=True, timeout=100, stdin=null, env=environment)
    outcomes, texts = run(own_mesh, Path("facts.py"), "ours")
    assert {type(verb) for verb in outcomes.values()} == {Done}, texts[0, "stderr"]
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            (log,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/{stream}.log")
            theirs = _ADDRESS.sub("0x", log.read_text(errors="surrogateescape")).replace(
                "theirs", "ours"
            )
            ours = _ADDRESS.sub("0x", texts[rank, stream])
            differing = difflib.unified_diff(theirs.splitlines(), ours.splitlines(), n=0)
            assert not (lines := "\n".join(differing)), lines
        assert (tmp_path / f"ours{rank}.txt").read_text() == "flushed"


ENDS = {
    "status": "import sys; sys.exit(300)",
    "text": "import sys; sys.exit('some text')",
    "success": "import sys; sys.exit()",
    "exception": "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise ValueError('no') from e",
    "group": "raise ExceptionGroup('all', [ValueError(1), KeyError(2)])",
    "syntax": "def f(:\n    pass",
    "import": "import no_such_module",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\nraise ValueError(3)",
    "hook that raises": "import sys\ndef hook(*a):\n    int('x')\nsys.excepthook = hook\n{}[1]",
    "closed": "import os\nos.close(1)\nos.close(2)\nimport sys\nsys.exit(4)",
    "removed": "import contextlib, os\nwith contextlib.suppress(OSError):\n"
    "    os.unlink(__file__)\nos.chdir('/')\nraise ValueError",
    "os._exit": "import os; print('said', flush=True); os._exit(7)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "fork": "import atexit, os, sys\natexit.register(print, 'end')\nif os.fork() == 0:\n"
    "    sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
}


@pytest.mark.parametrize("name", ENDS)
def test_script_ends_as_in_python(fresh: cm.Mesh, tmp_path: Path, name: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS[name] + "\n")
    python = [sys.executable, "-u", str(script)]
    plain = subprocess.run(python, capture_output=True, text=True, timeout=60)
    script.write_text(ENDS[name] + "\n")
    # Else the other rank could not read it any more.
    outcomes, texts = run(fresh[0] if name == "removed" else fresh, script)
    for rank, verb in outcomes.items():
        assert (texts[rank, "stdout"], texts[rank, "stderr"]) == (plain.stdout, plain.stderr)
        if type(verb) is Died:
            said = {7: "exited with code 7", -signal.SIGTERM: "was killed by SIGTERM"}
            assert verb.reason == said[plain.returncode]
        else:
            assert getattr(verb, "status", 0) == plain.returncode
            if name == "exception":
                assert (verb.traceback, describe_place(verb.line, verb.inner)) == ("", "ends.py:4")


def test_only_rank_0_reads_the_standard_input(fresh: cm.Mesh, tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "import sys\n"
        "if sys.stdin.name != '<stdin>' or int(__import__('os').environ['RANK']):\n"
        "    print(sys.stdin.read())\n"
        "else:\n"
        "    print(input('name? '), sys.stdin.readline())\n"
        "    breakpoint()\n"
        "    print(sys.stdin.buffer.read())\n"
    )
    data = "Zoë\nsecond line\np 40 + 2\nc\n".encode() + b"\xff\0rest"
    _, texts = run(fresh, script, data=data)
    assert texts[1, "stdout"] == "\n"
    assert texts[0, "stdout"].startswith("name? Zoë second line\n\n")
    assert "(Pdb) 42\n" in texts[0, "stdout"]
    assert texts[0, "stdout"].endswith("b'\\xff\\x00rest'\n")


def test_all_output_of_a_script_is_sent(fresh: cm.Mesh, tmp_path: Path) -> None:
    script = tmp_path / "floods.py"
    script.write_text(
        "import os, sys\nfor n in range(2000):\n"
        "    print(n, 'x' * 1000, file=(sys.stdout, sys.stderr)[n % 2])\nos.system('seq 200000')\n"
    )
    _, texts = run(fresh, script, is_joined=True)
    lines = texts[0, "stdout"].splitlines()
    assert [line.split()[0] for line in lines[:2000]] == [*map(str, range(2000))]
    assert lines[2000:] == [*map(str, range(1, 200_001))]


def test_script_leaves_its_names_where_ranks_are_kept(fresh: cm.Mesh, tmp_path: Path) -> None:
    script = tmp_path / "kept.py"
    script.write_text(
        "import dataclasses, sys\nif 'model' not in globals():\n    model = 0\nmodel += 1\n"
        "given = 'mesh' in globals()\nrank = f'rank {model}'\n"
        "def read():\n    return model\nassert len(sys.argv) == 1\n"
    )
    run(fresh, script, keeps=True)
    fresh.cell("model = 5")
    found = "read(), given, rank, world_size, dist.is_initialized(), type(mesh).__name__"
    assert fresh.pull(found).list == [(5, False, "rank 1", 2, True, "DeviceMesh")] * 2
    outcomes, _ = run(fresh, script, is_shared=True)
    assert {type(verb) for verb in outcomes.values()} == {Done}
    assert fresh.pull(found).list == [(6, True, "rank 6", 2, True, "DeviceMesh")] * 2
    outcomes, _ = run(fresh, script, "x", is_shared=True)
    assert outcomes[0].type_name == "AssertionError"
    fresh.run(pow, 1, 1)  # the mesh goes on
    assert (
        fresh.pull("input.__module__, sys.argv, type(sys.last_value).__name__").list
        == [("cellmesh.workers.rank.stdin", ["cell"], "AssertionError")] * 2
    )


def test_module_and_modules_beside_the_script(fresh: cm.Mesh, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "part.py").write_text("value = 3\n")
    (package / "__main__.py").write_text(
        "import sys, typing_extensions\nfrom .part import value\n"
        "print(value, sys.argv, sys.path[0], __package__, __spec__.name, typing_extensions.own)\n"
    )
    (tmp_path / "typing_extensions.py").write_text("own = 'beside it'\n")
    _, texts = run(fresh, Path("package"), "x", is_module=True)
    main, folder = str(package / "__main__.py"), str(tmp_path)
    assert texts[0, "stdout"] == f"3 {[main, 'x']} {folder} package package.__main__ beside it\n"


def test_ranks_that_wait_for_a_failed_one_are_released(fresh: cm.Mesh, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, threading, time\nimport torch.distributed as dist\n"
        "dist.init_process_group()\nif dist.get_rank() == 1:\n"
        "    threading.Thread(target=time.sleep, args=(0.5,)).start()\n"
        "    raise ValueError('no')\ndist.barrier()\n"
    )
    outcomes, texts = run(fresh, script)
    assert (outcomes[0].released, outcomes[0].inner) == (True, "fails.py:7")
    assert (outcomes[1].released, outcomes[1].inner) == (False, "fails.py:6")
    assert texts[1, "stderr"].endswith("ValueError: no\n")


@pytest.mark.parametrize("handles", [True, False])
def test_script_handles_signals_and_interrupts(
    fresh: cm.Mesh, tmp_path: Path, handles: bool
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, sys, time\n"
        "if len(sys.argv) > 1:\n    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready')\ntime.sleep(60)\n"
    )
    started, recorder = start(fresh, script, *["handles"] * handles)
    assert recorder.have_printed.wait(20)
    if handles:
        signal_ranks(fresh.rank_set, signal.SIGTERM)
    else:
        started.interrupt()
    assert started.wait(20)
    verbs = [parcel.verb for parcel in started._outcomes.values()]
    if handles:
        # The first that ends by it may have the other released.
        assert 9 in {verb.status for verb in verbs} <= {9, 1}
    else:
        assert {(verb.type_name, verb.inner) for verb in verbs} == {
            ("KeyboardInterrupt", "waits.py:5")
        }


def test_no_mesh_is_started_on_a_rank(fresh: cm.Mesh, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text("import cellmesh\ncellmesh.start(2)\n")
    outcomes, _ = run(fresh, script)
    assert "cellmesh.start makes ranks itself" in outcomes[0].text
    with pytest.raises(RankFailure, match="rank 0 of a mesh, and its notebook directs that"):
        fresh[0].run(lambda name: __import__("cellmesh").attach(name, steal=True).stop(), "any")
