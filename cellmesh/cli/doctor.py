"""``cellmesh doctor``: checks why meshes fail to start on this machine.

Each check examines one aspect and returns its status, the finding and a remedy. torch and the GPUs'
driver are probed in a separate process: both may hang or crash if an installation is broken.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import click
import msgspec

from .. import __version__
from ..controller.options import MAX_RANKS
from ..errors import CellmeshError, HostError
from ..wire.limits import free_bytes
from ..wire.marks import end_dead_meshes
from ..wire.segments import format_bytes
from ..wire.ticket import make_directory, remove_directory, runtime_root
from .rendering import as_json, plural

_PROBE = (sys.executable, "-c", "from cellmesh.cli.doctor import print_probe; print_probe()")
_PROBE_S, _START_S, _COLLECTIVE_S, _SLOW_IMPORT_S = 180.0, 120.0, 30.0, 15.0
_MB = 10**6
# PSS of the whole tree with torch imported and nothing else: measured (233 MB with 1 rank, 628 MB
# with 32), and rounded up. That a CUDA context takes 600 MB more is an estimate.
_BASE_BYTES, _BYTES_A_RANK, _BYTES_A_CUDA_RANK = 250 * _MB, 15 * _MB, 600 * _MB
_FREE_BYTES, _NO_FREE_BYTES, _SHM_BYTES = 500 * _MB, 5 * _MB, 1000 * _MB

Status = Literal["ok", "warning", "problem"]
# Status, the finding and its meaning, and the remedy.
Answer = tuple[Status, str, str]


class Torch(msgspec.Struct, frozen=True):
    """Properties of the installed torch.

    Attributes:
        import_s: duration of the import, in seconds.
        has_gloo: whether torch.distributed is available, with gloo.
        nccl: version of NCCL; empty if torch is built without it.
        cuda: version of CUDA that torch was built with; "" for none.
        num_gpus: number of GPUs that torch may use (CUDA_VISIBLE_DEVICES).
    """

    version: str
    import_s: float
    has_gloo: bool
    nccl: tuple[int, ...]
    cuda: str
    num_gpus: int


class Driver(msgspec.Struct, frozen=True):
    """Properties of NVIDIA's driver and its GPUs.

    Attributes:
        version: version of the driver; "" without a driver.
        cuda: newest version of CUDA that it supports, (major, minor).
        gpus: names of all GPUs, also those that CUDA_VISIBLE_DEVICES hides.
        error: NVML's message if it fails.
    """

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[str, ...] = ()
    error: str = ""


class Probe(msgspec.Struct, frozen=True):
    """The result of the probe process: properties of torch, or the error of its import, and of
    NVIDIA's driver.
    """

    torch: Torch | None = None
    error: str = ""
    driver: Driver = Driver()


class Finding(msgspec.Struct, frozen=True):
    """The result of one check of `cellmesh doctor`.

    Attributes:
        title: subject of the check.
        status: ``problem``: meshes do not start or do not work; ``warning``: a feature does not
            work, or is slow.
        text: the finding and its meaning.
        remedy: command to type, or setting to change; "" if there is no problem.
    """

    title: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Host:
    """The machine that `cellmesh doctor` checks: its torch and GPU driver, and the number of ranks
    that are to run on it.
    """

    num_ranks: int
    probe: Probe


def examine(num_ranks: int | None, wants_trial: bool) -> Iterator[Finding]:
    """Run all checks of `cellmesh doctor`, and yield a finding for each check that applies to this
    machine.

    Args:
        num_ranks: number of ranks that are to run here; None for one per GPU, or one per core.
        wants_trial: whether to start a mesh, if torch can be imported.
    """
    probe = run_probe()
    num_gpus = probe.torch.num_gpus if probe.torch is not None else 0
    host = Host(num_ranks or max(2, num_gpus or len(os.sched_getaffinity(0))), probe)
    for title, check in CHECKS.items():
        answer = check(host) if wants_trial or check is not check_trial else None
        if answer is not None:
            yield Finding(title, *answer)


def _ok(text: str) -> Answer:
    return "ok", text, ""


def _warning(text: str, remedy: str) -> Answer:
    return "warning", text, remedy


def _problem(text: str, remedy: str) -> Answer:
    return "problem", text, remedy


def check_torch(host: Host) -> Answer:
    """Check that torch can be imported, and how fast: every start of a mesh imports it once."""
    torch = host.probe.torch
    if torch is None:
        return _problem(
            host.probe.error,
            f"`{sys.executable} -c 'import torch'` shows the same; install torch again, "
            "and see that no torch.py lies in this directory",
        )
    if not torch.has_gloo:
        return _problem(
            f"{torch.version} is built without gloo, over which ranks meet",
            "install an official build of torch for Linux",
        )
    text = f"{torch.version}, imported in {torch.import_s:.1f} s by Python "
    text += f"{platform.python_version()} ({sys.executable})"
    if torch.import_s > _SLOW_IMPORT_S:
        return _warning(
            f"{text}: every start of a mesh takes at least that long",
            "try again (the files are cached now); if it stays slow, put the environment on a "
            "local disk",
        )
    return _ok(text)


def check_gpus(host: Host) -> Answer:
    """Check the GPUs, their driver, and that torch can use them."""
    driver, torch = host.probe.driver, host.probe.torch
    if driver.error:
        return _warning(
            f"NVIDIA's driver does not answer, so ranks compute on the CPU: {driver.error}",
            "`nvidia-smi` should say the same; after a driver's update the machine must be "
            "restarted, in a container the GPUs must be passed in (`--gpus all`)",
        )
    if not driver.gpus:
        return _ok("none; ranks compute on the CPU")
    text = (
        f"{plural(len(driver.gpus), 'GPU')} ({', '.join(sorted(set(driver.gpus)))}), driver "
        f"{driver.version} for CUDA up to {_format_version(driver.cuda)}"
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
            f"{text}; CUDA_VISIBLE_DEVICES hides all of them", "`unset CUDA_VISIBLE_DEVICES`"
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


def check_memory(host: Host) -> Answer:
    """Check that free memory suffices for the ranks, which hold no data yet."""
    free = free_bytes()
    on_gpus = host.probe.torch is not None and host.probe.torch.num_gpus > 0
    each = _BYTES_A_CUDA_RANK if on_gpus else _BYTES_A_RANK
    needed = _BASE_BYTES + host.num_ranks * each
    text = (
        f"{format_bytes(free)} available; {plural(host.num_ranks, 'rank')} take about "
        f"{format_bytes(needed)} before models and data"
    )
    if free >= 2 * needed:
        return _ok(text)
    fitting = max(0, (free - _BASE_BYTES) // each)
    return (_problem if free < needed else _warning)(
        text,
        f"{f'start at most {fitting}, ' if fitting else ''}end what else runs here, or ask for "
        "more (batch system: `--mem`, container: `--memory`)",
    )


def check_shm(host: Host) -> Answer:
    """Check /dev/shm, through which data loaders and NCCL pass tensors."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        text = str(error)
    else:
        text = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
        if usage.free >= _SHM_BYTES:
            return _ok(text)
    return _warning(
        f"{text}; DataLoader workers and NCCL pass tensors through it, and die with a bus error "
        "when it is full",
        "in a container: `docker run --shm-size=8g` or `--ipc=host`; "
        "else `mount -o remount,size=8g /dev/shm`",
    )


