"""``cellmesh run``: runs a script on ranks as torchrun does, on new ones or on those of a mesh."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..controller.news import News
from ..controller.options import (
    find_project,
    parse_duration,
    read_project_options,
    working_directory,
)
from ..errors import MeshUsageError, did_you_mean
from ..magics.options import START_OPTIONS
from ..wire.environment import VISIBLE
from ..wire.verbs import StreamName
from . import torchrun

if TYPE_CHECKING:
    from ..controller.mesh import Mesh
    from ..controller.run import Run

# How long ranks may take to end after a signal, as under torchrun.
_GRACE_S = 30.0
# How often a wait looks at other conditions than those that are reported.
_LOOK_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# In place of a signal: a file has changed that is watched; output cannot be written (status 1).
_CHANGED, _UNWRITABLE = -1, 1 - 128
_INTERRUPTS = (signal.SIGINT, _CHANGED)
# timeout(1) sends its signal to the process, and at once to the process's group.
_TWICE_S = 0.5
# Files of a project that are watched besides Python's.
_SETTINGS = (".json", ".toml", ".yaml", ".yml")
_BOTH: tuple[StreamName, ...] = ("stdout", "stderr")
# Options of a start that do not suit a script, or have another name here (--keep).
_LEFT_OUT = ("num_ranks", "lease_s", "auto_heal")


# ---- the command line


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
        except ValueError:
            raise MeshUsageError(f"{path} is no Python source") from None
        except SyntaxError as error:
            if error.lineno is None:  # of its encoding
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
    grace_s: float = _GRACE_S
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
    names = {param.name for param in START_OPTIONS}.difference(_LEFT_OUT)
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
    if given.get("watch") and given.get("keep"):
        raise MeshUsageError("--watch starts ranks for each run, and --keep keeps them: choose one")
    launch = Launch(
        Script(words[0], tuple(words[1:]), bool(given.get("module"))),
        num_ranks,
        start,
        on=on,
        waits=bool(given.get("wait")),
        keep_s=parse_duration(given.get("keep", "0")),
        is_interactive=bool(given.get("interactive")),
        keeps_warm=not given.get("no_keep_warm") and project.get("prestart", True) is True,
        is_raw=bool(given.get("raw")),
        log_dir=given.get("log_dir", ""),
        redirects=given.get("redirects", ""),
        tee=given.get("tee", ""),
        ranks_filter=given.get("local_ranks_filter", ""),
        grace_s=given.get("shutdown_timeout", _GRACE_S),
        watches=bool(given.get("watch")),
    )
    if num_ranks is not None:
        chosen_streams(launch, num_ranks)  # raises, before ranks start
    return launch


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


def _hidden_option(name: str) -> click.Option:
    is_flag = name in torchrun.FLAGS
    flag = f"--{name.replace('_', '-')}"
    return click.Option([flag, name], is_flag=is_flag, default=None, hidden=True)


_OPTIONS: Sequence[click.Parameter] = (
    click.Option(["-n", "n"], type=int, metavar="N", help="Number of ranks (1)."),
    click.Option(
        ["--nproc-per-node"],
        metavar="N|auto|gpu|cpu",
        help="Number of ranks, as torchrun takes it; with --hosts or --launch, on each host.",
    ),
    click.Option(["-m", "--module"], is_flag=True, help="SCRIPT is a module, as in python -m."),
    click.Option(["--on"], metavar="NAME", help="Run in the ranks of this living mesh."),
    click.Option(["--wait"], is_flag=True, help="With --on: wait while the mesh is busy."),
    click.Option(
        ["-i", "interactive"], is_flag=True, help="Then open a shell on the ranks, as python -i."
    ),
    click.Option(["--keep"], metavar="TIME", help="Keep the ranks after the script: 30m, 2h."),
    click.Option(["--watch"], is_flag=True, help="Run again when a file of the project changes."),
    click.Option(["--raw"], is_flag=True, help="Do not fold output by ranks on a terminal either."),
    click.Option(["--log-dir"], metavar="DIR", help="Write one file a rank and stream there, too."),
    click.Option(
        ["-r", "--redirects"], metavar="1|2|3", help="Streams to write to files only: 3 is both."
    ),
    click.Option(["-t", "--tee"], metavar="1|2|3", help="Streams to write to files and show."),
    click.Option(["--local-ranks-filter"], metavar="RANKS", help="Show these ranks' output only."),
    click.Option(
        ["--shutdown-timeout"],
        type=float,
        metavar="SECONDS",
        help="How long ranks may take to end after SIGTERM or SIGHUP (30).",
    ),
    click.Option(["--no-keep-warm"], is_flag=True, help="Leave no process for the next run."),
    *(param for param in START_OPTIONS if param.name not in _LEFT_OUT),
    *map(_hidden_option, torchrun.UNSEEN),
    click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]..."),
)


@click.command(
    "run",
    params=[*_OPTIONS],
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)
@click.pass_context
def run(ctx: click.Context, /, words: tuple[str, ...], **given: Any) -> None:
    """Run a script on ranks, in place of torchrun; options precede SCRIPT.

    The script gets new processes in which torch is imported already: they are forked from one that
    waits for ten minutes after the last run. torchrun's options are accepted where they mean the
    same. The exit status is that of the rank that failed first, 128 + n after signal n.

    \b
    Examples:
      cellmesh run -n 4 train.py --lr 0.1
      cellmesh run --nproc-per-node gpu -m package.train
      cellmesh run -n 4 --keep 30m train.py       then: cellmesh shell NAME
      cellmesh run --on dev train.py              in the ranks of `cellmesh start 4 --name dev`
    """
    chosen = {n: v for n, v in given.items() if v is not False and v not in (None, ())}
    ctx.exit(execute(read_launch(words, chosen, read_project_options(working_directory()))))


# ---- the run


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by a signal while nothing waits for `Signals`.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Signals:
    """Signals that this process has received, for the thread that waits for the script.

    Attributes:
        are_raised: whether a signal raises `Stopped` instead.
        news: reports each signal.
    """

    are_raised: bool = True
    news: News = field(default_factory=News)
    _received: deque[int] = field(default_factory=deque)

    def listen(self) -> None:
        """Receive the signals that end a program, except those that this process ignores."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a background job
                signal.signal(number, self._receive)

    def put(self, number: int) -> None:
        """Add a signal; may be called on any thread."""
        self._received.append(number)
        self.news.report()

    def take(self, is_over: Callable[[], bool], timeout_s: float | None) -> list[int]:
        """Wait until a signal is there, a condition holds, or the time is up; return the signals
        that were not returned before.
        """
        self.news.wait_for(lambda: bool(self._received) or is_over(), timeout_s)
        return [self._received.popleft() for _ in range(len(self._received))]

    def _receive(self, number: int, _frame: object) -> None:
        self.put(number)
        if self.are_raised:  # Python drops what is raised within a callback
            raise Stopped(number)


