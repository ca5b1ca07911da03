"""Base classes of all messages; messages by which ranks run user code (a cell, a call, the
debugger); and messages of that code: text, displays, progress bars, numbers, requests for input.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec


class Verb(msgspec.Struct, frozen=True, array_like=True, tag_field="type", tag=True):
    """Base class of all messages between controller, agents and ranks."""


class Pickled(msgspec.Struct, frozen=True, array_like=True):
    """A pickle (protocol 5), whose large buffers follow the header as separate frames.

    `is_mapped`: the buffers are in a segment, which the only frame names (`wire/segments.py`); if
    `stream` is empty, the last buffer is the stream.
    """

    stream: bytes
    num_buffers: int = 0
    is_mapped: bool = False


class WorkVerb(Verb, frozen=True):
    """Base class of messages that give ranks work in a run; class variables describe the kind of
    work.

    Class attributes:
        is_cell: whether it is a notebook's cell.
        is_user_code: whether it runs user code, whose tracebacks are shown as ranks raise.
        is_query: whether it is short, does not make a rank busy, and answers a failure by its
            value.
        fills: whether it may bind names in a rank's namespace (`Relay`).
        needs_room: whether it waits while too many runs or bytes are in flight.
        is_whole: whether all of its output is sent, without a limit.
        interleaves: whether it may wait beside other work (`workers.rank.tasks`); a field of cells
            and calls.
    """

    is_cell: ClassVar[bool] = False
    is_user_code: ClassVar[bool] = False
    is_query: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    needs_room: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False
    interleaves: ClassVar[bool] = False


class FeatureRequest(WorkVerb, frozen=True):
    """Base class of the requests that a feature of the controller sends to its handler on a rank
    (see `Request`).

    Class attributes:
        handler: module of the feature's handler, in `cellmesh.workers`.
    """

    handler: ClassVar[str]


class RunCell(WorkVerb, frozen=True):
    """Ask ranks to run a cell in their namespaces.

    `transformed` is the source with IPython's magics turned into calls ("": the rank transforms
    it), `code` its compiled parts, in order, as a list for `marshal` (b"": the rank compiles it);
    `execution_count` is n of the notebook's ``In[n]``; `quiet` drops the value of a last
    expression; `is_timed`: the answer contains the duration. `argv`: the arguments in `sys.argv`,
    after the program's name, while the cell runs; None for no change. `interleaves`: the cell
    awaits, and what comes after does not wait for its end.
    """

    is_cell: ClassVar[bool] = True
    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    run: int
    source: str
    transformed: str
    code: bytes
    execution_count: int
    quiet: bool = False
    is_timed: bool = False
    argv: tuple[str, ...] | None = None
    interleaves: bool = False  # type: ignore[misc]


class RunCall(WorkVerb, frozen=True):
    """Ask ranks to call a pickled ``(function, args, kwargs)`` and to answer with its value.

    `function`: packed function (`plain_functions.pack`); the payload is then ``(args, kwargs)``.
    `interleaves`: the function is asynchronous, and what comes after does not wait for its end.
    `of_actor`: an operation on an actor (a method of `workers.rank.actors.Actors`); the payload has
    its target in place of a function: names of the actor and the method, and further arguments.
    """

    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    run: int
    payload: Pickled
    function: bytes = b""
    interleaves: bool = False  # type: ignore[misc]
    of_actor: str = ""


class RunScript(WorkVerb, frozen=True):
    """Ask ranks to run a Python file or module as their ``__main__``, as torchrun does.

    Attributes:
        run: the run.
        path: path of the file, as typed, or name of the module.
        argv: arguments after the program's name in ``sys.argv``.
        is_module: whether `path` names a module (``-m``).
        is_shared: whether the script uses the ranks' namespace (``%run -i``), rather than that of
            a new process.
        keeps: whether the ranks are used afterwards, with the script's names in their namespace.
        is_terminal: whether a terminal shows the output: ``sys.stdout.isatty()``, and progress
            bars are sent as `Bar`, not as text.
        is_joined: whether standard error is standard output (``2>&1``), so that their order stays.
        copied: path of its copy on other hosts, as in `CodeFile`; of a module, that of the working
            directory; "" if it is not below a directory that is copied.
    """

    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True
    is_whole: ClassVar[bool] = True

    run: int
    path: str
    argv: tuple[str, ...] = ()
    is_module: bool = False
    is_shared: bool = False
    keeps: bool = False
    is_terminal: bool = False
    is_joined: bool = False
    copied: str = ""


class PostMortem(WorkVerb, frozen=True):
    """Ask a rank to open the debugger at the frame where its last exception was raised."""

    run: int


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Duration of a cell on a rank, and the parts of it in collectives or messages, and in imports
    of modules, in seconds.
    """

    elapsed_s: float
    in_collectives_s: float
    in_imports_s: float = 0.0