def check_runtime(host: Host) -> Answer:
    """Check the directory in which every mesh has its ticket, socket and logs."""
    root = runtime_root()
    elsewhere = "`export JUPYTER_RUNTIME_DIR=/tmp/jupyter-$USER` before Jupyter is started"
    made = f"doctor-{os.getpid()}"
    try:
        remove_directory(make_directory(root, made))
    except (HostError, OSError) as error:
        return _problem(str(error), f"mend that, or {elsewhere}")
    free = shutil.disk_usage(root).free
    text = f"{root}, {format_bytes(free)} free"
    if free < _FREE_BYTES:
        answer = _problem if free < _NO_FREE_BYTES else _warning
        return answer(f"{text}; what ranks print is kept there", f"free some space, or {elsewhere}")
    return _ok(text)


def check_trial(host: Host) -> Answer | None:
    """Start a small mesh, run an all_reduce on it, and stop it."""
    if host.probe.torch is None:
        return None
    try:
        # Output of a failing rank must not mix with the report, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return _ok(_try_mesh())
    except (CellmeshError, ImportError, TimeoutError, OSError) as error:
        return _problem(
            f"a mesh of 2 ranks did not work: {type(error).__name__}: {error}",
            "mend what else is found here; if that is nothing, report this with `cellmesh doctor "
            "--json`",
        )


def _try_mesh() -> str:
    from .. import start  # fails if the installation is broken

    # Every option is given, so that those of the project's pyproject.toml do not apply.
    mesh = start(
        2,
        mesh={"dp": 2},
        backend="auto",
        preload=(),
        name=f"doctor-{os.getpid()}",
        timeout_s=_START_S,
    )
    reduce = "_sum = torch.ones(1024, device=device); dist.all_reduce(_sum); _sum = _sum.tolist()"
    try:
        for _ in range(2):  # the first all_reduce connects the ranks
            started_at = time.monotonic()
            mesh.submit_cell(reduce, quiet=True).result(_COLLECTIVE_S)
        took_ms = (time.monotonic() - started_at) * 1e3
        backend = str(mesh[0].pull("dist.get_backend()"))
    finally:
        mesh.stop()
    return (
        f"2 ranks with {backend}: ready in {mesh.start_s:.1f} s, all_reduce in {took_ms:.1f} ms, "
        "and stopped"
    )


