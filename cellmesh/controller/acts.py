"""The acts of ``cellmesh exec``, ``status``, ``stacks``, ``logs``, ``interrupt``, ``heal`` and
``pull``, carried out by the process that controls the mesh: the command's own, or the mesh's holder
(`session.guests`).
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from ..errors import CellmeshError, RanksInterrupted
from ..wire.mesh_dims import parse_coordinate
from ..wire.messages import Died, Failed
from ..wire.ranks import describe_ranks, group_ranks, parse_ranks
from ..wire.status import RankInfo, RankState
from ..wire.values import PullNames
from .arguments import CellSyntaxError, check_expression
from .core.effects import describe_healing
from .core.mesh_state import order_of
from .core.runs import STOP_S
from .mesh import Mesh
from .output.console import COLOUR, Sink, in_terminal
from .output.fold import Block, Gap, Item, Line, Live, Rich
from .output.mime_bundle import label
from .ranks import Ranks
from .run import Run
from .status import show_log, show_stacks, stacks_of

# A command that waits as long says so.
QUIET_S = 1.0
_NO_INPUT = "nobody can be asked: the cell was sent by a command, not from a notebook"
# Makes a value that can be written as JSON, on the rank: a command imports neither torch nor the
# user's modules.
_PLAIN = "__import__('cellmesh.workers.inspect.safe_repr', fromlist=['']).plain"


class Act(msgspec.Struct, frozen=True, tag=True):
    """Base class of acts.

    Class attributes:
        verb: the activity, in a line for the holder of the mesh; "" for acts that change nothing.
        is_run: whether the act is a run, which waits for earlier runs.
    """

    verb: ClassVar[str] = ""
    is_run: ClassVar[bool] = False

    ranks: str = ""

    @property
    def subject(self) -> str:
        """The code or the ranks, in a line for the holder of the mesh."""
        return self.ranks or "all ranks"


class Exec(Act, frozen=True, kw_only=True):
    """Run a cell; `is_recorded`: return its output by ranks instead of showing it."""

    verb: ClassVar[str] = "runs"
    is_run: ClassVar[bool] = True

    source: str
    at: str = ""
    timeout_s: float | None = None
    is_recorded: bool = False

    @property
    def subject(self) -> str:
        first, *more = self.source.strip().splitlines() or [""]
        return f"{first} ..." if more else first


class Pull(Act, frozen=True, kw_only=True):
    """Evaluate an expression on ranks, and return the values as texts or for JSON."""

    verb: ClassVar[str] = "evaluates"
    is_run: ClassVar[bool] = True

    expression: str

    @property
    def subject(self) -> str:
        return self.expression


class Status(Act, frozen=True):
    """Return the processes and activities of all ranks, as `Activities`."""


class Stacks(Act, frozen=True, kw_only=True):
    """Return ranks' Python stacks."""

    all_threads: bool = False


class Logs(Act, frozen=True, kw_only=True):
    """Return the last lines that ranks have printed."""

    num_lines: int


class Interrupt(Act, frozen=True):
    """Interrupt all runs of ranks, and wait for their end."""

    verb: ClassVar[str] = "interrupts"


class Heal(Act, frozen=True, kw_only=True):
    """Replace dead ranks, and rebuild process groups."""

    verb: ClassVar[str] = "heals"

    source: int | None = None
    hosts: str = ""


AnyAct = Exec | Pull | Status | Stacks | Logs | Interrupt | Heal


class Answer(msgspec.Struct, frozen=True):
    """The outcome of an act.

    Attributes:
        text: text for people.
        data: the same for programs.
        failure: why the act failed, and the next step; "" if it did not.
        code: exit code of the command.
    """

    text: str = ""
    data: Any = None
    failure: str = ""
    code: int = 0


class Activities(msgspec.Struct, frozen=True):
    """Description, ranks and states of a mesh; ranks that do not answer have no state."""

    mesh: str
    ranks: Sequence[RankInfo]
    states: Sequence[tuple[int, RankState]]


@dataclass
class Caller:
    """The command that an act is carried out for.

    Attributes:
        sink: shows the output of its run.
        patience_s: longest wait for a run that has no time limit; None for a command that controls
            the mesh itself, and submits nothing else until the run ends.
        run: its run; None until it is submitted.
    """

    sink: Sink
    patience_s: float | None = None
    run: Run[Any] | None = None