class Imports(Verb, frozen=True):
    """The installed modules that a rank has imported in a run.

    Attributes:
        run: the run.
        names: names of the modules, in the order in which their imports ended.
        took_s: duration of each module's import with all that it imports, in seconds.
        asked: those that user code has imported; the others were imported by them.
    """

    run: int
    names: tuple[str, ...]
    took_s: tuple[float, ...]
    asked: tuple[str, ...]


class Logged(Verb, frozen=True):
    """Numbers that user code of a rank passed to `cellmesh.log`, in the order of their steps.

    `values` has a row for each of `names` and a column for each of `steps`.
    """

    run: int
    names: tuple[str, ...]
    steps: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


class InputRequest(Verb, frozen=True):
    """A rank's request for a line of input from the user (``input()``, ``getpass()``, debugger);
    `is_raw`: for the next bytes of standard input, which a script reads, as Latin-1.
    """

    run: int
    request: int
    prompt: str
    is_password: bool = False
    is_raw: bool = False


class InputCancelled(Verb, frozen=True):
    """Report that an interrupted rank no longer waits for the answer to its `InputRequest`."""

    run: int
    request: int


class InputReply(Verb, frozen=True):
    """The user's answer to an `InputRequest`; `is_end` is end of file (Ctrl-D)."""

    request: int
    text: str
    is_end: bool = False


StreamName = Literal["stdout", "stderr"]
DisplayKind = Literal["display", "update", "result", "clear"]
BarState = Literal["open", "done", "removed"]


class Output(Verb, frozen=True):
    """Text that a rank has printed since its last such message; `run` is -1 if the text belongs to
    no run. `data` has the bytes of a script that are not those of the text, as they are not UTF-8
    or end within a character.
    """

    run: int
    stream: StreamName
    text: str
    data: bytes = b""


class Skipped(Verb, frozen=True):
    """Number of lines and bytes of a rank's output that exceeded the bound and were not sent; the
    rank's log has them.
    """

    run: int
    num_lines: int
    num_bytes: int


class Display(Verb, frozen=True):
    """A rich display of a rank; `bundle` is JSON ``{"data", "metadata"}``, and `display_id` is ""
    if it has none.
    """

    run: int
    kind: DisplayKind
    bundle: bytes
    display_id: str = ""


class Bar(Verb, frozen=True):
    """The state of a progress bar of user code.

    Attributes:
        run: run in which the bar was made.
        bar: number of the bar on the rank; no message follows one that reports the bar closed.
        title: text before the bar.
        done, total: progress and total, in `unit`; a total of 0 is unknown.
        elapsed_s: time since the bar was made, in seconds.
        unit: unit of the counted items.
        divisor: base of the prefixes k, M, G for numbers (1000 or 1024); 0 for plain numbers.
        rate: recent rate, in units per second; 0 if unknown.
        note: text after the bar (tqdm's postfix).
        state: whether the bar is open, has ended, or was removed as it ended (tqdm's `leave`).
        num_outer: number of bars that were open around it.
    """

    run: int
    bar: int
    title: str
    done: float
    total: float
    elapsed_s: float
    unit: str = "it"
    divisor: int = 0
    rate: float = 0.0
    note: str = ""
    state: BarState = "open"
    num_outer: int = 0
