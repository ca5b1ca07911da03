"""A notebook's process on one of the hosts: runs what it is sent, as a kernel would."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .netns import Host

ROOT = Path(__file__).parents[2]
_CLOSE_S = 20.0
_REPLY = "reply: "
_SERVER = f"""
import json, sys, traceback
import cellmesh as cm
names = {{"cm": cm, "it": None}}
print({_REPLY!r} + "[]", flush=True)
for line in sys.stdin:
    names["it"] = None
    try:
        exec(json.loads(line), names)
        reply = [names["it"], "", ""]
    except BaseException as error:
        reply = [None, type(error).__name__, str(error)]
    print({_REPLY!r} + json.dumps(reply), flush=True)
"""


class NotebookError(Exception):
    """What was raised in a notebook: the type's name and the text."""


class Notebook:
    """A Python process on a host, by ssh.

    Args:
        host: where it runs.

    Attributes:
        text: all that it has printed.
    """

    def __init__(self, host: Host) -> None:
        path = Path(shutil.which("ssh") or "").parent  # which knows the hosts
        python = f"{sys.executable} -u -c {shlex.quote(_SERVER)}"
        command = f"export PATH={path}:$PATH; cd {ROOT} && exec {python}"
        self._process = subprocess.Popen(
            ["ssh", host.name, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.text = ""
        self._hear()

    def run(self, source: str) -> Any:
        """Run lines of Python; return what they leave in ``it``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()
        reply = self._hear()
        if reply[1]:
            raise NotebookError(f"{reply[1]}: {reply[2]}")
        return reply[0]

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text, mark, reply = line.partition(_REPLY)
            self.text += text
            if mark:  # what ranks print may stand before it and behind it
                value, end = json.JSONDecoder().raw_decode(reply)
                self.text += reply[end:]
                return value
        raise NotebookError(f"the process has ended: {self.text}")

    def close(self) -> None:
        """End the process as a kernel ends that is shut down."""
        try:
            self._process.communicate(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def notebook_on(host: Host) -> Iterator[Notebook]:
    """A notebook on a host, closed afterwards."""
    notebook = Notebook(host)
    try:
        yield notebook
    finally:
        notebook.close()


def on_host(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the ``cellmesh`` command on a host."""
    command = f"cd {ROOT} && exec {sys.executable} -m cellmesh {' '.join(arguments)}"
    return subprocess.run(["ssh", host.name, command], capture_output=True, text=True)


def here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the ``cellmesh`` command on the host of this process."""
    command = [sys.executable, "-m", "cellmesh", *arguments]
    return subprocess.run(command, capture_output=True, text=True)