def perform(mesh: Mesh, act: AnyAct, caller: Caller) -> Answer:
    """Carry out an act, and return its outcome, also of one that fails. Blocks."""
    return _guard(mesh, lambda: _perform(mesh, act, caller))


def _guard(mesh: Mesh, action: Callable[[], Answer]) -> Answer:
    try:
        return action()
    except RanksInterrupted as error:
        return Answer(failure=str(error), code=130)
    except CellmeshError as error:
        text = in_terminal(str(error), mesh.name)
        if mesh.rank_set.session.dead_ranks and "heal" not in text:
            text += f"; `cellmesh heal {mesh.name}` replaces dead ranks"
        return Answer(failure=text, code=1)


def _perform(mesh: Mesh, act: AnyAct, caller: Caller) -> Answer:
    session, chosen = mesh.rank_set.session, mesh[parse_ranks(act.ranks or "all", len(mesh))]
    match act:
        case Exec():
            place = parse_coordinate(act.at) if act.at else {}
            return _execute(mesh, chosen.at(**place) if place else chosen, act, caller)
        case Pull():
            check_expression(act.expression)
            work = PullNames(0, f"{_PLAIN}(({act.expression}\n))")
            caller.run = chosen.rank_set.start(work, f"`{act.expression}`")
            values = _result(mesh, caller.run, caller, caller.patience_s)
            texts = {rank: v if isinstance(v, str) else repr(v) for rank, v in values.items()}
            groups = group_ranks(texts)
            shown = [
                text if len(values) == 1 else f"{label(r)} {text}" for text, r in groups.items()
            ]
            data = [{"ranks": r, "value": values[r[0]]} for r in groups.values()]
            return Answer("\n".join(shown), data)
        case Status():
            states = tuple(mesh.states().items())
            return Answer(data=Activities(repr(mesh), mesh.report(), states))
        case Stacks():
            groups = stacks_of(session, chosen.ranks, act.all_threads)
            data = [{"ranks": ranks, "stack": text} for text, ranks in groups.items()]
            return Answer(show_stacks(groups), data)
        case Logs():
            logs = [(rank, show_log(session, rank, act.num_lines)) for rank in chosen.ranks]
            text = "\n".join(text for _, text in logs)
            return Answer(text, [{"rank": rank, "log": text} for rank, text in logs])
        case Interrupt():
            return _interrupt(mesh, chosen)
        case Heal():
            report = mesh.heal(act.source, hosts=act.hosts)
            return Answer(in_terminal(describe_healing(report), mesh.name), report)


def _execute(mesh: Mesh, ranks: Ranks, act: Exec, caller: Caller) -> Answer:
    recorder = Recorder(ranks.ranks)
    try:
        run = ranks.submit_cell(
            act.source, sink=recorder if act.is_recorded else caller.sink, in_order=True
        )
    except CellSyntaxError as error:
        text = "".join(traceback.format_exception_only(error))
        thrown = Thrown("SyntaxError", error.msg, text, error.lineno)
        place = f" (line {error.lineno})" if error.lineno else ""
        data = recorder.data(dict.fromkeys(ranks.ranks, thrown))
        return Answer(data=data, failure=f"SyntaxError: {error.msg}{place}", code=1)
    run.refuse_input(_NO_INPUT)
    caller.run = run

    def wait() -> Answer:
        try:
            limit_s = caller.patience_s if act.timeout_s is None else act.timeout_s
            _result(mesh, run, caller, limit_s)
        except TimeoutError:
            return _give_up(mesh, run, f"not done after {act.timeout_s:g} s")
        return Answer()

    answer = _guard(mesh, wait)
    return msgspec.structs.replace(answer, data=recorder.data(_thrown(run)))


def _result(mesh: Mesh, run: Run[Any], caller: Caller, limit_s: float | None) -> Any:
    """Return a run's result; note which earlier run it waits for, if that takes long."""
    runs = mesh.rank_set.session.runs
    if limit_s is None or limit_s > QUIET_S:
        with contextlib.suppress(TimeoutError):
            return run.result(QUIET_S)
        limit_s = None if limit_s is None else limit_s - QUIET_S
        # A call of another rank is known once it executes, and so is before those that wait.
        work = [each for each in runs.on(run.ranks) if not each.interleaves]
        earlier = min(work, key=lambda each: order_of(each.number), default=run)
        if earlier is not run:
            how = f"`cellmesh interrupt {mesh.name}` interrupts both"
            caller.sink.note(f"waits for {earlier.title}, which still runs: {how}")
    return run.result(limit_s)


