"""Scripts from a terminal: `cellmesh run` and `cellmesh exec` beside torchrun, whole processes.

``python -m benchmarks.scripts``: in each round, torchrun and cellmesh run the same files in turn,
with the same number of ranks, one thread each, and output into pipes. `first` finds no process that
waits; for `again`, the first has left one, which is idle and has imported what that one has.
The 20 s of imports are a module that sleeps 20 s when it is imported, in a folder that is named
`site-packages` on PYTHONPATH, as installed modules only are imported before a fork: with real
modules, the ranks of torchrun would also compete for the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.conftest import own_runtime_dir

from .drivers.first_step import ONE_THREAD, PROGRAM, TORCHRUN
from .drivers.protocol import Sample, elapsed_s
from .figures import Figures
from .machine import describe_machine
from .processes import cpu_s, descendants
from .report import table, targets_table
from .targets import SCRIPTS_TARGETS
from .units import SECONDS

ROOT = Path(__file__).resolve().parents[1]
DDP = ROOT / "tests" / "programs" / "scripts" / "ddp_example.py"
LOOP = ROOT / "benchmarks" / "programs" / "timed_loop.py"
IMPORTS_S = 20
_CELLMESH = (sys.executable, "-m", "cellmesh")
_LIMIT_S = 300.0
_TRIES, _CALM_S, _CALM_TRIES = 3, 4, 60
_COLUMNS = {
    "torchrun_s": "torchrun",
    "first_s": "`cellmesh run`: first",
    "again_s": "again",
    "on_s": "`--on`",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS, action="append", help="repeatable")
    parser.add_argument(
        "--samples", type=Path, help="add to the samples in this file, and show all"
    )
    parser.add_argument("--out", type=Path, help="write the tables here as well, as Markdown")
    arguments = parser.parse_args(argv)
    machine = describe_machine()
    os.environ.update(ONE_THREAD)
    samples: dict[str, list[Sample]] = {}
    if arguments.samples is not None and arguments.samples.exists():
        samples = json.loads(arguments.samples.read_text())
    with own_runtime_dir(), _own_project():
        for number in range(arguments.rounds):
            for name in arguments.only or PARTS:
                print(f"round {number + 1}, {name} ... ", end="", flush=True)
                began = time.monotonic()
                try:
                    samples.setdefault(name, []).append(PARTS[name]())
                finally:
                    _cellmesh("stop", "--all")
                print(f"{time.monotonic() - began:.0f} s")
                if arguments.samples is not None:
                    arguments.samples.write_text(json.dumps(samples))
    figures = Figures(samples)
    facts = "\n".join(f"- {name}: {fact}" for name, fact in machine.items())
    rounds = ", ".join(f"{len(samples[name])} of {name}" for name in PARTS if name in samples)
    facts += f"\n- rounds, of which medians are shown: {rounds}"
    text = "\n\n".join([facts, times_table(figures), targets_table(figures, SCRIPTS_TARGETS)])
    print(f"\n{text}")
    if arguments.out is not None:
        intro = (__doc__ or "").partition("\n\n")[2].replace("``", "`")
        arguments.out.write_text(f"# Scripts\n\n{intro}\n{text}\n")


@contextlib.contextmanager
def _own_project() -> Iterator[None]:
    """A working directory of the runs' own, with the slow module and a script that imports it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        packages = Path(folder, "site-packages")
        packages.mkdir()
        (packages / "slow_library.py").write_text(f"import time\ntime.sleep({IMPORTS_S})\n")
        Path("imports.py").write_text(f"import slow_library\n{DDP.read_text()}")
        Path("pyproject.toml").touch()
        paths = [str(packages), os.environ.get("PYTHONPATH", str(ROOT))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        yield


def _run(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def _torchrun(num_ranks: int, script: Path) -> tuple[float, str]:
    """Run a script under torchrun; return how long it took, and its output.

    gloo sometimes aborts a rank at its end (`terminate called without an active exception`): such
    a run is repeated.
    """
    for _ in range(_TRIES):
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            printed = _run(*TORCHRUN, str(num_ranks), str(script))
            return time.monotonic() - began, printed
    raise RuntimeError(f"{script} has failed {_TRIES} times under torchrun")


def _cellmesh(*arguments: str) -> str:
    return _run(*_CELLMESH, *arguments)


def _took_s(run: Callable[..., object], *arguments: str) -> float:
    return elapsed_s(lambda: run(*arguments))


def _in_turn(script: Path, num_ranks: int, has_on: bool = False) -> Sample:
    """A script under torchrun, for the first time on new ranks, again, and in living ranks."""
    run = ("run", "-n", str(num_ranks), str(script))
    sample = {
        "torchrun_s": _torchrun(num_ranks, script)[0],
        "first_s": _took_s(_cellmesh, *run),
    }
    _wait_for_calm()
    sample["again_s"] = _took_s(_cellmesh, *run)
    if has_on:
        _cellmesh("start", str(num_ranks), "--name", "on")
        on = ("run", "--on", "on", str(script))
        _cellmesh(*on)
        sample["on_s"] = _took_s(_cellmesh, *on)
    return sample


def _wait_for_calm() -> None:
    """Wait until the processes that wait for the next run have imported what they will: until there
    are some, which import nothing for `_CALM_S` seconds.
    """
    num_calm = 0
    for _ in range(_CALM_TRIES):
        waiting = [*map(int, re.findall(r"process (\d+) waits", _cellmesh("ps")))]
        pids = [each for pid in waiting for each in (pid, *descendants(pid))]
        before_s = sum(map(cpu_s, pids))
        time.sleep(1)
        is_idle = sum(map(cpu_s, pids)) - before_s < 0.02
        # A module that sleeps uses no CPU.
        num_calm = num_calm + 1 if waiting and is_idle and not any(map(_imports, pids)) else 0
        if num_calm == _CALM_S:
            return
    raise RuntimeError("a process that waits for the next run is busy for a minute")


def _imports(pid: int) -> bool:
    """Whether a process is a zygote's copy that imports modules."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"cellmesh-preloads\0")
    return False


def _loop() -> Sample:
    """Steps per second, as rank 0 prints them."""
    _cellmesh("run", "-n", "4", str(DDP))
    _wait_for_calm()
    return {
        "torchrun_steps": float(_torchrun(4, LOOP)[1]),
        "steps": float(_cellmesh("run", "-n", "4", str(LOOP))),
    }


def _exec() -> Sample:
    _cellmesh("start", "4", "--name", "on")
    _cellmesh("exec", "on", "pass")
    return {
        "exec_s": _took_s(_cellmesh, "exec", "on", "pass"),
        "zmq_s": _took_s(_run, sys.executable, "-c", "import zmq"),
    }


PARTS: Mapping[str, Callable[[], Sample]] = {
    "ddp-4": lambda: _in_turn(DDP, 4, has_on=True),
    "ddp-8": lambda: _in_turn(DDP, 8, has_on=True),
    "fsdp2-8": lambda: _in_turn(PROGRAM, 8),
    "imports-4": lambda: _in_turn(Path("imports.py"), 4),
    "loop": _loop,
    "exec": _exec,
}


def times_table(figures: Figures) -> str:
    """The medians of whole processes."""
    lines = [["script, ranks", *_COLUMNS.values()]]
    for name in PARTS:
        times = [figures.get(name, measure) for measure in _COLUMNS]
        if times[0] is not None:
            lines.append([name, *map(SECONDS.show, times)])
    return table(lines)


if __name__ == "__main__":
    main()
