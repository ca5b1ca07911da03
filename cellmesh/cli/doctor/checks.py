"""The checks of `doctor`: each a function from facts to what it finds, and how that is mended.

They look for what makes the start of a mesh fail, and for what makes a mesh slow.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import click
import msgspec

from ..filesystems import SHARED_FILESYSTEMS
from ..rendering import format_bytes, plural
from .facts import Facts

Status = Literal["ok", "warning", "problem"]
Answer = tuple[Status, str, str]

_MAX_WIDTH = 110
_STYLES: dict[Status, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "warning": {"fg": "yellow"},
    "problem": {"fg": "red", "bold": True},
}
_MB, _GB = 10**6, 10**9
_SLOW_IMPORT_S = 15.0
# PSS of the whole tree with torch imported and nothing else: measured (233 MB with 1 rank, 628 MB
# with 32), and rounded up. That a CUDA context takes 600 MB more is an estimate.
_BASE_BYTES = 250 * _MB
_BYTES_A_RANK = 15 * _MB
_BYTES_A_CUDA_RANK = 600 * _MB
# The agent has 5 descriptors a rank and 4 more while it forks; a rank has one for each of the
# others.
_BASE_FILES = 64
_FILES_A_RANK = 10
_BASE_TASKS = 20
_TASKS_A_RANK = 10
_FREE_BYTES, _NO_FREE_BYTES = 500 * _MB, 5 * _MB


class Finding(msgspec.Struct, frozen=True):
    """What one check found.

    Attributes:
        title: what was looked at.
        status: ``problem``: meshes will not start or not work; ``warning``: something will not, or
            slowly.
        text: what there is, and what it means.
        remedy: what to type or to change; "" where all is well.
    """

    title: str
    status: Status
    text: str
    remedy: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Run all checks; a check without something to look at returns nothing.

    Args:
        facts: of this machine.
    """
    answers = {title: check(facts) for title, check in CHECKS.items()}
    return [Finding(title, *answer) for title, answer in answers.items() if answer is not None]


def _ok(text: str) -> Answer:
    return "ok", text, ""


def _warning(text: str, remedy: str) -> Answer:
    return "warning", text, remedy


def _problem(text: str, remedy: str) -> Answer:
    return "problem", text, remedy


def check_packages(facts: Facts) -> Answer:
    """Python, and the packages that cellmesh requires."""
    if facts.unmet:
        wanted = " ".join(f"'{requirement}'" for requirement in facts.unmet)
        return _problem(
            "; ".join(f"{requirement}: {why}" for requirement, why in facts.unmet.items()),
            f"`{facts.executable} -m pip install --upgrade {wanted}`",
        )
    return _ok(f"Python {facts.python} ({facts.executable}), with all packages")


def check_torch(facts: Facts) -> Answer:
    """Whether torch can be imported, and how fast: every start of a mesh does it once."""
    torch = facts.probe.torch
    if torch is None:
        return _problem(
            facts.probe.error,
            f"`{facts.executable} -c 'import torch'` shows the same; install torch again, "
            "and see that no torch.py lies in this directory",
        )
    if not torch.has_gloo:
        return _problem(
            f"{torch.version} is built without gloo, over which ranks meet",
            "install an official build of torch for Linux",
        )
    text = f"{torch.version}, imported in {torch.import_s:.1f} s"
    if torch.import_s > _SLOW_IMPORT_S:
        return _warning(
            f"{text}: every start of a mesh takes at least that long",
            "try again (the files are cached now); if it stays slow, put the environment on a "
            "local disk",
        )
    return _ok(text)


def check_fork(facts: Facts) -> Answer | None:
    """Whether a process with torch imported can be forked."""
    torch = facts.probe.torch
    if torch is None:
        return None
    if torch.initialized_cuda:
        return _problem(
            "importing torch sets CUDA up, which no forked rank can use then",
            "find what does it (sitecustomize, a .pth file of another package) and remove it",
        )
    if torch.num_threads > 1:
        return _warning(
            f"importing torch leaves {torch.num_threads} threads; a rank forked from such a "
            "process may hang",
            "find the package that starts them (`py-spy dump` on a process that has imported "
            "torch) and update it",
        )
    return _ok("torch is imported with one thread and without CUDA: safe to fork")


