"""What a failed command means and what to type next, from what ssh, engines and Python print."""

from __future__ import annotations

import pytest

from cellmesh.controller.session.launch.commands import command_to_try, explain

PYTHON = "/opt/env/bin/python"


SSH, NEXT = "ssh: connect to host b port 22: Connection", "Python is not there"


@pytest.mark.parametrize(
    ("status", "said", "text", "remedy"),
    [
        (255, "ssh: Could not resolve hostname b: Name or", "does not resolve", "`ssh b true`"),
        (255, "Host key verification failed.", "key is not known", "`ssh b`"),
        (255, "root@b: Permission denied (publickey).", "refuses your key", "ssh-copy-id b"),
        (255, f"{SSH} refused", "nothing listens", "sshd"),
        (255, f"{SSH} timed out", "not reached", "firewall"),
        (1, f"{PYTHON}: No module named cellmesh", "no cellmesh", f"`{PYTHON} -m pip install cell"),
        (1, "ModuleNotFoundError: No module named 'zmq'", "lacks a package", "pip install zmq"),
        (1, "OSError: [Errno 28] No space left on device", "disk is full", "free some space on b"),
        (127, f"sh: 1: exec: {PYTHON}: not found", NEXT, "installed on b"),
        (127, "", NEXT, "installed on b"),
        (5, "refused by somebody", "ssh exited with 5", f"b '{PYTHON} -m cellmesh --version'`"),
    ],
)
def test_failure_says_what_is_wrong_and_what_mends_it(
    status: int, said: str, text: str, remedy: str
) -> None:
    sentence = explain("b", "", PYTHON, status, said)
    cause, _, mend = sentence.partition(". Next: ")
    assert text in cause
    assert remedy in mend
    assert sentence.startswith("b: ")
    assert said in sentence
    assert f"exited with {status}" in sentence


PODMAN = "podman exec -i {host} {command}"
GONE = "Unable to confirm allocation for job 5: Invalid job id specified"
NODES = "Unable to create step for job 5: Requested node configuration is not available"
API, IN = "API server is not reached", "kubectl -n NAMESPACE exec -i {host} -- {command}"
DOCKER, KUBECTL = "docker exec -i {host} {command}", "kubectl exec -i {host} -- {command}"
SRUN = "srun --jobid=5 --overlap --nodes=1 --nodelist={host} {command}"
RAY = f"{PYTHON} -m cellmesh.controller.session.launch.ray_driver run GROUP {{host}} {{command}}"


@pytest.mark.parametrize(
    ("launch", "said", "text", "remedy"),
    [
        (DOCKER, "Error response from daemon: No such container: b", "no such", "`docker ps`"),
        (
            PODMAN,
            'Error: no container with name or ID "b" found: no such',
            "no such",
            "`podman ps`",
        ),
        (DOCKER, "Error response from daemon: container 5f2 is not running", "not run", "start b`"),
        (DOCKER, "Cannot connect to the Docker daemon at unix", "daemon is not", "`docker info`"),
        (DOCKER, f"OCI exec failed: stat {PYTHON}: no such file or directory", NEXT, "on b"),
        (KUBECTL, 'Error from server (NotFound): pods "b" not found', "no such pod", f"`{IN}`"),
        (KUBECTL, "error: cannot exec into a container in a completed pod", "not run", "be pod b`"),
        (KUBECTL, 'Error from server (Forbidden): pods "b" is forbidden', "refuses you", "can-i"),
        (KUBECTL, "The connection to the server localhost:8080 was refused", API, "cluster-info`"),
        (KUBECTL, "Unable to connect to the server: dial tcp: Connection refused", API, "-info`"),
        (SRUN, "srun: error: Slurm job 5 has expired", "job has ended", "`sacct -j 5`"),
        (SRUN, f"srun: error: {GONE}", "job has ended", "`sacct -j 5`"),
        (SRUN, f"srun: error: {NODES}", "not in Slurm's job", "`scontrol show node b`"),
        (SRUN, "srun: error: Unable to contact slurm controller", "slurmctld", "`scontrol ping`"),
        (SRUN, "Connection timed out", "srun exited with 1", f"=b {PYTHON} -m cellmesh --version`"),
        (RAY, "Connection refused", "exited with 1", "`ray status`"),
    ],
)
def test_failure_of_an_engine_has_the_engines_own_advice(
    launch: str, said: str, text: str, remedy: str
) -> None:
    sentence = explain("b", launch, PYTHON, 1, said)
    cause, _, mend = sentence.partition(". Next: ")
    assert text in cause
    assert remedy in mend
    assert "ssh" not in sentence


def test_command_to_try_can_be_typed() -> None:
    run = f"{PYTHON} -m cellmesh --version"
    assert command_to_try("b", DOCKER, PYTHON) == f"docker exec -i b {run}"
    assert command_to_try("b", SRUN, PYTHON) == f"srun --overlap --nodes=1 --nodelist=b {run}"
    copies = "sh -c 'docker cp {ticket} {host}:{ticket} && docker exec {host} {command}'"
    file = "/tmp/cellmesh-try"
    assert command_to_try("b", copies, PYTHON) == (
        f"touch {file} && sh -c 'docker cp {file} b:{file} && docker exec b {run}'"
    )
