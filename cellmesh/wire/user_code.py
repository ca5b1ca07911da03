"""Messages by which ranks run a user's code (a cell, a call, the debugger), and those of that code:
text, displays, progress bars, logged numbers, and questions to the user.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from .verb import Pickled, Verb, WorkVerb


class RunCell(WorkVerb, frozen=True):
    """Ask ranks to run a cell in their namespaces.

    `transformed` is the source with IPython's magics turned into calls ("": the rank is to do
    that); `execution_count` is the notebook's ``In[n]``; `quiet` drops the value of a last
    expression; `is_timed`: the answer is to say how long it took. `xmode`: as of `RunCall`. `argv`:
    what `sys.argv` has behind the program's name while the cell runs; None leaves it alone.
    """

    is_cell: ClassVar[bool] = True
    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    run: int
    source: str
    transformed: str
    is_async: bool
    execution_count: int
    quiet: bool = False
    is_timed: bool = False
    xmode: str = ""
    argv: tuple[str, ...] | None = None


class RunCall(WorkVerb, frozen=True):
    """Ask ranks to call a pickled ``(function, args, kwargs)`` and to answer with its value.

    `xmode`: how tracebacks are shown in the notebook (``%xmode``); "" as by default.
    """

    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    run: int
    payload: Pickled
    xmode: str = ""


class PostMortem(WorkVerb, frozen=True):
    """Ask a rank to open the debugger at the frame where its last exception was raised."""

    run: int


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """How long a cell took on a rank, and how much of that it was in collectives or messages, in
    seconds.
    """

    elapsed_s: float
    in_collectives_s: float


class Logged(Verb, frozen=True):
    """Numbers that user code of a rank gave to `cellmesh.log`, in the order of their steps.

    Each row of `values` belongs to one name of `names`; its columns to `steps`.
    """

    run: int
    names: tuple[str, ...]
    steps: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


class InputRequest(Verb, frozen=True):
    """A rank asks the user for a line of input (``input()``, ``getpass()``, the debugger)."""

    run: int
    request: int
    prompt: str
    is_password: bool = False


class InputCancelled(Verb, frozen=True):
    """A rank no longer waits for the answer to its `InputRequest`: it was interrupted."""

    run: int
    request: int


class InputReply(Verb, frozen=True):
    """The user's answer to an `InputRequest`; `is_end` is end of file (Ctrl-D)."""

    request: int
    text: str
    is_end: bool = False


StreamName = Literal["stdout", "stderr"]
DisplayKind = Literal["display", "update", "result", "clear"]
BarState = Literal["open", "done", "failed", "stopped", "removed"]


class Output(Verb, frozen=True):
    """Text that a run printed since the last such message; `run` is -1 if it belongs to none."""

    run: int
    stream: StreamName
    text: str


class Skipped(Verb, frozen=True):
    """Number of lines and bytes of a rank's output that exceeded the bound and were not sent; the
    rank's log has them.
    """

    run: int
    num_lines: int
    num_bytes: int


class Display(Verb, frozen=True):
    """A rich display of a rank: `bundle` is JSON ``{"data", "metadata"}``; `display_id` is "" where
    it has none.
    """

    run: int
    kind: DisplayKind
    bundle: bytes
    display_id: str = ""


class Bar(Verb, frozen=True):
    """The state of a progress bar of user code.

    Attributes:
        run: the run that it was made in.
        bar: its number on the rank; what says that it is open no more is the last of that number.
        title: what stands before it.
        done, total: in `unit`; a total of 0 is not known.
        elapsed_s: since it began.
        unit: of what is counted.
        divisor: numbers are shown with k, M, G of this base (1000 or 1024); 0 for plain ones.
        rate: units a second, lately; 0 is not known.
        note: what stands behind it (tqdm's postfix).
        state: whether it goes on. `stopped`: it was interrupted or released.
        num_outer: how many bars were open round it.
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