def check_gpus(facts: Facts) -> Answer:
    """GPUs, their driver, and whether torch can use them."""
    driver, torch = facts.probe.driver, facts.probe.torch
    if driver.error:
        return _warning(
            f"NVIDIA's driver does not answer, so ranks compute on the CPU: {driver.error}",
            "`nvidia-smi` should say the same; after a driver's update the machine must be "
            "restarted, in a container the GPUs must be passed in (`--gpus all`)",
        )
    if not driver.gpus:
        return _ok("none; ranks compute on the CPU")
    names = ", ".join(sorted(set(driver.gpus)))
    text = (
        f"{plural(len(driver.gpus), 'GPU')} ({names}), driver {driver.version} for CUDA up to "
        f"{_format_version(driver.cuda)}"
    )
    if torch is None:
        return _ok(text)
    if not torch.cuda:
        return _warning(
            f"{text}; but this torch is built without CUDA and cannot use them",
            "install a CUDA build of torch",
        )
    if int(torch.cuda.partition(".")[0]) > driver.cuda[0]:
        return _problem(
            f"{text}; this torch is built for CUDA {torch.cuda}, which the driver cannot run",
            f"update the driver, or install a torch built for CUDA {driver.cuda[0]}",
        )
    if torch.num_gpus == 0:
        return _warning(
            f"{text}; CUDA_VISIBLE_DEVICES hides all of them",
            "`unset CUDA_VISIBLE_DEVICES`",
        )
    if facts.num_ranks > torch.num_gpus and driver.exclusive:
        return _problem(
            f"{text}; they take one process each (compute mode EXCLUSIVE_PROCESS), so "
            f"{facts.num_ranks} ranks do not fit on {torch.num_gpus}",
            f"start {torch.num_gpus}, or as root: `nvidia-smi -c DEFAULT`",
        )
    if not torch.nccl:
        return _warning(
            f"{text}; this torch is built without NCCL: CUDA tensors travel through gloo, slowly",
            "install an official CUDA build of torch for Linux",
        )
    return _ok(
        f"{text}; torch is built for {torch.cuda}, with NCCL {_format_version(torch.nccl)}, for up "
        f"to {plural(torch.num_gpus, 'rank')}, one a GPU; more ranks share GPUs, over gloo"
    )


def check_calls(facts: Facts) -> Answer:
    """Check that the kernel allows the system calls by which cellmesh watches processes (pidfd) and
    shares memory (memfd).
    """
    missing = facts.missing_calls
    if not missing:
        return _ok("pidfd_open and memfd_create work")
    remedy = (
        "use Linux 5.3 or newer; in a container: update its runtime, or start it with "
        "`--security-opt seccomp=unconfined`"
    )
    text = "; ".join(f"{call}: {why}" for call, why in missing.items())
    if set(missing) == {"memfd_create"}:
        text += "; large values cannot be shared between ranks without copies"
        return _warning(text, remedy)
    return _problem(f"{text}; ranks cannot be watched", remedy)


def check_cores(facts: Facts) -> Answer:
    """Count processor cores against what competes for them: ranks, their threads, other
    processes.
    """
    usable = float(facts.num_usable_cores)
    text = plural(facts.num_cores, "core")
    if facts.num_usable_cores < facts.num_cores:
        text += f", {facts.num_usable_cores} of them for us (CPU affinity)"
    if facts.quota_cores is not None and facts.quota_cores < usable:
        usable = facts.quota_cores
        text += f", the cgroup's quota grants the time of {usable:g}"
    num_threads = facts.omp_num_threads * facts.num_ranks
    if facts.omp_num_threads > 1 and num_threads > usable:
        return _warning(
            f"{text}; with OMP_NUM_THREADS={facts.omp_num_threads}, {facts.num_ranks} ranks "
            f"compute with {num_threads} threads",
            "`unset OMP_NUM_THREADS`: each rank then gets one",
        )
    if facts.num_ranks > usable:
        return _warning(
            f"{text}; {facts.num_ranks} ranks take turns: fine to develop, of no use to time "
            "anything",
            f"start at most {max(1, int(usable))}, unless they compute on GPUs",
        )
    return _ok(f"{text}; enough for {plural(facts.num_ranks, 'rank')}")


