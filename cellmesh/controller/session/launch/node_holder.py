"""Holds the nodes that an engine gives until the mesh on them has started: by a process of its own,
which gives them back when the notebook's process ends before, however it ends.

`NodeHolder` is the notebook's side; functions below are for the holding process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import HostError, MeshUsageError
from ....wire.hosts import GO

# How long the notebook waits for nodes to be given back. The process goes on if it takes longer.
_END_S = 15.0


class NodeHolder:
    """The process that asks an engine for nodes, and holds them.

    It gives them back when its standard input ends before `keep`: at the end of this context, and
    at that of this process.
    """

    def __init__(self) -> None:
        self._stdin = -1
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> NodeHolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(b"", _END_S)

    def ask(
        self, command: Sequence[str], request: Mapping[str, Any], report: Callable[[str], None]
    ) -> dict[str, Any]:
        """Start the process, and wait until it has got nodes. Blocks while they are in use.

        Args:
            command: of the process, which gets the request as a further argument.
            request: what the engine is asked for.
            report: called with what is waited for.

        Returns:
            The message of the process with the key ``nodes``.

        Raises:
            HostError: there are no nodes.
            MeshUsageError: the engine does not have such nodes.
        """
        read_end, self._stdin = os.pipe()  # an interrupted start of the process closes it too
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(request)],
                stdin=read_end,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            os.close(read_end)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = _read(line)
            if "waiting" in said:
                report(said["waiting"])
            elif "nodes" in said:
                return said
            elif "usage" in said:
                raise MeshUsageError(said["usage"])
            elif "problem" in said:
                raise HostError(said["problem"])
        _, log = self._process.communicate()
        raise HostError(f"what asks for nodes has failed: {log.strip()[-2000:]}")

    def keep(self) -> None:
        """Have the process end and leave the nodes to the mesh, whose agents give them back."""
        self._end(GO, 0.0)

    def _end(self, last: bytes, timeout_s: float) -> None:
        stdin, self._stdin = self._stdin, -1
        if stdin < 0:
            return
        with contextlib.suppress(OSError), open(stdin, "wb", buffering=0) as file:
            file.write(last)
        if self._process is None:
            return
        for output in (self._process.stdout, self._process.stderr):
            if output is not None:
                output.close()
        reaper = threading.Thread(target=self._process.wait, name="cellmesh-reaper", daemon=True)
        reaper.start()
        reaper.join(timeout_s)


def _read(line: str) -> dict[str, Any]:
    """Read a message of the process; {} of what else is printed there."""
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        return said if isinstance(said, dict) else {}
    return {}


def say(message: Mapping[str, Any]) -> None:
    """Send the notebook a message of the process that holds nodes."""
    print(json.dumps(message), flush=True)


def hold() -> None:
    """Wait until the notebook says that the mesh has started.

    Raises:
        SystemExit: it has ended before, and the nodes are to be given back.
    """
    if os.read(0, len(GO)) != GO:
        raise SystemExit("the mesh has not started")
