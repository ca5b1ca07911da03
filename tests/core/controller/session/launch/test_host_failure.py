"""What a failed command means and what to type next, from what ssh, engines and Python print."""

from __future__ import annotations

import pytest

from cellmesh.controller.session.launch.host_failure import command_to_try, explain

PYTHON = "/opt/env/bin/python"


@pytest.mark.parametrize(
    ("status", "said", "text", "remedy"),
    [
        (
            255,
            "ssh: Could not resolve hostname b: Name or service not known",
            "does not resolve",
            "`ssh b true` must work",
        ),
        (255, "Host key verification failed.", "key is not known", "`ssh b`"),
        (
            255,
            "root@b: Permission denied (publickey,password).",
            "refuses your key",
            "ssh-copy-id b",
        ),
        (255, "ssh: connect to host b port 22: Connection refused", "nothing listens", "sshd"),
        (255, "ssh: connect to host b port 22: Connection timed out", "not reached", "firewall"),
        (
            1,
            f"{PYTHON}: No module named cellmesh",
            "no cellmesh",
            f"`{PYTHON} -m pip install cellmesh`",
        ),
        (1, "ModuleNotFoundError: No module named 'zmq'", "lacks a package", "pip install zmq"),
        (1, "OSError: [Errno 28] No space left on device", "disk is full", "free some space on b"),
        (127, f"sh: 1: exec: {PYTHON}: not found", "Python is not there", "installed on b"),
        (127, "", "Python is not there", "installed on b"),
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


DOCKER, KUBECTL = "docker exec -i {host} {command}", "kubectl exec -i {host} -- {command}"
SRUN = "srun --jobid=5 --overlap --nodes=1 --nodelist={host} {command}"
RAY = f"{PYTHON} -m cellmesh.controller.session.launch.ray_driver run GROUP {{host}} {{command}}"


@pytest.mark.parametrize(
    ("launch", "said", "text", "remedy"),
    [
        (DOCKER, "Error response from daemon: No such container: b", "no such", "`docker ps`"),
        (
            "podman exec -i {host} {command}",
            'Error: no container with name or ID "b" found: no such container',
            "no such container",
            "`podman ps`",
        ),
        (DOCKER, "Error response from daemon: container 5f2 is not running", "not run", "start b`"),
        (
            DOCKER,
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
            "daemon is not reached",
            "`docker info`",
        ),
        (
            DOCKER,
            f'OCI runtime exec failed: exec: "{PYTHON}": stat {PYTHON}: no such file or directory',
            "Python is not there",
            "installed on b",
        ),
        (
            KUBECTL,
            'Error from server (NotFound): pods "b" not found',
            "no such pod",
            "`kubectl -n NAMESPACE exec -i {host} -- {command}`",
        ),
        (
            KUBECTL,
            "error: cannot exec into a container in a completed pod; current phase is Succeeded",
            "does not run",
            "`kubectl describe pod b`",
        ),
        (
            KUBECTL,
            'Error from server (Forbidden): pods "b" is forbidden: User "eve" cannot create',
            "refuses you",
            "can-i create pods/exec",
        ),
        (
            KUBECTL,
            "The connection to the server localhost:8080 was refused - did you specify the right",
            "API server is not reached",
            "`kubectl cluster-info`",
        ),
        (
            KUBECTL,
            "Unable to connect to the server: dial tcp 10.0.0.1:6443: connect: Connection refused",
            "API server is not reached",
            "`kubectl cluster-info`",
        ),
        (SRUN, "srun: error: Slurm job 5 has expired", "job has ended", "`sacct -j 5`"),
        (
            SRUN,
            "srun: error: Unable to confirm allocation for job 5: Invalid job id specified",
            "job has ended",
            "`sacct -j 5`",
        ),
        (
            SRUN,
            "srun: error: Unable to create step for job 5: Requested node configuration is not "
            "available",
            "not in Slurm's job",
            "`scontrol show node b`",
        ),
        (
            SRUN,
            "srun: error: Unable to contact slurm controller (connect failure)",
            "slurmctld does not answer",
            "`scontrol ping`",
        ),
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
