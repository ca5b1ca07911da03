"""Times a cell magic inside a real kernel, where the user's cells would run."""

from __future__ import annotations

import ast
import json
from typing import Any

from jupyter_client.manager import start_new_kernel

from .protocol import Counts, Sample, summarize

_START_S = 60.0
_CELL_S = 180.0

_TIMING = """
import json
from benchmarks.drivers.protocol import Counts, time_calls
_shell = get_ipython()
_durations = json.dumps(time_calls(lambda: _shell.run_cell_magic({magic!r}, "", "pass"), {counts!r}))
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
    manager, client = start_new_kernel(startup_timeout=_START_S)
    try:
        _execute(client, setup)
        durations = _execute(client, _TIMING.format(magic=magic, counts=counts), "_durations")
        _execute(client, teardown)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    return summarize("cell", json.loads(durations))


def _execute(client: Any, source: str, name: str = "''") -> str:
    """Run a cell; returns the string that an expression has afterwards."""
    content = client.execute(source, user_expressions={"value": name}, reply=True, timeout=_CELL_S)["content"]
    if content["status"] != "ok":
        raise RuntimeError("\n".join(content.get("traceback", [content["status"]])))
    return str(ast.literal_eval(content["user_expressions"]["value"]["data"]["text/plain"]))
