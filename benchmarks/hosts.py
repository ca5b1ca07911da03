"""Measures a mesh on two hosts beside the same on one: start, calls, values, lost hosts.

``python -m benchmarks.hosts``, as root: the hosts are network namespaces of this machine with an
sshd each, in a network of this process's own. So two hosts share the cores that two real hosts
would have twice: what takes CPU time on both at once looks dearer than it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import zmq

import cellmesh
from tests.conftest import own_runtime_dir
from tests.hosts.netns import Host, hosts

from .drivers import torch_import
from .drivers.protocol import QUICK, Sample, elapsed_s
from .figures import Figures
from .machine import describe_machine
from .report import table, targets_table
from .targets import HOSTS_TARGETS
from .units import MILLISECONDS, SECONDS, Unit

HOSTS, OTHER_HOST = "cm1:4,cm2:4", "cm3:4"
NUM_RANKS = 8
NUM_CALLS, NUM_BATCHES, NUM_PUSHES = 100, 10, 4
VALUE_BYTES = 128 << 20
_PIECE_BYTES = 1 << 20
_MINE = "CELLMESH_BENCHMARK_NETWORK"
_WAIT_S = 60.0
# measure -> title, unit, and the measure beside it.
_ROWS: dict[str, tuple[str, Unit, str]] = {
    "start_s": ("start of 2 x 4 ranks by ssh; one `import torch`", SECONDS, "import_s"),
    "call_s": ("no-op call on 2 x 4 over TCP; on 8 over ipc", MILLISECONDS, "local_call_s"),
    "one_call_s": ("no-op call on 1 x 8 over TCP; on 8 over ipc", MILLISECONDS, "local_call_s"),
    "push_first_s": ("128 MB to 2 x 4, first; to 8", MILLISECONDS, "local_push_first_s"),
    "push_s": ("128 MB to 2 x 4, again; to 8", MILLISECONDS, "local_push_s"),
    "again_s": ("the same; 2 x 128 MB through bare CURVE", MILLISECONDS, "curve_s"),
    "silent_s": ("cut host reported; no floor", SECONDS, ""),
    "heal_s": ("heal with a new host; start of 2 x 4", SECONDS, "start_s"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the tables here as well, as Markdown")
    arguments = parser.parse_args(argv)
    if not os.environ.get(_MINE):
        _enter_own_network()
    machine = describe_machine()
    samples = []
    with hosts(3) as (machines, path), own_runtime_dir():
        os.environ["PATH"] = f"{path}:{os.environ['PATH']}"
        for number in range(arguments.rounds):
            samples.append(_measure(machines))
            shown = ", ".join(f"{name} {value:.4g}" for name, value in samples[-1].items())
            print(f"round {number + 1}: {shown}", flush=True)
            for host in machines:
                host.mend()
                host.kill()
    figures = Figures({"hosts": samples})
    facts = "\n".join(f"- {name}: {fact}" for name, fact in machine.items())
    tables = [_table(figures), targets_table(figures, HOSTS_TARGETS), _rounds_table(figures)]
    text = "\n\n".join([facts, *tables]) + "\n"
    print("\n" + text)
    if arguments.out is not None:
        arguments.out.write_text(f"# Hosts\n\nWritten by `python -m benchmarks.hosts`.\n\n{text}")


def _enter_own_network() -> None:
    """Run this program again in a network of its own, whose names meet no others."""
    if os.getuid():
        sys.exit("hosts in network namespaces need root: sudo python -m benchmarks.hosts")
    script = (
        'mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip link set lo up && exec "$@"'
    )
    own = ("unshare", "--net", "--mount", "--uts", "--propagation", "private")
    again = (sys.executable, "-m", "benchmarks.hosts", *sys.argv[1:])
    os.execvpe("unshare", [*own, "sh", "-c", script, "sh", *again], {**os.environ, _MINE: "1"})


def _measure(machines: Sequence[Host]) -> Sample:
    import_s = torch_import.measure(1, QUICK)["start_s"]
    began = time.perf_counter()
    with cellmesh.start(hosts=HOSTS, lease_s=60) as mesh:
        sample = {"import_s": import_s, "start_s": time.perf_counter() - began}
        with cellmesh.start(NUM_RANKS) as local:
            sample |= _calls(mesh, local) | _pushes(mesh, local)
        sample["silent_s"] = _silent_s(machines[1])
        machines[1].mend()
        machines[1].kill()
        _await(lambda: len(mesh.rank_set.session.dead_ranks) == NUM_RANKS // 2)
        sample["heal_s"] = elapsed_s(lambda: mesh.heal(hosts=OTHER_HOST))
        assert mesh.run(abs, -1).list == [1] * NUM_RANKS
    return sample


def _calls(mesh: cellmesh.Mesh, local: cellmesh.Mesh) -> Sample:
    """The median call of each, a batch of either in turn."""
    with cellmesh.start(hosts=f"cm1:{NUM_RANKS}") as one:
        meshes = {"call_s": mesh, "one_call_s": one, "local_call_s": local}
        taken: dict[str, list[float]] = {name: [] for name in meshes}
        for _ in range(NUM_BATCHES):
            for name, each in meshes.items():
                run = each.run
                taken[name] += [elapsed_s(lambda: run(_noop)) for _ in range(NUM_CALLS)]  # noqa: B023
    return {name: statistics.median(values) for name, values in taken.items()}


def _noop() -> None:
    """What every rank is asked to do; it travels by value, as what is typed into a notebook."""


_noop.__module__ = "__main__"


def _pushes(mesh: cellmesh.Mesh, local: cellmesh.Mesh) -> Sample:
    """A value to each in turn, until every rank has read its last element."""
    value = np.zeros(VALUE_BYTES // 8)
    taken: dict[str, list[float]] = {"push_s": [], "local_push_s": []}
    for number in range(NUM_PUSHES):
        for name, each in (("push_s", mesh), ("local_push_s", local)):
            value[-1] = number
            began = time.perf_counter()
            each.push(x=value)
            seen = each.pull("float(x[-1])").list
            taken[name].append(time.perf_counter() - began)
            assert seen == [float(number)] * NUM_RANKS
    first = {name.replace("push", "push_first"): values[0] for name, values in taken.items()}
    again = {name: statistics.median(values[1:]) for name, values in taken.items()}
    curve_s = statistics.median(_curve_s() for _ in range(NUM_PUSHES))
    return first | again | {"again_s": again["push_s"], "curve_s": curve_s}


def _curve_s() -> float:
    """The floor of a push to two hosts: as many bytes from one thread to two over CURVE."""
    ways = []
    for _ in range(2):
        there, here = zmq.Context(), zmq.Context()
        receiver, sender = there.socket(zmq.DEALER), here.socket(zmq.DEALER)
        (public, receiver.curve_secretkey), receiver.curve_server = zmq.curve_keypair(), True
        sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
        sender.curve_serverkey = public
        for socket in (receiver, sender):
            socket.set_hwm(0)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(b"")
        receiver.recv()
        ways.append((sender, receiver))
    piece, count = bytes(_PIECE_BYTES), VALUE_BYTES // _PIECE_BYTES
    threads = [
        threading.Thread(target=lambda to=to: [to.recv(copy=False) for _ in range(count)])  # type: ignore[misc]
        for _, to in ways
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for _ in range(count):
        for sender, _ in ways:
            sender.send(piece, copy=False)
    for thread in threads:
        thread.join()
    taken_s = time.perf_counter() - began
    for way in ways:
        for socket in way:
            socket.context.destroy(linger=0)
    return taken_s


def _silent_s(host: Host) -> float:
    """From the cut of a host's cable until the notebook says that it is not heard."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        host.cut()
        began = time.perf_counter()
        _await(lambda: "not heard" in said.getvalue())
        return time.perf_counter() - began


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("what was waited for has not come")
        time.sleep(0.01)


def _rows(figures: Figures) -> Iterator[tuple[str, Unit, float, float | None]]:
    for measure, (title, unit, beside) in _ROWS.items():
        value = figures.get("hosts", measure)
        if value is not None:
            yield title, unit, value, figures.get("hosts", beside) if beside else None


def _table(figures: Figures) -> str:
    lines = [["", "two hosts", "beside it", "ratio"]]
    for title, unit, value, other in _rows(figures):
        ratio = "-" if other is None else f"{value / other:.2f} x"
        lines.append([title, unit.show(value), unit.show(other), ratio])
    return table(lines)


def _rounds_table(figures: Figures) -> str:
    units = {name: unit for name, (_, unit, _) in _ROWS.items()}
    units |= {beside: unit for _, unit, beside in _ROWS.values() if beside}
    lines = [["measure", "rounds"]]
    for measure, unit in units.items():
        lines.append([measure, ", ".join(map(unit.show, figures.rounds("hosts", measure)))])
    return table(lines)


if __name__ == "__main__":
    main()
