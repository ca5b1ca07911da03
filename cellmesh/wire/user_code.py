"""Messages by which ranks run a user's code: a cell, a call, the debugger."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from .verb import Pickled, WorkVerb


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
