"""``cellmesh exec``, ``status``, ``stacks``, ``logs``, ``interrupt``, ``heal`` and ``pull``: act on
a living mesh, as its controller for a moment or, if a process holds it, as a guest of that process.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO, NoReturn

import click
import msgspec

from ..controller.acts import (
    QUIET_S,
    Activities,
    Answer,
    AnyAct,
    Caller,
    Exec,
    Heal,
    Interrupt,
    Logs,
    Pull,
    Stacks,
    Status,
    perform,
)
from ..controller.output.console import ConsoleSink
from ..controller.session.attach import attach, find_mesh
from ..controller.session.guests import ANSWER_S, NAME, Event, Request
from ..controller.session.living import FoundMesh
from ..errors import CellmeshError, HostError, MeshUsageError, NoMeshError
from ..wire.host import host_name
from .rendering import as_json

# How long a process that has just begun to hold a mesh may take to accept guests.
_LISTEN_S, _PAUSE_S = 2.0, 0.02
_RECOVERY_S = 30.0


def carry_out(name: str | None, act: AnyAct) -> Answer:
    """Carry out an act on the mesh of this name, or on the only one, and return its outcome.

    Raises:
        CellmeshError: there is no such mesh, or it cannot be used from here.
    """
    since, holder = time.monotonic(), None
    until = since + act.timeout_s if isinstance(act, Exec) and act.timeout_s else None
    try:
        while True:
            found = find_mesh(name)
            if found.holder != holder:
                since, holder = time.monotonic(), found.holder
            answer = (_act_alone if found.is_free else _ask)(found, act, since, until)
            if answer is not None:
                return answer
            if until is not None and time.monotonic() >= until:
                why = f"its turn has not come: `cellmesh stacks {found.name}` shows what runs"
                return Answer(failure=f"{found.name}: {why}", code=124)
            time.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return Answer(failure="interrupted before it began", code=130)


def _act_alone(found: FoundMesh, act: AnyAct, since: float, until: float | None) -> Answer | None:
    """Act as the controller of a mesh that has none, and leave it; return None if another process
    has become its controller.
    """
    # Output of earlier runs is for the next notebook.
    unseen = ConsoleSink(io.StringIO(), io.StringIO())
    try:
        mesh = attach(found.name, sink=unseen, visits=True)
    except NoMeshError:
        if find_mesh(found.name).is_free and time.monotonic() > since + _LISTEN_S:
            raise
        return None
    try:
        return perform(mesh, act, Caller(ConsoleSink(mesh=mesh.name)))
    finally:
        with contextlib.suppress(CellmeshError):  # it has ended
            if recovery := mesh.rank_set.session.recovery():
                recovery.wait(_RECOVERY_S)
            mesh.detach()


def _ask(found: FoundMesh, act: AnyAct, since: float, until: float | None) -> Answer | None:
    """Have the holder of a mesh carry out an act; return None if the mesh must be looked at again,
    as the holder has left it or is about to.
    """
    name, pid, where = found.name, found.ticket.controller_pid, ""
    if found.holder is not None:
        pid, where = found.holder.controller_pid, found.holder.host
    holder = f"{name} is held by process {pid}"
    if where not in ("", host_name()):
        raise HostError(f"{holder} on {where}, which takes commands there: run this on {where}")
    with socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(ANSWER_S)
        request = Request(str(found.ticket.key), os.getpid(), act, sys.stderr.isatty())
        try:
            guest.connect(str(Path(found.ticket.directory) / NAME))
            guest.sendall(msgspec.json.encode(request) + b"\n")
            return _hear(guest, act, until, holder)
        except (ConnectionError, FileNotFoundError):
            if time.monotonic() < since + _LISTEN_S:
                return None
            raise HostError(
                f"{holder}, which takes no commands: detach it there (`%dist_detach`), or end it "
                f"(`cellmesh stop {name}`)"
            ) from None
        except TimeoutError:
            raise HostError(
                f"{holder}, which does not answer: it is stopped, or within one long call. `kill "
                f"{pid}` leaves the mesh to others, `cellmesh stop {name}` ends it"
            ) from None


def _hear(guest: socket.socket, act: AnyAct, until: float | None, holder: str) -> Answer | None:
    """Show the output that a mesh's holder sends, and return its answer, or None as `_ask` does;
    Ctrl-C interrupts the run.
    """
    lines, is_taken, is_pressed = guest.makefile("rb"), False, False

    def press(*_: object) -> None:
        nonlocal is_pressed
        if is_pressed or not (is_taken and act.is_run):
            raise KeyboardInterrupt
        is_pressed = True  # and nothing is raised, which would lose output
        guest.sendall(b"!")

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, press)
    try:
        while True:
            line = lines.readline()
            if not line and not is_taken:
                raise ConnectionError
            event = msgspec.json.decode(line, type=Event) if line else Event("left")
            match event.kind:
                case "taken":
                    is_taken = True
                    guest.settimeout(None)
                case "turn":
                    left_s = math.inf if until is None else max(0.01, until - time.monotonic())
                    if left_s > QUIET_S and not select.select([guest], [], [], QUIET_S)[0]:
                        name = holder.partition(" ")[0]
                        how = f"`cellmesh status {name}` shows what runs"
                        click.echo(
                            f"{holder}, a command, whose end this one awaits: {how}", err=True
                        )
                        left_s -= QUIET_S
                    select.select([guest], [], [], None if until is None else left_s)
                    return None
                case "out" | "err" as kind:
                    with contextlib.suppress(BrokenPipeError):  # of `| head`
                        click.echo(event.text, nl=False, err=kind == "err")
                case "answer":
                    return event.answer
                case "left":
                    why = "and has left or ended it: `cellmesh status` shows what runs on"
                    return Answer(failure=f"{holder.replace(' is ', ' was ')}, {why}", code=1)
    except KeyboardInterrupt:
        if not is_taken:
            raise
        return Answer(failure="left: what was asked for goes on", code=130)
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------- the commands


def _show(answer: Answer, wants_json: bool) -> NoReturn:
    """Print an answer, and end the process with its code."""
    if wants_json and answer.data is not None:
        click.echo(as_json(answer.data))
    elif answer.text and not wants_json:
        click.echo(answer.text)
    if answer.failure:
        click.echo(f"Error: {'; '.join(answer.failure.splitlines())}", err=True)
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed
            file.flush()
    os._exit(answer.code)  # nothing is left to do, and the interpreter would take 20 ms for that


_json = click.option("--json", "wants_json", is_flag=True, help="Write JSON, for programs.")
_ranks = click.option("--ranks", default="", metavar="SET", help="Ranks, like 0,2-3.")
_name = click.argument("name", required=False)


@click.command("exec")
@click.argument("words", nargs=-1, metavar="[NAME] CODE")
@click.option("-f", "file", type=click.File("rb"), metavar="FILE", help="Run a file's text.")
@_ranks
@click.option("--at", default="", metavar="COORD", help="A mesh coordinate, like dp=1,tp=0.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Interrupt it then.")
@_json
def exec_command(
    words: tuple[str, ...],
    file: IO[bytes] | None,
    ranks: str,
    at: str,
    timeout_s: float | None,
    wants_json: bool,
) -> None:
    """Run one cell on the ranks of a mesh, and show its output as a notebook does.

    CODE is Python; - reads it from standard input. NAME may be left out where one mesh lives. If a
    notebook or script holds the mesh, the cell waits for its turn there, and the holder shows a
    line on it. Ctrl-C interrupts the cell; if this command is killed, the cell runs on.

    The exit code is 0; 1 if the cell failed, 124 after --timeout, 130 after Ctrl-C. --json writes
    one object: for each group of ranks its output, displays, value and exception.

    \b
    Examples:
      cellmesh exec dev 'print(loss)'
      cellmesh exec dev --ranks 0 'model'
      cellmesh exec dev -f check.py --timeout 60
      echo 'loss.item()' | cellmesh exec dev - --json
    """
    if file is None:
        name, code = _split(words, "code", "'print(rank)'")
        source = sys.stdin.buffer.read() if code == "-" else os.fsencode(code)
    else:
        (name,) = words[:1] or (None,)
        source = file.read()
    try:
        text = source.decode()
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise MeshUsageError(f"line {line} of the code is not UTF-8") from None
    act = Exec(source=text, ranks=ranks, at=at, timeout_s=timeout_s, is_recorded=wants_json)
    _show(carry_out(name, act), wants_json)


def _split(words: tuple[str, ...], what: str, example: str) -> tuple[str | None, str]:
    """Return the mesh's name, if it is given, and the last word."""
    if not 1 <= len(words) <= 2:
        raise MeshUsageError(f"give the mesh's name and the {what}, like `dev {example}`")
    return (words[0] if len(words) > 1 else None), words[-1]


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME] EXPRESSION")
@click.option("--rank", type=int, default=0, show_default=True, help="Whose value.")
@click.option("--all", "wants_all", is_flag=True, help="All ranks' values.")
@_json
def pull(words: tuple[str, ...], rank: int, wants_all: bool, wants_json: bool) -> None:
    """Print a value of the ranks of a mesh: numbers, texts, lists and dicts whole, tensors of more
    than one element and other objects in short.

    \b
    Examples:
      cellmesh pull dev 'loss.item()' --all
      cellmesh pull dev 'dict(optimizer.param_groups[0])' --json
    """
    name, expression = _split(words, "expression", "loss")
    act = Pull(expression=expression, ranks="" if wants_all else str(rank))
    _show(carry_out(name, act), wants_json)


