"""Ends a process that user code has forked from a rank when its code returns into the rank's
loop.

It would be a second rank otherwise, and read from the work socket what the agent sends to the
first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

from ...stdlib import os, threading
from ..exceptions import args_of

End = Callable[[BaseException | None], NoReturn]


class _Closable(Protocol):
    def close(self) -> None: ...


def guard_forks(
    rank: int,
    connections: Iterable[_Closable],
    in_child: Callable[[End], None],
    render: Callable[[BaseException], str],
) -> None:
    """From now on, make each forked child close the rank's connections, and end when its code
    returns.

    Args:
        rank: the rank that this process is.
        connections: its sockets to the agent.
        in_child: called in each child with the function that ends it, given what its code has
            raised.
        render: gives an exception's traceback.
    """
    pid_of_rank, main = os.getpid(), threading.get_ident()

    def end(error: BaseException | None) -> NoReturn:
        status = 1
        try:
            if error is None:
                status = 0
            elif issubclass(type(error), SystemExit):
                status = _status_of(error)
            else:
                child = (
                    f"process {os.getpid()}, forked from rank {rank} "
                    f"(process {pid_of_rank}), raised:"
                )
                _write(f"{child}\n{render(error)}\n")
        finally:
            os._exit(status)  # without exit handlers: they are the rank's

    def guard() -> None:
        for connection in connections:
            connection.close()
        in_child(end)
        if threading.get_ident() != main:  # the rank's loop is not below it: its own function ends
            thread: Any = threading.current_thread()
            thread._invoke_excepthook = lambda _: end(sys.exc_info()[1])
            thread._delete = lambda: end(None)

    os.register_at_fork(after_in_child=guard)


def _status_of(error: BaseException) -> int:
    """The exit code that Python derives from a SystemExit."""
    args = args_of(error)
    if not args or args[0] is None:
        return 0
    if type(args[0]) is int:
        return args[0] & 0xFF
    _write(f"{args[0]}\n")
    return 1


def _write(text: str) -> None:
    """Write to descriptor 2, which the agent reads."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]
