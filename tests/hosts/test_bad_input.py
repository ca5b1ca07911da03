"""Hosts that cannot run their part of a mesh: each error names the host, the problem and the next
step, and nothing is left anywhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError, HostError, MeshUsageError
from tests.conftest import check_nothing_left

from .netns import Host, run

BARE_PYTHON = os.path.realpath(sys.executable)  # of which the tests' environment was made


@pytest.fixture(autouse=True)
def _nothing_is_left_here(runtime_dir: Path) -> Iterator[None]:
    yield
    check_nothing_left(runtime_dir)


def on_cm2(command: str) -> dict[str, Any]:
    """Return options by which cm2 runs another command than the one that it is asked to, which is
    ``"$@"`` there.
    """
    script = f'set -- {{command}}; if [ $(hostname) = cm2 ]; then {command}; else exec "$@"; fi'
    return {"launch": f"ssh -o BatchMode=yes {{host}} '{script}'"}


def without_torch(directory: Path) -> str:
    """Make a directory with the environment's packages but for torch."""
    packages = Path(run(sys.executable, "-c", "import msgspec; print(msgspec.__file__)")).parents[1]
    for path in packages.iterdir():
        if not path.name.startswith("torch"):
            (directory / path.name).symlink_to(path)
    (directory / "cellmesh").symlink_to(Path(cm.__file__).parent)
    return f"PYTHONPATH={directory}"


def another_python(directory: Path) -> str:
    """Make an interpreter say that it is an older one."""
    path = directory / "sitecustomize.py"
    path.write_text("import platform\nplatform.python_version = lambda: '3.9.18'\n")
    return f"PYTHONPATH={directory}"


BAD_HOSTS: dict[str, tuple[Callable[[Path], str], str]] = {
    "no such Python": (
        lambda path: f'shift; exec {path}/bin/python "$@"',
        r"cm2: the notebook's Python is not there .*Next: is cellmesh installed on cm2",
    ),
    "no cellmesh": (
        lambda path: f'shift; cd /; exec {BARE_PYTHON} "$@"',
        r"cm2: its Python has no cellmesh .*No module named cellmesh.*pip install cellmesh",
    ),
    "no torch": (
        lambda path: f'shift; exec env {without_torch(path)} {BARE_PYTHON} "$@"',
        r"cm2: hosts differ in their torch: the notebook has .*, cm2 has none; install the same",
    ),
    "another Python": (
        lambda path: f'exec env {another_python(path)} "$@"',
        r"cm2: hosts differ in their Python: .*, cm2 has 3\.9\.18; install the same version",
    ),
    "a full disk": (
        lambda path: (
            f"mount -t tmpfs -o size=4k,mode=700 tmpfs {path}; "
            f"dd if=/dev/zero of={path}/full bs=4k count=1 2>/dev/null; "
            f'exec env JUPYTER_RUNTIME_DIR={path} TMPDIR={path} "$@"'
        ),
        r"cm2: cannot write .*No space left on device.*Free some space",
    ),
}


@pytest.mark.parametrize("what", BAD_HOSTS)
def test_host_that_lacks_something_is_named(
    what: str, machines: list[Host], tmp_path: Path
) -> None:
    command, message = BAD_HOSTS[what]
    try:
        with pytest.raises(HostError, match=f"(?s){message}"):
            cm.start(hosts="cm1:1,cm2:1", **on_cm2(command(tmp_path)))
        assert not machines[1].meshes()
    finally:
        if what == "a full disk":
            inside = ("nsenter", "-m", "-t", str(machines[1].processes()[0].pid))
            left = run(*inside, "ls", f"{tmp_path}/cellmesh")
            run(*inside, "umount", str(tmp_path))
            assert not left


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hosts": "cm1:1,nosuch.invalid:1"}, HostError, "nosuch.invalid: the name does not res"),
        ({"hosts": "cm1:1,10.77.3.254:1"}, HostError, "10.77.3.254: nothing listens .*start sshd"),
        ({"hosts": "cm1:1,cm1:1"}, MeshUsageError, "names 'cm1' twice"),
        ({"hosts": "cm1:1,10.77.3.1:1"}, MeshUsageError, "cm1 and 10.77.3.1 are one host"),
        ({"hosts": "cm1:0"}, MeshUsageError, "'cm1:0' is no host with a number of ranks"),
        ({"backend": "nccl"}, CellmeshError, "on cm[12]: --backend nccl needs a GPU"),
        ({"interface": "eth9"}, HostError, "cm[12]: cm[12] has no interface eth9.*eth0"),
    ],
)
def test_bad_option_is_named(
    options: dict[str, Any], error: type[Exception], message: str, machines: list[Host]
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        cm.start(**{"hosts": "cm1:1,cm2:1", **options})


def test_interface_that_is_down_is_named(machines: list[Host]) -> None:
    for host in machines[:2]:
        host.inside("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
        host.inside("ip", "addr", "add", f"10.78.0.{host.name[-1]}/24", "dev", "eth1")
    try:
        with pytest.raises(HostError, match=r"cm[12]: interface eth1 of cm[12] is down"):
            cm.start(hosts="cm1:1,cm2:1", interface="eth1")
    finally:
        for host in machines[:2]:
            host.inside("ip", "link", "del", "eth1")


def test_host_that_refuses_the_key_is_named(machines: list[Host], tmp_path: Path) -> None:
    """For cm2, the client has a key that no host knows."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{tmp_path}/key")
    name, known_hosts = machines[1].address, machines[1].directory.parent / "known_hosts"
    options = f"-F /dev/null -i {tmp_path}/key -o UserKnownHostsFile={known_hosts}"
    script = (
        f'if [ "$0" = {name} ]; then exec ssh {options} -o BatchMode=yes "$0" "$@"; '
        'else exec ssh "$0" "$@"; fi'
    )
    launch = f"sh -c '{script}' {{host}} {{command}}"
    message = rf"(?s){name}: the host refuses your key .*ssh-copy-id {name}"
    with pytest.raises(HostError, match=message):
        cm.start(hosts=f"cm1:1,{name}:1", launch=launch)


def test_localhost_is_no_host_beside_others(
    machines: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is the loopback's, which the other host cannot reach."""
    ssh = tmp_path / "ssh"  # of which sshd of this machine has a connection by the loopback
    ssh.write_text(
        f"""#!/bin/sh
        if [ "$5" != localhost ]; then exec {shutil.which("ssh")} "$@"; fi
        SSH_CONNECTION="127.0.0.1 1 127.0.0.1 2" exec sh -c "$6"
        """
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MeshUsageError, match="localhost is reached by the loopback"):
        cm.start(hosts="localhost:1,cm1:1")