@click.command()
@_name
@_json
def status(name: str | None, wants_json: bool) -> None:
    """Show each rank of a mesh: process, device, activity, memory (as %dist_status).

    \b
    Examples:
      cellmesh status dev
    """
    from ..magics.render.tables import doing, status_table

    answer = carry_out(name, Status())
    if answer.data is not None:
        found = msgspec.convert(msgspec.to_builtins(answer.data), Activities)
        states = dict(found.states)
        text = repr(status_table(found.mesh, found.ranks, states))
        ranks = [
            {**msgspec.structs.asdict(info), "activity": doing(info, states.get(info.rank))}
            for info in found.ranks
        ]
        answer = msgspec.structs.replace(
            answer, text=text, data={"mesh": found.mesh, "ranks": ranks}
        )
    _show(answer, wants_json)


@click.command()
@_name
@_ranks
@click.option("--all", "all_threads", is_flag=True, help="All threads, not only the main one.")
@_json
def stacks(name: str | None, ranks: str, all_threads: bool, wants_json: bool) -> None:
    """Show where each rank of a mesh is, also while it is blocked (as %dist_stacks).

    \b
    Examples:
      cellmesh stacks dev --ranks 0
    """
    _show(carry_out(name, Stacks(ranks=ranks, all_threads=all_threads)), wants_json)


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME] [RANKS]")
@click.option("--lines", "num_lines", type=click.IntRange(1), default=50, show_default=True)
@_json
def logs(words: tuple[str, ...], num_lines: int, wants_json: bool) -> None:
    """Show the end of all that ranks of a mesh have printed (as %dist_logs).

    \b
    Examples:
      cellmesh logs dev 3 --lines 200
    """
    *names, ranks = words or ("all",)
    if not re.fullmatch(r"[\d,\s-]+|all", ranks):
        names, ranks = [*names, ranks], "all"
    act = Logs(ranks=ranks, num_lines=num_lines)
    _show(carry_out(names[0] if names else None, act), wants_json)


@click.command()
@_name
@_ranks
@_json
def interrupt(name: str | None, ranks: str, wants_json: bool) -> None:
    """Interrupt the runs of all ranks, those of other processes too, and wait for their end.

    \b
    Examples:
      cellmesh interrupt dev
    """
    _show(carry_out(name, Interrupt(ranks=ranks)), wants_json)


@click.command()
@_name
@click.option(
    "--from", "source", type=int, metavar="RANK", help="Copy this rank's names to new ones."
)
@click.option("--hosts", default="", help="Put these hosts in the places of lost ones: c:4.")
@_json
def heal(name: str | None, source: int | None, hosts: str, wants_json: bool) -> None:
    """Replace dead ranks of a mesh and rebuild the process groups (as %dist_heal).

    \b
    Examples:
      cellmesh heal dev --from 0
    """
    _show(carry_out(name, Heal(source=source, hosts=hosts)), wants_json)
