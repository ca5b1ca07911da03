"""Shows the Python stacks of ranks, equal stacks once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import HostError
from ..wire.ranks import describe_ranks, group_ranks
from ..wire.status import StackText
from .session.session import Session

_DUMP_S = 20.0


def show_stacks(
    session: Session, ranks: Sequence[int], native: bool = False, all_threads: bool = False
) -> str:
    """Return the stacks of some ranks as text. Waits about a second for ranks that do not answer.

    Args:
        session: the mesh.
        ranks: which.
        native: C and C++ frames as well, by py-spy.
        all_threads: all threads, not only the main one.

    Raises:
        HostError: py-spy is not installed, or may not look.
    """
    dead = session.dead_ranks
    living = [rank for rank in ranks if rank not in dead]
    if native:
        texts = _dump_native(session, living)
    else:
        answers: Mapping[int, StackText] = (
            session.ask(lambda core, now: core.ask_stacks(living, now, all_threads)) or {}
        )
        texts = {rank: answer.text for rank, answer in answers.items()}
    return fold_stacks(ranks, texts, dead)


def fold_stacks(ranks: Sequence[int], texts: Mapping[int, str], dead: set[int]) -> str:
    """Return ranks' stacks as one text, equal stacks once, below the ranks that have them.

    Args:
        ranks: all that were asked.
        texts: rank -> its stack, of those that answered.
        dead: ranks without a process.
    """
    silent = "  did not answer: it is stopped, or too busy to"
    shown = {
        rank: "  dead" if rank in dead else texts.get(rank, silent).rstrip("\n") for rank in ranks
    }
    return "\n\n".join(
        f"{describe_ranks(group)}:\n{text}" for text, group in group_ranks(shown).items()
    )


def _dump_native(session: Session, ranks: Sequence[int]) -> dict[int, str]:
    program = _find_py_spy()
    report = session.ask_host()
    pids = {info.rank: info.pid for info in report.ranks} if report is not None else {}
    with ThreadPoolExecutor(max_workers=max(1, min(8, len(ranks)))) as pool:
        texts = pool.map(lambda rank: _dump(program, pids[rank]), ranks)
        return dict(zip(ranks, texts, strict=True))


def _find_py_spy() -> str:
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        hint = "" if importlib.util.find_spec("pip") else " (with your installer)"
        raise HostError(
            f"native stacks are read by py-spy, which is not installed: pip install py-spy{hint}"
        )
    return program


def _dump(program: str, pid: int) -> str:
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_DUMP_S
        )
    except subprocess.TimeoutExpired:
        return f"  py-spy had no answer within {_DUMP_S:.0f} s"
    if done.returncode != 0:
        raise HostError(f"py-spy could not look into process {pid}: {done.stderr.strip()}")
    # Its first lines name the process, which differs from rank to rank.
    lines = done.stdout.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Thread ")), 0)
    return "\n".join(f"  {line}" for line in lines[start:])