def execute(launch: Launch) -> int:
    """Run a script on ranks until all have ended; return the exit status of ``cellmesh run``.

    Raises:
        CellmeshError: the script or an option is wrong, or the ranks did not start.
    """
    if launch.is_interactive and not sys.stdin.isatty():
        raise MeshUsageError("-i opens a shell, which needs a terminal: --keep 30m keeps the ranks")
    signals = Signals()
    signals.listen()
    if launch.watches:
        return _run_again_and_again(launch, signals)
    return _run_once(launch, signals)[0]


def _run_again_and_again(launch: Launch, signals: Signals) -> int:
    try:
        import watchfiles
    except ImportError:
        raise MeshUsageError(
            "--watch needs the package watchfiles: pip install 'cellmesh[watch]'"
        ) from None
    folder = find_project(launch.script.folder) or launch.script.folder
    files = watchfiles.PythonFilter(extra_extensions=_SETTINGS)

    def watch() -> None:
        for _ in watchfiles.watch(folder, watch_filter=files):
            signals.put(_CHANGED)

    threading.Thread(target=watch, name="cellmesh-watch", daemon=True).start()
    while True:
        signals.are_raised = True
        try:
            status, ended_by = _run_once(launch, signals)
        except MeshUsageError as error:  # such as of a script that is half edited
            _echo(str(error))
            status, ended_by = 1, 0
        while not ended_by:
            signals.are_raised = False
            _echo(f"ended with status {status}; waits for a change in {folder}")
            ended_by = max(signals.take(lambda: False, None))  # a signal rather than a change
        if ended_by != _CHANGED:
            return 128 + ended_by


