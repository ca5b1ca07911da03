"""Explains why the command that should start an agent on a host failed, and what to type next.
Pure.
"""

from __future__ import annotations

import re
import shlex

from ...host_list import command_for

# What is put in the place of a ticket's file.
_ANY_FILE = "/tmp/cellmesh-try"
_TRY = "`ssh {name} true` must work without a question"
# What ssh, an engine's command, a shell or Python on the host have said -> what it means, and what
# mends it. Each has words of its own, so that it is known behind sudo or a script, too.
_KNOWN = (
    (
        r"ssh: Could not resolve hostname",
        "the name does not resolve",
        f"write it as DNS, /etc/hosts or ~/.ssh/config have it; {_TRY}",
    ),
    (
        r"Host key verification failed",
        "the host's key is not known, or another one than before",
        "connect by hand once (`ssh {name}`) and compare the key",
    ),
    (
        r"Permission denied \((?:publickey|password|keyboard|gssapi|hostbased)"
        r"|Too many authentication failures",
        "the host refuses your key",
        f"`ssh-copy-id {{name}}`, or load the key with `ssh-add`; {_TRY}",
    ),
    (
        r"ssh: connect to host .*Connection refused"
        r"|open failed: connect failed: Connection refused",  # by ProxyJump
        "nothing listens on the host's ssh port",
        f"start sshd there, or name the port in ~/.ssh/config; {_TRY}",
    ),
    (
        r"ssh: connect to host .*(?:timed out|No route to host|Network is unreachable)"
        r"|timed out during banner exchange",
        "the host is not reached",
        f"see that it runs, and that no firewall is between; {_TRY}",
    ),
    (
        r"[Nn]o such container|no container with name",
        "there is no such container",
        "`{program} ps` lists those that run: use one of these names in --hosts",
    ),
    (
        r"[Cc]ontainer \S+ is not running|container state improper",
        "the container does not run",
        "`{program} start {name}`",
    ),
    (
        r"connect to the [Dd]ocker (?:daemon|API)",
        "Docker's daemon is not reached",
        "`docker info` must work for your user",
    ),
    (
        r"""pods? "[^"]*" not found""",
        "there is no such pod",
        "`kubectl get pods -A` lists them; name another namespace in --launch, like `kubectl -n "
        "NAMESPACE exec -i {{host}} -- {{command}}`",
    ),
    (
        r"container not found|does not have a host assigned|in a completed pod"
        r"|is not valid for pod",
        "the pod does not run, or has no such container",
        "`kubectl describe pod {name}` says why",
    ),
    (
        r"Error from server \(Forbidden\)|must be logged in to the server",
        "the cluster refuses you",
        "`kubectl auth can-i create pods/exec` must say yes",
    ),
    (
        r"connection to the server \S+ was refused|Unable to connect to the server",
        "the cluster's API server is not reached",
        "`kubectl cluster-info` must work",
    ),
    (
        r"Unable to allocate resources: Requested nodes are busy",
        "Slurm has not given the nodes in time",
        "ask for less, or wait longer (--queue-timeout); `squeue` shows who has them",
    ),
    (
        r"error: (?:Unable to allocate resources|Job submit/allocate failed)",
        "Slurm refuses the job",
        "`sinfo` lists partitions, limits and nodes",
    ),
    (
        r"Slurm job (\d+) has expired|allocation for job (\d+): Invalid job id",
        "Slurm's job has ended",
        "`sacct -j {found}` says why; start the mesh again",
    ),
    (
        r"Unable to create step for job (\d+): Requested node|Invalid node name specified",
        "the node is not in Slurm's job, or is busy",
        "`scontrol show node {name}`, and `squeue --jobs={found}` for the job's nodes",
    ),
    (
        r"Unable to contact slurm controller",
        "slurmctld does not answer",
        "`scontrol ping` must say UP",
    ),
    (
        r"No module named '?cellmesh\b",
        "its Python has no cellmesh",
        "is cellmesh installed on {name}? There: `{python} -m pip install cellmesh`",
    ),
    (
        r"No module named '?(\w+)",
        "its Python lacks a package",
        "on {name}: `{python} -m pip install {found}`",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "its disk is full",
        "free some space on {name}; `df -h` there says where",
    ),
)


def explain(name: str, launch: str, python: str, status: int, said: str) -> str:
    """Return why no agent was started on a host, and what to type next.

    Args:
        name: the host.
        launch: the command line that starts an agent; "" for ssh.
        python: the interpreter that the command names.
        status: the command's exit code.
        said: the command's output.
    """
    text, remedy = _find_cause(name, launch, python, status, said)
    program = command_for(launch, name, ())[0]
    output = f": {said}" if said else ""
    ended = f"no agent was started, {program} exited with {status}"
    cause = f"{text} ({ended})" if text else ended
    return f"{name}: {cause}{output}. Next: {remedy}"


def _find_cause(name: str, launch: str, python: str, status: int, said: str) -> tuple[str, str]:
    """Return the cause, "" if it is unknown, and the remedy."""
    program = command_for(launch, name, ())[0]
    for pattern, text, remedy in _KNOWN:
        found = re.search(pattern, said)
        if found is not None:
            word = next((group for group in found.groups() if group), "")
            return text, remedy.format(name=name, program=program, python=python, found=word)
    if status == 127 or python in said:
        return (
            "the notebook's Python is not there",
            f"is cellmesh installed on {name}? There must be a {python}, as in the notebook",
        )
    return "", f"try by hand: `{command_to_try(name, launch, python)}`"


def command_to_try(name: str, launch: str, python: str) -> str:
    """Return the command line that shows whether an agent can be started on a host, without the
    ticket, which a person has not.
    """
    if "ray_driver" in launch:  # it runs in what Ray had reserved, which is given back
        return "ray status"
    outside = re.sub(r"^srun --jobid=\d+ ", "srun ", launch)  # of a job that may have ended
    command = command_for(outside, name, [python, "-m", "cellmesh", "--version"], _ANY_FILE)
    text = shlex.join(command)
    return f"touch {_ANY_FILE} && {text}" if "{ticket}" in launch else text
