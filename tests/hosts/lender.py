"""Has the agents of hosts forked from one process that has imported torch: for each start, each
host would import it, which takes three seconds of a core.

On a host, Python runs `site/sitecustomize.py` first, which has ``cellmesh agent`` ask the host's
lender. Without a lender the agent starts as on any host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from cellmesh.wire.marks import NUM_DESCRIPTORS, read_order
from cellmesh.wire.waiting import READY
from tests.support.kernel_prestart import LentPrestart

SITE = Path(__file__).with_name("site")
SOCKET = "lender.sock"  # in a host's directory, beside its runtime directory
NAME = "lender"


class HostsLender(LentPrestart):
    """The lender of this host, for one agent."""

    def __init__(self) -> None:
        super().__init__(Path(os.environ["JUPYTER_RUNTIME_DIR"]).parent)

    def prepare(self, timeout_s: float, *_: object) -> bool:
        """Connect to it, if there is one."""
        self.connection.settimeout(timeout_s)
        try:
            self.connection.connect(str(self._directory / SOCKET))
            return self.connection.recv(len(READY)) == READY
        except OSError:
            return False


@contextlib.contextmanager
def lending(hosts: Sequence[tuple[Path, int]]) -> Iterator[None]:
    """Lend to hosts: their directories, and a process of each."""
    with contextlib.ExitStack() as stack:
        words, numbers = list[str](), list[int]()
        for directory, pid in hosts:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(str(directory / SOCKET))
            stack.callback(os.unlink, directory / SOCKET)
            listener.listen(100)
            words.append(f"{pid}:{listener.fileno()}")
            numbers.append(listener.fileno())
        lender = subprocess.Popen([sys.executable, "-m", __name__, *words], pass_fds=numbers)
        try:
            yield
        finally:
            lender.kill()
            lender.wait()


def main(hosts: Sequence[str]) -> None:
    """Import torch, and lend on each host until the process ends that has started this one."""
    from cellmesh.workers.linux_process import die_with, name_process
    from cellmesh.workers.preload import list_stages
    from cellmesh.workers.zygote import ONE_THREAD, import_all

    die_with(os.getppid(), 0)
    os.environ.update(ONE_THREAD)
    shell = import_all()
    for module in list_stages(())[0]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    name_process(NAME)
    own = os.getpid()
    for host in hosts:
        if os.fork() == 0:
            die_with(own, 0)
            _lend(*map(int, host.split(":")), shell)
    signal.pause()


def _lend(pid: int, number: int, shell: object) -> NoReturn:
    from cellmesh.workers.linux_process import receive_descriptors, run_and_exit
    from cellmesh.workers.prestart import become_guardian
    from cellmesh.workers.zygote import Imported, Preloaded

    enter(pid)
    listener = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    imported = Imported(shell, Preloaded())

    def begin(descriptors: Sequence[int], own: Sequence[int]) -> int:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return become_guardian(read_order(descriptors), descriptors, own, imported)

    while True:
        connection, _ = listener.accept()
        with connection:
            connection.send(READY)
            connection.recv(1 << 16)  # the mesh's name
            data, descriptors = receive_descriptors(connection, 1, NUM_DESCRIPTORS)
            if data and os.fork() == 0:
                run_and_exit(functools.partial(begin, descriptors, (number, connection.fileno())))
            for descriptor in descriptors:
                os.close(descriptor)


def enter(pid: int) -> None:
    """Enter the network, host name and file tree of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "mnt")]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"the namespaces of process {pid} cannot be entered")
        os.close(space)
    os.chdir("/")


if __name__ == "__main__":
    main(sys.argv[1:])