def _run_once(launch: Launch, signals: Signals) -> tuple[int, int]:
    """Run a script; return its exit status and the signal that has ended it, or 0."""
    launch.script.check()
    try:
        mesh, leave_zygote = _attach(launch) if launch.on else _start(launch)
    except Stopped as stopped:
        return 128 + stopped.number, stopped.number
    from .script_output import describe_end, status_of

    ended_by, is_kept = 0, False
    try:
        run = _submit(mesh, launch, signals)
        ended_by = _await_end(run, mesh, launch, signals)
        is_kept = launch.keep_s > 0 and run.done() and ended_by in (0, signal.SIGINT)
        ended = run.outcomes()
        status = 128 + ended_by if ended_by else status_of(ended)
        if status and ended_by not in (signal.SIGPIPE, _UNWRITABLE, _CHANGED):
            _echo(describe_end(ended) or f"stopped by {signal.Signals(ended_by).name}")
        if launch.is_interactive and ended_by in (0, signal.SIGINT):
            from .shell import run_shell

            signal.signal(signal.SIGINT, signal.default_int_handler)
            run_shell(mesh, banner=f"{mesh}; the script has ended, and c-d ends its ranks")
    except Stopped as stopped:
        ended_by = stopped.number
        status = 128 + ended_by
    finally:
        signals.are_raised = False
        mesh.detach() if launch.on or is_kept else mesh.rank_set.session.stop(is_hurried=True)
        leave_zygote()  # not before: its imports would take the script's time
    if ended_by in (signal.SIGPIPE, _UNWRITABLE):  # else the interpreter complains at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    elif is_kept:
        _echo(f"the ranks live on: `cellmesh shell {mesh.name}`, or `%dist_attach {mesh.name}`")
    return status, ended_by


def _echo(text: str) -> None:
    click.echo(f"cellmesh run: {text}", err=True)


def _start(launch: Launch) -> tuple[Mesh, Callable[[], object]]:
    """Start a mesh for a script; return it, and a function that leaves a zygote for the next."""
    from ..controller.output.console import ConsoleSink
    from ..controller.session.launch.prestart import shell_prestart
    from ..controller.session.life import show_progress
    from ..controller.session.start import start_from

    script = launch.script
    if not sys.flags.safe_path:
        # The folder of `cellmesh` itself, or the working directory.
        sys.path[:1] = [
            os.getcwd() if script.is_module else str(Path(script.target).parent.resolve())
        ]
    prestart = shell_prestart() if launch.keeps_warm else None
    given = {**launch.start, "lease_s": launch.keep_s, "auto_heal": False}
    sink = ConsoleSink()
    try:
        mesh = start_from(prestart, launch.num_ranks, on_progress=show_progress(sink), **given)
    finally:
        sink.status("", True)
    return mesh, prestart.leave_one if prestart is not None else lambda: None


def _attach(launch: Launch) -> tuple[Mesh, Callable[[], object]]:
    from ..controller.session.attach import attach, find_mesh
    from ..controller.session.standing import describe_runs

    while not (found := find_mesh(launch.on)).is_free:
        if not launch.waits:
            holder = found.holder.controller_pid if found.holder is not None else "?"
            raise MeshUsageError(
                f"{found.name} is held by process {holder}, and runs {describe_runs(found.ticket)}:"
                " --wait waits until it is free"
            )
        time.sleep(_LOOK_S)
    mesh = attach(found.name)
    if (runs := mesh.runs) and not launch.waits:
        mesh.detach()
        raise MeshUsageError(f"{found.name} runs {runs[0].title}: --wait waits for its end")
    for run in runs:
        run.wait()
    return mesh, lambda: None