def _give_up(mesh: Mesh, run: Run[Any], why: str) -> Answer:
    """Interrupt a run whose time is over, and wait a moment for its end."""
    run.interrupt()
    if run.wait(2 * STOP_S):
        return Answer(failure=f"{why}, and interrupted: `--timeout` sets the time", code=124)
    where = describe_ranks(run.waiting_ranks())
    return Answer(failure=f"{why}, and {where} did not stop: {_stop_advice(mesh)}", code=124)


def _stop_advice(mesh: Mesh) -> str:
    return f"`cellmesh stacks {mesh.name}` shows where, `cellmesh stop {mesh.name}` ends the mesh"


def _interrupt(mesh: Mesh, ranks: Ranks) -> Answer:
    runs = mesh.rank_set.session.runs.on(ranks.ranks)
    titles = [str(run) for run in runs]
    mesh.rank_set.session.runs.interrupt(runs)
    until = time.monotonic() + 2 * STOP_S
    left = [run for run in runs if not run.wait(max(0.0, until - time.monotonic()))]
    if left:
        where = describe_ranks(sorted({rank for run in left for rank in run.waiting_ranks()}))
        return Answer(failure=f"{where} did not stop: {_stop_advice(mesh)}", code=1)
    return Answer(f"interrupted {', '.join(titles) or 'nothing: no rank is busy'}", titles)


# ---------------------------------------------------------------- output by ranks


class Thrown(msgspec.Struct, frozen=True):
    """An exception that ended a cell on a rank, and the cell's line, if that is known."""

    type: str
    message: str
    traceback: str = ""
    line: int | None = None
    released: bool = False


class Record(msgspec.Struct, frozen=True):
    """Output, value and exception of a cell on one rank."""

    stdout: str = ""
    stderr: str = ""
    displays: tuple[str, ...] = ()
    value: str | None = None
    exception: Thrown | None = None


def _thrown(run: Run[Any]) -> dict[int, Thrown]:
    thrown = {}
    for rank, verb in sorted(run.outcomes().items()):
        if isinstance(verb, Failed):
            text = COLOUR.sub("", verb.whole_traceback or verb.traceback)
            line = verb.line or None
            thrown[rank] = Thrown(verb.type_name, verb.text, text, line, verb.released)
        elif isinstance(verb, Died):
            thrown[rank] = Thrown("RankDied", verb.reason, verb.last_output)
    return thrown


class Recorder:
    """A sink that keeps the output of a run by rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._of = dict.fromkeys(ranks, Record())
        self._notes: list[str] = []

    def show(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not isinstance(block.item, Live) or block.item.closed:
                for rank, item in block.by_rank():
                    self._of[rank] = _with(self._of[rank], item)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def status(self, text: str, final: bool) -> None: ...

    def data(self, thrown: Mapping[int, Thrown]) -> dict[str, Any]:
        """Return the output and exceptions of a cell, equal ones of several ranks once."""
        add = msgspec.structs.replace
        groups = group_ranks(
            {rank: add(record, exception=thrown.get(rank)) for rank, record in self._of.items()}
        )
        return {
            "groups": [{"ranks": r, **msgspec.structs.asdict(own)} for own, r in groups.items()],
            "released": [rank for rank, each in thrown.items() if each.released],
            "notes": self._notes,
        }


def _with(record: Record, item: Item) -> Record:
    """Return a rank's record with more output."""
    add = msgspec.structs.replace
    match item:
        case Line("stdout", text):
            return add(record, stdout=f"{record.stdout}{text}\n")
        case Line(_, text):
            return add(record, stderr=f"{record.stderr}{text}\n")
        case Gap(num_lines, _):
            note = f"... {num_lines:,} lines are left out, and in the rank's log\n"
            return add(record, stdout=record.stdout + note)
        case Rich("result" | "display" | "update" as kind, _):
            text = str(item.content()["data"].get("text/plain", ""))
            if kind == "result":
                return add(record, value=text)
            return add(record, displays=(*record.displays, text))
    return record
