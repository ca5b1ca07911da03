"""Exceptions of cellmesh; an exception's type shows its cause: the caller, the host, another
process of the mesh, or code on a rank.

::

    CellmeshError
    +-- MeshUsageError      the user's call: a bad option, no mesh, a name that is not there
    |   +-- NoMeshError         nothing to run on: start a mesh first
    |   |   +-- UnknownMeshError    this process has no living mesh of that name (a KeyError)
    |   +-- UnpicklableError    a value that cannot travel; names the part that cannot
    +-- RankFailure         the user's code on some ranks (an ExceptionGroup; rank -> exception)
    +-- RankDied            a rank's process ended: signal or exit code, last output
    +-- GroupDown           (a RuntimeError) a process group with a member missing: heal first
    +-- HostError           a host: directory, limits, process that will not start
    +-- ProtocolError       a peer that does not speak the protocol, or not our version of it

    RemoteError             stands in for a rank's exception that cannot be unpickled here
    RanksInterrupted        (a KeyboardInterrupt) the user stopped the cell
    Released                (a KeyboardInterrupt) raised on a rank whose peers will not take part

Every message names the problem, its place, and the next command or call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or "" if no known word is similar."""
    import difflib  # agents never need it

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class CellmeshError(Exception):
    """Base class of all errors that cellmesh raises itself."""

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: cellmesh's own frames do not help the user of a notebook.
        return [f"{type(self).__name__}: {self}"]


class MeshUsageError(CellmeshError, ValueError):
    """Raised if the arguments or the context of a call are invalid."""


class NoMeshError(MeshUsageError):
    """Raised if there is no running mesh to act on."""


class UnknownMeshError(NoMeshError, KeyError):
    """Raised if this process has no living mesh of a name."""

    def __str__(self) -> str:  # a KeyError's has quotes
        return str(self.args[0])


class UnpicklableError(MeshUsageError, TypeError):
    """Raised if a value cannot be pickled, so that it cannot travel between notebook and ranks."""


class GroupDown(CellmeshError, RuntimeError):
    """Raised by operations on a disconnected process group; the message names the missing ranks and
    the command that reconnects them.
    """


class HostError(CellmeshError):
    """Raised if a host lacks a resource of a mesh: a directory, descriptors, memory, processes."""


class ProtocolError(CellmeshError):
    """Raised if a peer sent a message that the wire protocol does not allow."""


class RankDied(CellmeshError):
    """Raised for a cell or call on a rank whose process ended.

    Args:
        rank: the rank that ended.
        reason: how it ended, in words (``killed by SIGKILL``, ``exited with code 3``).
        last_output: last lines that the process wrote.
    """

    def __init__(self, rank: int, reason: str, last_output: str = "") -> None:
        self.rank, self.reason, self.last_output = rank, reason, last_output
        text = f"rank {rank} {reason}"
        if last_output:
            text += "; its last lines:\n" + "\n".join(
                f"    {line}" for line in last_output.splitlines()
            )
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.reason, self.last_output)


class RemoteError(Exception):
    """Stands in for an exception that could not be pickled on its rank or unpickled here.

    Args:
        type_name: name of the original exception's type.
        text: ``str()`` of the original exception.
        why: why the original is not here.
    """

    def __init__(self, type_name: str, text: str, why: str = "") -> None:
        self.type_name, self.text, self.why = type_name, text, why
        super().__init__(f"{type_name}: {text}" + (f" ({why})" if why else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type_name, self.text, self.why)


class RankFailure(CellmeshError, ExceptionGroup[Exception]):
    """Raised in the notebook if some ranks did not finish a cell or a call.

    An ``ExceptionGroup``: ``except* ValueError`` finds the ranks' own exceptions. Exceptions that
    do not derive from ``Exception`` (``KeyboardInterrupt``, ``SystemExit``) are in the group as
    `RemoteError` and, unchanged, in `exceptions_by_rank`. Ranks that were only released are in the
    group if no rank raised another exception.

    Attributes:
        exceptions_by_rank: rank -> the original exception, for each rank that did not finish.
        tracebacks: rank -> its traceback as text (with ANSI colours), where there is one.
        profile: partial profile of a cell that ``mesh.profile`` ran; else None.
    """

    exceptions_by_rank: Mapping[int, BaseException]
    tracebacks: Mapping[int, str]
    profile: Any = None

    def __new__(
        cls,
        summary: str,
        exceptions_by_rank: Mapping[int, BaseException],
        tracebacks: Mapping[int, str] | None = None,
    ) -> RankFailure:
        # A released rank has not failed: ``except* ValueError`` is to handle the whole group if all
        # other ranks raised a ValueError.
        own = {
            rank: exc for rank, exc in exceptions_by_rank.items() if not isinstance(exc, Released)
        }
        members: list[Exception] = [
            exc if isinstance(exc, Exception) else RemoteError(type(exc).__name__, str(exc))
            for _, exc in sorted((own or exceptions_by_rank).items())
        ]
        self = super().__new__(cls, summary, members)
        self.exceptions_by_rank = dict(sorted(exceptions_by_rank.items()))
        self.tracebacks = dict(tracebacks or {})
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.message, self.exceptions)

    def derive(self, excs: Sequence[Exception]) -> ExceptionGroup[Exception]:  # type: ignore[override]
        """Return a plain group of some of the exceptions, as ``except*`` requires."""
        return ExceptionGroup(self.message, list(excs))

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.exceptions_by_rank, self.tracebacks)


class RanksInterrupted(KeyboardInterrupt):
    """Raised in the notebook if the user interrupted a cell; describes the state of each rank.

    Attributes:
        profile: partial profile of a cell that ``mesh.profile`` ran; else None.
    """

    profile: Any = None

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Released(KeyboardInterrupt):
    """Raised on a rank that waits for other ranks after these have failed, finished or died.

    A KeyboardInterrupt, so that ``except Exception`` in a training loop does not swallow it.
    """
