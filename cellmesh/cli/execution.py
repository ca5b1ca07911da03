"""Runs the script of a launch on ranks, and passes signals on to them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..controller.news import News
from ..controller.options import find_project
from ..errors import MeshUsageError
from ..wire.verbs import StreamName
from .launch import Launch, chosen_streams
from .torchrun import BOTH

if TYPE_CHECKING:
    from ..controller.mesh import Mesh
    from ..controller.run import Run
    from .script_output import LogFiles

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


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by a signal while nothing waits for `Signals`.

    Args:
        number: the signal.
    """

    @property
    def number(self) -> int:
        """The signal."""
        return int(self.args[0])


@dataclass
class Signals:
    """Signals that this process has received, for the thread that waits for the script.

    Attributes:
        are_raised: whether a signal raises `Stopped` instead.
        is_stopping: whether a signal has arrived since the script began: output is dropped whose
            reader is blocked, as in ``less``.
        news: reports each signal.
    """

    are_raised: bool = True
    is_stopping: bool = False
    news: News = field(default_factory=News)
    _received: deque[int] = field(default_factory=deque)

    def listen(self) -> None:
        """Receive the signals that end a program, except those that this process ignores."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a background job
                signal.signal(number, self._receive)

    def put(self, number: int) -> None:
        """Add a signal; may be called on any thread."""
        self.is_stopping = True
        self._received.append(number)
        self.news.report()

    def take(self, is_over: Callable[[], bool], timeout_s: float | None) -> list[int]:
        """Wait until a signal is there, a condition holds, or the time is up; return the signals
        that were not returned before.
        """
        self.news.wait_for(lambda: bool(self._received) or is_over(), timeout_s)
        return [self._received.popleft() for _ in range(len(self._received))]

    def echo(self, text: str) -> None:
        """Write a remark of this command to standard error."""
        with contextlib.suppress(OSError):
            data = f"cellmesh run: {text}\n".encode(errors="backslashreplace")
            write_whole(2, data, lambda: self.is_stopping)

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
    ended_at = float("inf")

    def is_edit(change: watchfiles.Change, path: str) -> bool:
        if not files(change, path):
            return False
        # Other files that change during a run may be its results.
        return path.endswith(".py") or (os.path.exists(path) and os.path.getmtime(path) > ended_at)

    def watch() -> None:
        for _ in watchfiles.watch(folder, watch_filter=is_edit):
            signals.put(_CHANGED)

    threading.Thread(target=watch, name="cellmesh-watch", daemon=True).start()
    while True:
        signals.are_raised, ended_at = True, float("inf")
        try:
            status, ended_by = _run_once(launch, signals)
        except MeshUsageError as error:  # such as of a script that is half edited
            signals.echo(str(error))
            status, ended_by = 1, 0
        ended_at = time.time()
        while not ended_by:
            signals.are_raised = False
            signals.echo(f"ended with status {status}; waits for a change in {folder}")
            ended_by = max(signals.take(lambda: False, None))  # a signal rather than a change
        if ended_by != _CHANGED:
            return 128 + ended_by


def _run_once(launch: Launch, signals: Signals) -> tuple[int, int]:
    """Run a script; return its exit status and the signal that has ended it, or 0."""
    launch.script.check()
    signals.is_stopping = False
    try:
        mesh, leave_zygote = _attach(launch) if launch.on else _start(launch)
    except Stopped as stopped:
        return 128 + stopped.number, stopped.number
    from ..controller.output.console import in_terminal
    from .script_output import describe_end, status_of

    ended_by, is_kept = 0, False
    try:
        run = _submit(mesh, launch, signals)
        ended_by = _await_end(run, mesh, launch, signals)
        is_kept = launch.keep_s > 0 and run.done() and ended_by in (0, signal.SIGINT)
        ended = run.outcomes()
        status = 128 + ended_by if ended_by else status_of(ended)
        if status and ended_by not in (signal.SIGPIPE, _UNWRITABLE, _CHANGED):
            end = describe_end(ended) or f"stopped by {signal.Signals(ended_by).name}"
            signals.echo(in_terminal(end, mesh.name))
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
        signals.echo(
            f"the ranks live on: `cellmesh shell {mesh.name}`, or `%dist_attach {mesh.name}`"
        )
    return status, ended_by


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
                f" `cellmesh exec {found.name} -f FILE` runs there, --wait waits until it is left"
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
    from .script_output import ScriptPrinter, Stdin

    broken: set[StreamName] = set()

    def write(stream: StreamName, data: bytes) -> None:
        try:
            if stream not in broken:
                write_whole(BOTH.index(stream) + 1, data, lambda: signals.is_stopping)
        except OSError as error:  # the reader has gone or is blocked, or the disk is full
            broken.add(stream)
            if isinstance(error, BrokenPipeError):
                signals.put(signal.SIGPIPE)
            elif not isinstance(error, TimeoutError) and len(broken) == 1:
                fail(stream, error)

    def fail(output: str, error: OSError) -> None:
        signals.echo(f"{output} cannot be written: {error.strerror}")
        signals.put(_UNWRITABLE)

    ranks, session = range(len(mesh)), mesh.rank_set.session
    is_raw = {name: launch.is_raw or not os.isatty(BOTH.index(name) + 1) for name in BOTH}
    files, hidden = chosen_streams(launch, len(mesh))
    logs = None
    if files:
        logs = _make_logs(launch.log_dir, files, lambda error: fail("the log files", error))
        if not launch.log_dir:
            signals.echo(f"output is in {logs.directory}")
    printer = ScriptPrinter(
        ranks,
        Unremarked(ConsoleSink()),
        write,
        Stdin(session.runs.reply),
        raw=[name for name in BOTH if is_raw[name]],
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
            signals.echo(f"{left} did not end within {launch.grace_s:g} s: killed")
            return ended_by
    return ended_by


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


def _make_logs(
    base: str, files: Mapping[int, Collection[StreamName]], on_error: Callable[[OSError], None]
) -> LogFiles:
    """Make the files of a launch as torchrun does, in DIR/none_x1y2z3.

    Raises:
        MeshUsageError: they cannot be made there.
    """
    import tempfile

    from .script_output import LogFiles

    try:
        parent = base or tempfile.mkdtemp(prefix="cellmesh_")
        os.makedirs(parent, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="none_", dir=parent))
        return LogFiles(directory, files, on_error)
    except OSError as error:
        where = base or tempfile.gettempdir()
        raise MeshUsageError(f"--log-dir {where} cannot be written: {error.strerror}") from None


def write_whole(descriptor: int, data: bytes, may_drop: Callable[[], bool] = lambda: False) -> None:
    """Write all of these bytes to a file descriptor; wait for its reader.

    Args:
        descriptor: the file descriptor.
        data: the bytes.
        may_drop: returns whether to wait no longer; looked at every `_LOOK_S` seconds.

    Raises:
        TimeoutError: its reader is blocked, and `may_drop` holds.
        OSError: its reader has gone, or its disk is full.
    """
    view, poll = memoryview(data), select.poll()
    poll.register(descriptor, select.POLLOUT)
    while view:
        if poll.poll(_LOOK_S * 1000):
            with contextlib.suppress(BlockingIOError):  # an editor or node has given it
                view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]  # never blocks
        elif may_drop():
            raise TimeoutError