def _submit(mesh: Mesh, launch: Launch, signals: Signals) -> Run[Any]:
    from ..controller.output.console import ConsoleSink, Unremarked
    from ..controller.output.fold import HOLD_HOSTS_S, HOLD_S
    from ..controller.rank_set import submit_script
    from .script_output import LogFiles, ScriptPrinter, Stdin, write_whole

    broken: list[StreamName] = []

    def write(stream: StreamName, data: bytes) -> None:
        try:
            write_whole(_BOTH.index(stream) + 1, data)
        except OSError as error:  # the reader has gone, or the disk is full
            is_pipe = isinstance(error, BrokenPipeError)
            if not is_pipe and not broken:
                _echo(f"{stream} cannot be written: {error.strerror}")
            broken.append(stream)
            signals.put(signal.SIGPIPE if is_pipe else _UNWRITABLE)

    ranks, session = range(len(mesh)), mesh.rank_set.session
    is_raw = {name: launch.is_raw or not os.isatty(_BOTH.index(name) + 1) for name in _BOTH}
    files, hidden = chosen_streams(launch, len(mesh))
    logs = None
    if files:
        logs = LogFiles(_log_directory(launch.log_dir), files)
        if not launch.log_dir:
            _echo(f"output is in {logs.directory}")
    printer = ScriptPrinter(
        ranks,
        Unremarked(ConsoleSink()),
        write,
        Stdin(session.runs.reply),
        raw=[name for name in _BOTH if is_raw[name]],
        hidden=hidden,
        logs=logs,
        hold_s=HOLD_HOSTS_S if session.has_hosts else HOLD_S,
        folds_numbers=session.displays.folds_numbers,
    )
    script = launch.script
    run = submit_script(
        mesh.rank_set,
        # A mesh that lives may have another working directory.
        os.path.abspath(script.target) if launch.on and not script.is_module else script.target,
        script.argv,
        is_module=script.is_module,
        is_shared=bool(launch.on),
        keeps=bool(launch.keep_s or launch.is_interactive),
        is_terminal=not any(is_raw.values()),
        is_joined=all(is_raw.values())
        and not (files or any(hidden.values()))
        and os.path.sameopenfile(1, 2),
        printer=printer,
    )
    run.on_end(signals.news.report)
    signals.are_raised = False
    return run


def _await_end(run: Run[Any], mesh: Mesh, launch: Launch, signals: Signals) -> int:
    """Wait for the end of a script, and pass signals on to its ranks.

    Returns:
        The number of the signal that has ended it, as `react` chooses; 0 without one.
    """
    from ..controller.rank_set import signal_ranks
    from ..wire.ranks import describe_ranks

    ended_by, since, due, is_over = 0, 0.0, float("inf"), False
    while not is_over:
        is_over = run.done()  # output may have failed just before
        for number in signals.take(run.done, _LOOK_S):
            now = time.monotonic()
            ended_by, step = react(ended_by, number, now - since, bool(launch.on))
            if step == "leave":
                return ended_by
            if step:
                since, due = now, now + launch.grace_s
            if step == "interrupt":
                run.interrupt()
            elif step == "signal":
                signal_ranks(mesh.rank_set, number)
        if run.failed_ranks():
            due = min(due, time.monotonic() + launch.grace_s)
        if time.monotonic() > due and not (launch.on or is_over):
            left = describe_ranks(run.waiting_ranks())
            _echo(f"{left} did not end within {launch.grace_s:g} s: killed")
            return ended_by
    return ended_by


# ---- decisions


def react(
    first: int, number: int, since_s: float, is_shared: bool
) -> tuple[int, Literal["", "interrupt", "signal", "leave"]]:
    """Return the signal that ends a script, and the step to take, after a signal has arrived. To
    leave kills the ranks that belong to the script.

    Args:
        first: the signal that ends the script so far; 0 for none.
        number: the signal that has arrived.
        since_s: time since the last step, in seconds.
        is_shared: whether the ranks are those of a living mesh (``--on``), where a second interrupt
            kills those that resist.
    """
    if number in (signal.SIGPIPE, _UNWRITABLE):
        return first or number, "leave"
    is_copy = number == first != signal.SIGINT and since_s < _TWICE_S
    if first and (number == _CHANGED or is_copy):
        return first, ""
    if first == _CHANGED:  # the script is interrupted already, and its user wants no other run
        return number, "" if is_shared else "leave"
    if first and not is_shared:
        return first, "leave"
    return first or number, "interrupt" if is_shared or number in _INTERRUPTS else "signal"


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
        hidden.update((rank, {*_BOTH}) for rank in range(num_ranks) if rank not in shown)
    return {rank: names for rank, names in files.items() if names}, hidden


def _log_directory(base: str) -> Path:
    """Make the directory of a launch as torchrun does: DIR/none_x1y2z3.

    Raises:
        MeshUsageError: it cannot be made there.
    """
    import tempfile

    if not base:
        return Path(tempfile.mkdtemp(prefix="none_", dir=tempfile.mkdtemp(prefix="cellmesh_")))
    try:
        os.makedirs(base, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="none_", dir=base))
    except OSError as error:
        raise MeshUsageError(f"--log-dir {base} cannot be written: {error.strerror}") from None