CHECKS: Mapping[str, Callable[[Host], Answer | None]] = {
    "torch": check_torch,
    "GPUs": check_gpus,
    "memory": check_memory,
    "/dev/shm": check_shm,
    "runtime directory": check_runtime,
    "a real mesh": check_trial,
}


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def echo_findings(findings: Sequence[Finding]) -> None:
    """Print the findings of `cellmesh doctor`, one a paragraph, and a summary."""
    width = max(len(finding.title) for finding in findings)
    for each in findings:
        click.echo(f"{each.status:<7}  {each.title:<{width}}  {each.text}")
        if each.remedy:
            click.echo(f"{'':<{width + 11}}mend: {each.remedy}")
    found = [each.status for each in findings]
    counts = [plural(found.count(each), each) for each in ("problem", "warning") if each in found]
    click.echo(f"\n{', '.join(counts) or 'all is well'}")


def run_probe(command: Sequence[str] = _PROBE, timeout_s: float = _PROBE_S) -> Probe:
    """Run a separate process that examines torch and NVIDIA's driver, and return its `Probe`.

    Args:
        command: command line of that process.
        timeout_s: time limit, in seconds.
    """
    # Like the agent's start of the zygote: OpenBLAS starts its threads when numpy is imported,
    # unless these variables forbid it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"import torch has not ended after {timeout_s:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Probe)
    except msgspec.MsgspecError:
        code = done.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Probe(error=f"the process that imported torch {how}. {last}".strip())


def print_probe() -> None:
    """Examine torch and NVIDIA's driver in this process, and print the `Probe` as JSON on the last
    line.
    """
    torch, error = None, ""
    try:
        torch = _probe_torch()
    except Exception as exc:  # whatever a broken installation raises is the finding
        error = f"{type(exc).__name__}: {exc}"
    sys.stdout.write(f"\n{msgspec.json.encode(Probe(torch, error, probe_driver())).decode()}")


def _probe_torch() -> Torch:
    """Import torch and examine it, without initializing CUDA."""
    started_at = time.perf_counter()
    import torch
    import torch.distributed as dist

    import_s = time.perf_counter() - started_at
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return Torch(
        version=f"torch {torch.__version__}",
        import_s=import_s,
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=tuple(torch.cuda.nccl.version()) if has_nccl else (),  # type: ignore[no-untyped-call]
        cuda=torch.version.cuda or "",
        # By NVML, as the zygote counts them.
        num_gpus=max(0, torch.cuda._device_count_nvml()) if torch.version.cuda else 0,
    )


def probe_driver() -> Driver:
    """Return the versions and GPUs of NVIDIA's driver, which NVML reports without initializing
    CUDA.
    """
    try:
        import pynvml
    except ImportError:
        return Driver()
    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = [*map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))]
        names = tuple(map(pynvml.nvmlDeviceGetName, gpus))
        version = pynvml.nvmlSystemGetDriverVersion()
        return Driver(version, (cuda // 1000, cuda % 1000 // 10), names)
    except pynvml.NVMLError_LibraryNotFound:
        return Driver()
    except pynvml.NVMLError as error:
        return Driver(error=str(error))


@click.command()
@click.option(
    "-n",
    "--ranks",
    "num_ranks",
    type=click.IntRange(1, MAX_RANKS),
    metavar="N",
    help="How many ranks you mean to run here; by default one a GPU, or one a core.",
)
@click.option(
    "--no-start", is_flag=True, help="Do not start a mesh of 2 ranks to see that it works."
)
@click.option("--json", "wants_json", is_flag=True, help="Write the findings as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    num_ranks: int | None,
    no_start: bool,
    wants_json: bool,
) -> None:
    """Check whether meshes can run on this machine, and show how to fix problems.

    Checks the causes of failed starts: torch and its backends, GPUs, memory and directories; then
    starts a mesh of 2 ranks.
    Nothing is changed, except that remaining processes of a mesh whose agent was killed are ended.
    The exit code is 1 if there is a problem, else 0; a warning is no problem.

    \b
    Examples:
      cellmesh doctor
      cellmesh doctor -n 64           is there enough for 64 ranks?
      cellmesh doctor --json --no-start
    """
    end_dead_meshes(runtime_root())
    findings = [*examine(num_ranks, not no_start)]
    if wants_json:
        click.echo(as_json({"version": __version__, "findings": findings}))
    else:
        echo_findings(findings)
    if any(finding.status == "problem" for finding in findings):
        ctx.exit(1)
