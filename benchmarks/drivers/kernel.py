"""Times a cell magic inside a real kernel, where the user's cells would run."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any, Protocol

from jupyter_client.manager import start_new_kernel

from .protocol import Counts, Sample, summarize

_START_S = 60.0
_CELL_S = 180.0

_TIMING = """
import json
from benchmarks.drivers.protocol import Counts, time_calls
_shell = get_ipython()
_run = lambda: _shell.run_cell_magic({magic!r}, "", "pass")
_durations = json.dumps(time_calls(_run, {counts!r}))
"""


def time_cells(setup: str, magic: str, teardown: str, counts: Counts) -> Sample:
    """Run a cell that says `pass` again and again through its magic, in a kernel started for it.

    Args:
        setup: a cell that registers the magic and starts or finds the ranks.
        magic: its name, without the percent signs.
        teardown: a cell that ends what `setup` started.
        counts: how often.

    Raises:
        RuntimeError: a cell failed.
    """
    with open_kernel() as execute:
        execute(setup)
        durations = execute(_TIMING.format(magic=magic, counts=counts), "_durations")
        execute(teardown)
    return summarize("cell", json.loads(durations))


class Execute(Protocol):
    """Runs a cell, and returns the string that an expression has afterwards."""

    def __call__(self, source: str, name: str = "''") -> str: ...


@contextlib.contextmanager
def open_kernel() -> Iterator[Execute]:
    """A kernel of this environment, in the working directory.

    Raises:
        RuntimeError: from what it gives: a cell failed.
    """
    manager, client = start_new_kernel(startup_timeout=_START_S)
    try:
        yield functools.partial(_execute, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def _execute(client: Any, source: str, name: str = "''") -> str:
    content = client.execute(source, user_expressions={"value": name}, reply=True, timeout=_CELL_S)[
        "content"
    ]
    if content["status"] != "ok":
        raise RuntimeError("\n".join(content.get("traceback", [content["status"]])))
    return str(ast.literal_eval(content["user_expressions"]["value"]["data"]["text/plain"]))
