"""Checks of the software and of the GPUs: Python, packages, torch, its backends, the notebook's
kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from .facts import Facts
from .findings import (
    Finding,
    format_bytes,
    format_version,
    ok,
    parse_version,
    plural,
    problem,
    warning,
)

MINIMUM_PYTHON = (3, 11)
MINIMUMS = {
    "torch": (2, 11),
    "pyzmq": (25, 1),
    "ipykernel": (6, 29),
    "ipython": (8, 22),
    "msgspec": (0, 18, 6),
}
_SLOW_IMPORT_S = 15.0
_FEW_FREE = 0.1


def check_python(facts: Facts) -> Finding:
    """The interpreter."""
    system = facts.system
    text = f"{format_version(system.python)} ({system.executable})"
    if system.python < MINIMUM_PYTHON:
        return problem(
            "Python",
            f"{text} is too old",
            f"make an environment with Python {format_version(MINIMUM_PYTHON)} or newer",
        )
    return ok("Python", text)


def check_packages(facts: Facts) -> Finding:
    """The packages that cellmesh builds on."""
    versions = facts.system.packages
    lacking = [
        f"{name} {versions[name]} is too old" if name in versions else f"{name} is not installed"
        for name, minimum in MINIMUMS.items()
        if parse_version(versions.get(name, "")) < minimum
    ]
    if lacking:
        wanted = " ".join(
            f"'{name}>={format_version(minimum)}'" for name, minimum in MINIMUMS.items()
        )
        return problem(
            "packages",
            "; ".join(lacking),
            f"`{facts.system.executable} -m pip install --upgrade {wanted}`",
        )
    return ok("packages", ", ".join(f"{name} {versions[name]}" for name in MINIMUMS))


def check_torch(facts: Facts) -> Finding:
    """Whether torch can be imported, and how fast: every start of a mesh does it once."""
    torch = facts.probe.torch
    if torch is None:
        return problem(
            "torch",
            facts.probe.error,
            f"`{facts.system.executable} -c 'import torch'` shows the same; install torch again, "
            "and see that no torch.py lies in this directory",
        )
    text = f"{torch.version}, imported in {torch.import_s:.1f} s"
    if torch.import_s > _SLOW_IMPORT_S:
        return warning(
            "torch",
            f"{text}: every start of a mesh takes at least that long",
            "try again (the files are cached now); if it stays slow, put the environment on a "
            "local disk",
        )
    return ok("torch", text)


def check_fork(facts: Facts) -> Finding | None:
    """Whether a process with torch imported can be forked."""
    torch = facts.probe.torch
    if torch is None:
        return None
    title = "forking ranks"
    if torch.initialized_cuda:
        return problem(
            title,
            "importing torch sets CUDA up, which no forked rank can use then",
            "find what does it (sitecustomize, a .pth file of another package) and remove it",
        )
    if torch.num_threads > 1:
        return warning(
            title,
            f"importing torch leaves {torch.num_threads} threads; a rank forked from such a "
            "process may hang",
            "find the package that starts them (`py-spy dump` on a process that has imported "
            "torch) and update it",
        )
    return ok(title, "torch is imported with one thread and without CUDA: safe to fork")


def check_distributed(facts: Facts) -> Finding | None:
    """torch.distributed and gloo."""
    torch = facts.probe.torch
    if torch is None:
        return None
    title = "torch.distributed"
    missing = (
        "torch.distributed" if not torch.has_distributed else "gloo" if not torch.has_gloo else ""
    )
    if missing:
        return problem(
            title,
            f"this torch is built without {missing}",
            "install an official build of torch for Linux",
        )
    return ok(title, "with gloo and NCCL" if torch.has_nccl else "with gloo")


def check_gpus(facts: Facts) -> Finding:
    """GPUs, their driver, and whether torch can use them."""
    title, driver, torch = "GPUs", facts.probe.driver, facts.probe.torch
    if driver.error:
        return warning(
            title,
            f"NVIDIA's driver does not answer, so ranks compute on the CPU: {driver.error}",
            "`nvidia-smi` should say the same; after a driver's update the machine must be "
            "restarted, in a container the GPUs must be passed in (`--gpus all`)",
        )
    if not driver.gpus:
        return ok(title, "none; ranks compute on the CPU")
    names = sorted({gpu.name for gpu in driver.gpus})
    text = (
        f"{plural(len(driver.gpus), 'GPU')} ({', '.join(names)}), driver {driver.version} for "
        f"CUDA up to {format_version(driver.cuda)}"
    )
    if torch is None:
        return ok(title, text)
    if not torch.cuda:
        return warning(
            title,
            f"{text}; but this torch is built without CUDA and cannot use them",
            "install a CUDA build of torch",
        )
    built_for = parse_version(torch.cuda)
    if built_for[:1] > driver.cuda[:1]:
        return problem(
            title,
            f"{text}; this torch is built for CUDA {torch.cuda}, which the driver cannot run",
            f"update the driver, or install a torch built for CUDA {driver.cuda[0]}",
        )
    if torch.num_gpus == 0:
        return warning(
            title, f"{text}; CUDA_VISIBLE_DEVICES hides all of them", "`unset CUDA_VISIBLE_DEVICES`"
        )
    if facts.num_ranks > torch.num_gpus and any(gpu.exclusive for gpu in driver.gpus):
        return problem(
            title,
            f"{text}; they take one process each (compute mode EXCLUSIVE_PROCESS), so "
            f"{facts.num_ranks} ranks do not fit on {torch.num_gpus}",
            f"start {torch.num_gpus}, or as root: `nvidia-smi -c DEFAULT`",
        )
    full = [i for i, gpu in enumerate(driver.gpus) if gpu.free_bytes < _FEW_FREE * gpu.total_bytes]
    if full:
        free = ", ".join(
            f"GPU {i}: {format_bytes(driver.gpus[i].free_bytes)} of "
            f"{format_bytes(driver.gpus[i].total_bytes)} free"
            for i in full
        )
        return warning(
            title, f"{text}; nearly full: {free}", "`nvidia-smi` shows whose processes hold it"
        )
    return ok(title, f"{text}; torch is built for {torch.cuda} and may use {torch.num_gpus}")


def check_nccl(facts: Facts) -> Finding | None:
    """NCCL, and how many ranks can use it."""
    torch = facts.probe.torch
    if torch is None or torch.num_gpus == 0:
        return None
    if not torch.has_nccl:
        return warning(
            "NCCL",
            "this torch is built without NCCL: CUDA tensors travel through gloo, slowly",
            "install an official CUDA build of torch for Linux",
        )
    return ok(
        "NCCL",
        f"{format_version(torch.nccl)}: for up to {plural(torch.num_gpus, 'rank')}, one a GPU; "
        "more ranks share GPUs, and gloo carries their tensors",
    )


def check_kernel(facts: Facts) -> Finding:
    """Whether notebooks can use this environment."""
    title = "notebook kernel"
    ours = [
        name
        for name, python in facts.kernels.items()
        if is_same_python(python, facts.system.executable)
    ]
    if ours:
        return ok(title, f"{', '.join(sorted(ours))} starts this Python")
    seen = ", ".join(f"{name}: {python}" for name, python in sorted(facts.kernels.items()))
    return warning(
        title,
        f"no Jupyter kernel starts this Python ({seen or 'there is none at all'}), so notebooks "
        "may not find cellmesh",
        f"`{facts.system.executable} -m ipykernel install --user --name cellmesh`",
    )


def is_same_python(command: str, executable: str) -> bool:
    """Whether a kernel's command starts this interpreter.

    Args:
        command: the first word of the kernel's argv.
        executable: this interpreter.
    """
    # Jupyter puts its own interpreter in the place of a bare name.
    if re.fullmatch(r"python(\d+(\.\d+)?)?", command):
        return True
    # The same directory and not the same file: what a venv's python links to is another
    # environment.
    return Path(command).is_absolute() and Path(command).parent == Path(executable).parent


TORCH_CHECKS: Sequence[Callable[[Facts], Finding | None]] = (
    check_python,
    check_packages,
    check_torch,
    check_fork,
    check_distributed,
    check_gpus,
    check_nccl,
    check_kernel,
)
