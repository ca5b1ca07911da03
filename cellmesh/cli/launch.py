"""The launch that a command line of ``cellmesh run`` describes. Pure, but for files it looks at."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..controller.options import parse_duration
from ..errors import MeshUsageError, did_you_mean
from ..magics.options import START_OPTIONS
from ..wire.environment import VISIBLE
from ..wire.verbs import StreamName
from . import torchrun
from .torchrun import BOTH

# Options of a start that do not suit a script, or have another name here (--keep).
LEFT_OUT = ("num_ranks", "lease_s", "auto_heal")


@dataclass(frozen=True)
class Script:
    """The script or module to run, as the command line names it.

    Attributes:
        target: path of the script, or name of the module.
        argv: arguments of the script.
        is_module: whether `target` is a module (``-m``).
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def folder(self) -> Path:
        """The folder that ``sys.path`` begins with."""
        return Path.cwd() if self.is_module else Path(self.target).resolve().parent

    def check(self) -> None:
        """Raise an error unless the script can be read and parsed, or the module is there.

        Raises:
            MeshUsageError: it is missing, is not Python, or does not parse; says where.
        """
        if self.is_module:
            top = self.target.partition(".")[0]
            if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
                raise MeshUsageError(f"there is no module {top!r} here or in the environment")
            return
        import tokenize
        import warnings

        path = Path(self.target)
        if path.is_dir():
            raise MeshUsageError(f"{path} is a directory: name a script in it, or -m and a module")
        if path.suffix == ".ipynb":
            raise MeshUsageError(f"{path} is a notebook: `jupyter execute {path}` runs it")
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the ranks show them
                compile(source, str(path), "exec", dont_inherit=True)
        except FileNotFoundError:
            near = did_you_mean(path.name, _scripts_beside(path))
            raise MeshUsageError(f"there is no script {self.target}{near}") from None
        except OSError as error:
            raise MeshUsageError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, SyntaxError) as error:
            if not isinstance(error, SyntaxError) or error.lineno is None:  # of its encoding
                raise MeshUsageError(f"{path} is no Python source") from None
            what = f"{type(error).__name__}: {error.msg}"
            raise MeshUsageError(f"{path}:{error.lineno}: {what}") from None


def _scripts_beside(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [each for each in os.listdir(path.parent) if each.endswith(".py")]
    return []


@dataclass(frozen=True)
class Launch:
    """The options of one ``cellmesh run``.

    Attributes:
        script: the script.
        num_ranks: number of ranks to start; None if other options give it.
        start: options of the start (`StartOptions`).
        on: name of the mesh to run on; "" to start one.
        waits: whether to wait while that mesh is busy.
        keep_s: how long the ranks live on after the script, in seconds.
        is_interactive: whether a shell on the ranks follows the script.
        keeps_warm: whether a zygote is left for the next run.
        is_raw: whether output is not folded on a terminal either.
        log_dir, redirects, tee, ranks_filter: torchrun's options for output; "" if not given.
        grace_s: how long ranks may take to end after a signal, in seconds.
        watches: whether to run the script again each time a file beside it changes.
    """

    script: Script
    num_ranks: int | None
    start: Mapping[str, Any]
    on: str = ""
    waits: bool = False
    keep_s: float = 0.0
    is_interactive: bool = False
    keeps_warm: bool = True
    is_raw: bool = False
    log_dir: str = ""
    redirects: str = ""
    tee: str = ""
    ranks_filter: str = ""
    grace_s: float = 30.0
    watches: bool = False


def read_launch(
    words: Sequence[str], given: Mapping[str, Any], project: Mapping[str, Any]
) -> Launch:
    """Read the command line of ``cellmesh run``.

    Args:
        words: the script and its arguments.
        given: name -> value, for the options that were given.
        project: options of the project (`read_project_options`).

    Raises:
        MeshUsageError: there is no script, or an option is wrong.
    """
    torchrun.check(given)
    if not words:
        raise MeshUsageError("name a script: cellmesh run -n 4 train.py (--help shows more)")
    names = {param.name for param in START_OPTIONS}.difference(LEFT_OUT)
    start = {name: value for name, value in given.items() if name in names}
    num_ranks: int | None = given.get("n")
    if (nproc := given.get("nproc_per_node")) is not None:
        if num_ranks is not None:
            raise MeshUsageError("-n and --nproc-per-node are one option: leave one out")
        num = torchrun.count_ranks(
            nproc, lambda: _count_gpus(start.get("gpus"), os.environ), os.cpu_count() or 1
        )
        if start.get("hosts") or start.get("launch"):
            start["nproc_per_host"] = num
        else:
            num_ranks = num
    if on := given.get("on", ""):
        if start or num_ranks is not None or given.get("keep"):
            raise MeshUsageError(
                f"--on {on} runs on ranks that are there: leave out -n, --keep and the options of "
                "a start"
            )
    elif num_ranks is None and not {*start, *project} & {*("mesh", "hosts", "launch", "num_ranks")}:
        num_ranks = 1  # as torchrun's
    if given.get("watches") and given.get("keep"):
        raise MeshUsageError("--watch starts ranks for each run, and --keep keeps them: choose one")
    own = {each.name for each in dataclasses.fields(Launch)}
    launch = Launch(
        Script(words[0], tuple(words[1:]), bool(given.get("module"))),
        num_ranks,
        start,
        keep_s=parse_duration(given.get("keep", "0")),
        grace_s=parse_duration(given.get("shutdown_timeout", "30")),  # as under torchrun
        keeps_warm=not given.get("no_keep_warm") and project.get("prestart", True) is True,
        **{name: value for name, value in given.items() if name in own},
    )
    if num_ranks is not None:
        chosen_streams(launch, num_ranks)  # raises, before ranks start
    return launch


def chosen_streams(
    launch: Launch, num_ranks: int
) -> tuple[dict[int, set[StreamName]], dict[int, set[StreamName]]]:
    """Return rank -> the streams that are written to files, and rank -> those that are not shown,
    by torchrun's meaning of its options.

    Raises:
        MeshUsageError: an option is wrong.
    """
    redirects = torchrun.streams_of("--redirects", launch.redirects or "0", num_ranks)
    default = "3" if launch.log_dir and not launch.redirects else "0"
    tee = torchrun.streams_of("--tee", launch.tee or default, num_ranks)
    files = {rank: {*redirects.get(rank, ()), *tee.get(rank, ())} for rank in range(num_ranks)}
    hidden = {rank: {*redirects.get(rank, ())} - {*tee.get(rank, ())} for rank in range(num_ranks)}
    if launch.ranks_filter:
        from ..wire.ranks import parse_ranks

        shown = parse_ranks(launch.ranks_filter, num_ranks)
        hidden.update((rank, {*BOTH}) for rank in range(num_ranks) if rank not in shown)
    return {rank: names for rank, names in files.items() if names}, hidden


def _count_gpus(chosen: str | None, environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that ranks on this host may use, without importing torch."""
    visible = chosen if chosen is not None else environment.get(VISIBLE)
    if visible is not None:
        return sum(each.strip() not in ("", "-1", "none") for each in visible.split(","))
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # of a driver that is not there
        return 0