def check_memory(facts: Facts) -> Answer:
    """Memory, against what ranks take before they hold anything."""
    free = facts.available_bytes
    on_gpus = facts.probe.torch is not None and facts.probe.torch.num_gpus > 0
    each = _BYTES_A_CUDA_RANK if on_gpus else _BYTES_A_RANK
    needed = _BASE_BYTES + facts.num_ranks * each
    text = (
        f"{format_bytes(free)} of {format_bytes(facts.total_bytes)} available; "
        f"{plural(facts.num_ranks, 'rank')} take about {format_bytes(needed)} before models and "
        "data"
    )
    if free >= 2 * needed:
        return _ok(text)
    fitting = max(0, (free - _BASE_BYTES) // each)
    fewer = f"start at most {fitting}, " if fitting else ""
    answer = _problem if free < needed else _warning
    return answer(
        text,
        f"{fewer}end what else runs here, or ask for more (batch system: `--mem`, container: "
        "`--memory`)",
    )


def check_shm(facts: Facts) -> Answer:
    """/dev/shm, through which data loaders and NCCL pass tensors."""
    users = "DataLoader workers and NCCL pass tensors through it"
    text = f"{format_bytes(facts.shm_free_bytes)} of {format_bytes(facts.shm_bytes)} free"
    if facts.shm_error:
        text = f"cannot be written: {facts.shm_error}; {users}"
    elif facts.shm_free_bytes < _GB:
        text = f"{text}; {users}, and die with a bus error when it is full"
    else:
        return _ok(text)
    return _warning(
        text,
        "in a container: `docker run --shm-size=8g` or `--ipc=host`; "
        "else `mount -o remount,size=8g /dev/shm`",
    )


def check_open_files(facts: Facts) -> Answer:
    """RLIMIT_NOFILE, against the pipes and sockets between agent and ranks."""
    limit = facts.open_files
    if limit is None:
        return _ok("no limit")
    needed = _BASE_FILES + _FILES_A_RANK * facts.num_ranks
    fitting = max(0, (limit - _BASE_FILES) // _FILES_A_RANK)
    text = f"{limit} a process: enough for about {plural(fitting, 'rank')}"
    if limit >= needed:
        return _ok(text)
    return _problem(
        f"{text}, and {facts.num_ranks} are wanted",
        f"`ulimit -n {max(4096, needed)}` before Jupyter is started; if that is refused, let the "
        "administrator raise `nofile` in /etc/security/limits.conf",
    )


def check_tasks(facts: Facts) -> Answer:
    """RLIMIT_NPROC and the cgroup's pids.max, which count threads."""
    left = facts.tasks
    if left is None:
        return _ok("no limit")
    needed = _BASE_TASKS + _TASKS_A_RANK * facts.num_ranks
    text = f"{left} more processes and threads may be started"
    if left >= needed:
        return _ok(text)
    return _problem(
        f"{text}; {plural(facts.num_ranks, 'rank')} need about {needed}",
        "`ulimit -u unlimited` before Jupyter is started; in a container: `--pids-limit -1`",
    )


def check_runtime(facts: Facts) -> Answer:
    """The directory in which every mesh has its ticket, socket and logs."""
    elsewhere = "`export JUPYTER_RUNTIME_DIR=/tmp/jupyter-$USER` before Jupyter is started"
    if facts.runtime_error:
        return _problem(facts.runtime_error, f"mend that, or {elsewhere}")
    text = f"{facts.runtime_path}, {format_bytes(facts.runtime_free_bytes)} free"
    if facts.runtime_free_bytes < _FREE_BYTES:
        answer = _problem if facts.runtime_free_bytes < _NO_FREE_BYTES else _warning
        return answer(f"{text}; what ranks print is kept there", f"free some space, or {elsewhere}")
    if facts.runtime_filesystem in SHARED_FILESYSTEMS:
        return _warning(
            f"{text}, is on a file system that other hosts share ({facts.runtime_filesystem}): "
            "it may be slow, and what a crash leaves there is not removed by itself",
            elsewhere,
        )
    return _ok(text)


def check_tmp(facts: Facts) -> Answer:
    """Check the directory for temporary files, in which torch.compile and profilers write."""
    elsewhere = "free some space, or `export TMPDIR=...` before Jupyter is started"
    if not facts.tmp_path:
        return _problem("no directory for temporary files can be written", elsewhere)
    text = f"{facts.tmp_path}, {format_bytes(facts.tmp_free_bytes)} free"
    if facts.tmp_free_bytes < _FREE_BYTES:
        return _warning(f"{text}; torch.compile and profilers write there", elsewhere)
    return _ok(text)


def check_loopback(facts: Facts) -> Answer:
    """TCP over 127.0.0.1, by which ranks reach each other."""
    if facts.loopback_error:
        return _problem(
            f"no TCP connection over 127.0.0.1: {facts.loopback_error}",
            "as root: `ip link set lo up`",
        )
    return _ok("TCP over 127.0.0.1 works")


def check_widgets(facts: Facts) -> Answer | None:
    """Whether JupyterLab's pages can show widgets; without, they show pictures and tables."""
    if not facts.jupyter:
        return None
    if facts.missing_widgets:
        return _warning(
            f"the Jupyter of {facts.jupyter} shows no widgets: {', '.join(facts.missing_widgets)} "
            "not found there",
            f"`{facts.jupyter}/bin/python -m pip install {' '.join(facts.missing_widgets)}`, then "
            "reload the page",
        )
    return _ok(f"the Jupyter of {facts.jupyter} shows widgets")


def check_trial(facts: Facts) -> Answer | None:
    """Whether a small mesh really starts, works and stops."""
    trial = facts.trial
    if trial is None:
        return None
    if trial.error:
        return _problem(
            f"a mesh of {trial.num_ranks} ranks did not work: {trial.error}",
            "mend what else is found here; if that is nothing, report this with `cellmesh doctor "
            "--json`",
        )
    return _ok(
        f"{trial.num_ranks} ranks with {trial.backend}: ready in {trial.start_s:.1f} s, "
        f"all_reduce in {trial.collective_s * 1e3:.1f} ms, stopped in {trial.stop_s:.1f} s",
    )


CHECKS: Mapping[str, Callable[[Facts], Answer | None]] = {
    "packages": check_packages,
    "torch": check_torch,
    "forking ranks": check_fork,
    "GPUs": check_gpus,
    "system calls": check_calls,
    "cores": check_cores,
    "memory": check_memory,
    "/dev/shm": check_shm,
    "open files": check_open_files,
    "processes": check_tasks,
    "runtime directory": check_runtime,
    "temporary files": check_tmp,
    "loopback": check_loopback,
    "widgets": check_widgets,
    "a real mesh": check_trial,
}


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def echo_findings(findings: Sequence[Finding]) -> None:
    """Write findings, one a paragraph, and a summary.

    Args:
        findings: as `examine` gives.
    """
    out = sys.stdout
    width = min(_MAX_WIDTH, shutil.get_terminal_size().columns) if out.isatty() else None
    indent = max(len(finding.title) for finding in findings) + len("problem") + 4
    for finding in findings:
        mark = click.style(f"{finding.status:<7}", **_STYLES[finding.status])
        head = f"{finding.title:<{indent - len('problem') - 2}}"
        click.echo(f"{mark}  {head}{_hang(finding.text, indent, width)}")
        if finding.remedy:
            click.echo(" " * indent + _hang(f"mend: {finding.remedy}", indent, width))
    counts = [
        (sum(finding.status == status for finding in findings), status)
        for status in ("problem", "warning")
    ]
    said = [plural(count, status) for count, status in counts if count]
    worst: Status = "problem" if counts[0][0] else "warning" if counts[1][0] else "ok"
    click.echo()
    click.secho(", ".join(said) if said else "all is well", **_STYLES[worst])


def _hang(text: str, indent: int, width: int | None) -> str:
    if width is None or width - indent < 20:
        return text
    return f"\n{' ' * indent}".join(
        textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    )
