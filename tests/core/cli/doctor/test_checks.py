"""The checks of ``cellmesh doctor`` on made-up machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellmesh.cli.doctor.checks import Finding, examine
from cellmesh.cli.doctor.facts import Facts, Trial, find_jupyter, find_missing_widgets
from cellmesh.cli.doctor.probe import Driver, HostProbe, Torch

GB = 10**9

HEALTHY = Facts(
    num_ranks=4,
    probe=HostProbe(
        torch=Torch(
            version="2.13.0+cpu",
            import_s=0.9,
            num_threads=1,
            has_gloo=True,
            nccl=(),
            cuda="",
            num_gpus=0,
            initialized_cuda=False,
        ),
        error="",
        driver=Driver(),
    ),
    python="3.11.7",
    executable="/env/bin/python",
    unmet={},
    missing_calls={},
    num_cores=8,
    num_usable_cores=8,
    quota_cores=None,
    omp_num_threads=0,
    available_bytes=16 * GB,
    total_bytes=32 * GB,
    shm_bytes=16 * GB,
    shm_free_bytes=16 * GB,
    shm_error="",
    open_files=1024,
    tasks=None,
    runtime_path="/home/ada/.local/share/jupyter/runtime/cellmesh",
    runtime_filesystem="ext4",
    runtime_free_bytes=50 * GB,
    runtime_error="",
    tmp_path="/tmp",
    tmp_free_bytes=50 * GB,
    loopback_error="",
    jupyter="/env",
    trial=Trial(num_ranks=2, backend="gloo", start_s=1.2, collective_s=0.003, stop_s=0.1),
)


def change(facts: Any, path: str, value: Any) -> Any:
    """A copy with another value at ``probe.torch.version``."""
    name, _, rest = path.partition(".")
    inner = change(getattr(facts, name), rest, value) if rest else value
    return msgspec.structs.replace(facts, **{name: inner})


def with_gpus(
    in_machine: int = 2,
    *,
    exclusive: bool = False,
    driver_cuda: tuple[int, int] = (13, 0),
    **torch: Any,
) -> Facts:
    """The healthy machine with GPUs."""
    driver = Driver("580.65", driver_cuda, ("NVIDIA H100",) * in_machine, exclusive)
    facts = change(HEALTHY, "probe.driver", driver)
    given = {"cuda": "13.0", "nccl": (2, 28, 9), "num_gpus": in_machine, **torch}
    return change(facts, "probe.torch", msgspec.structs.replace(HEALTHY.probe.torch, **given))


def finding(facts: Facts, title: str) -> Finding:
    [found] = [each for each in examine(facts) if each.title == title]
    return found


def test_a_healthy_machine_has_nothing_but_ok() -> None:
    findings = examine(HEALTHY)
    assert {each.status for each in findings} == {"ok"}
    assert [each.remedy for each in findings] == [""] * len(findings)


def test_a_healthy_machine_with_gpus_has_nothing_but_ok() -> None:
    facts = with_gpus(4)
    assert {each.status for each in examine(facts)} == {"ok"}
    assert "NVIDIA H100" in finding(facts, "GPUs").text
    assert "NCCL 2.28.9, for up to 4 ranks" in finding(facts, "GPUs").text


CASES: list[tuple[str, Any, str, str, str, str]] = [
    # path, value, title, status, in the text, in the remedy
    ("unmet", {"torch>=2.11": "not installed"}, "packages", "problem", "not inst", "'torch>=2.11'"),
    ("probe.torch", None, "torch", "problem", "libcudart", "/env/bin/python -c 'import torch'"),
    ("probe.torch.import_s", 40.0, "torch", "warning", "imported in 40.0 s", "local disk"),
    ("probe.torch.has_gloo", False, "torch", "problem", "without gloo", "official"),
    ("probe.torch.num_threads", 5, "forking ranks", "warning", "5 threads", "update"),
    ("probe.torch.initialized_cuda", True, "forking ranks", "problem", "no forked", "sitecustom"),
    ("missing_calls", {"pidfd_open": "refused"}, "system calls", "problem", "watched", "seccomp"),
    ("missing_calls", {"memfd_create": "no"}, "system calls", "warning", "copies", "Linux 5.3"),
    ("omp_num_threads", 4, "cores", "warning", "16 threads", "unset OMP_NUM_THREADS"),
    ("num_usable_cores", 2, "cores", "warning", "2 of them for us (CPU affinity)", "at most 2"),
    ("quota_cores", 1.5, "cores", "warning", "quota grants the time of 1.5", "at most 1"),
    ("available_bytes", 280_000_000, "memory", "problem", "280 MB of 32.0 GB", "at most 2,"),
    ("available_bytes", 100_000_000, "memory", "problem", "take about 310 MB", "end what else"),
    ("available_bytes", 500_000_000, "memory", "warning", "500 MB", "--mem"),
    ("shm_free_bytes", 64_000_000, "/dev/shm", "warning", "64 MB of 16.0 GB", "--shm-size"),
    ("shm_error", "Read-only", "/dev/shm", "warning", "cannot be written: Read-only", "remount"),
    ("open_files", 100, "open files", "problem", "3 ranks, and 4 are wanted", "`ulimit -n 4096`"),
    ("tasks", 30, "processes", "problem", "need about 60", "--pids-limit"),
    ("runtime_error", "No space", "runtime directory", "problem", "No space", "JUPYTER_RUNTIME"),
    ("runtime_free_bytes", 10**6, "runtime directory", "problem", "1 MB free", "free some space"),
    ("runtime_free_bytes", 10**8, "runtime directory", "warning", "100 MB free", "free some space"),
    ("runtime_filesystem", "nfs4", "runtime directory", "warning", "nfs4", "JUPYTER_RUNTIME_DIR"),
    ("tmp_free_bytes", 10**6, "temporary files", "warning", "1 MB free", "export TMPDIR"),
    ("tmp_path", "", "temporary files", "problem", "can be written", "export TMPDIR"),
    ("loopback_error", "unreachable", "loopback", "problem", "unreachable", "ip link set lo up"),
    ("trial.error", "HostError: no", "a real mesh", "problem", "HostError: no", "doctor --json"),
]


@pytest.mark.parametrize(
    ("path", "value", "title", "status", "text", "remedy"),
    CASES,
    ids=[f"{c[0]}-{c[3]}" for c in CASES],
)
def test_one_thing_wrong_gives_one_finding(
    path: str, value: Any, title: str, status: str, text: str, remedy: str
) -> None:
    facts = change(change(HEALTHY, "probe.error", "ImportError: libcudart"), path, value)
    found = finding(facts, title)
    assert (found.status, text in found.text, remedy in found.remedy) == (status, True, True), found
    assert [each.title for each in examine(facts) if each.status != "ok"] == [title]


@pytest.mark.parametrize(
    ("facts", "status", "text", "remedy"),
    [
        (change(HEALTHY, "probe.driver", Driver(error="bad")), "warning", "bad", "restart"),
        (with_gpus(cuda="", num_gpus=0, nccl=()), "warning", "without CUDA", "CUDA build"),
        (with_gpus(driver_cuda=(12, 8)), "problem", "built for CUDA 13.0", "CUDA 12"),
        (with_gpus(num_gpus=0), "warning", "hides all", "unset CUDA_VISIBLE_DEVICES"),
        (with_gpus(exclusive=True), "problem", "4 ranks do not fit on 2", "start"),
        (with_gpus(nccl=()), "warning", "without NCCL", "official CUDA build"),
    ],
    ids=["broken driver", "CPU build", "old driver", "hidden", "exclusive", "no NCCL"],
)
def test_gpu_check_names_what_keeps_torch_from_gpus(
    facts: Facts, status: str, text: str, remedy: str
) -> None:
    found = finding(facts, "GPUs")
    assert (found.status, text in found.text, remedy in found.remedy) == (status, True, True), found


def test_an_older_minor_cuda_of_the_driver_will_do() -> None:
    assert finding(with_gpus(driver_cuda=(13, 0), cuda="13.1"), "GPUs").status == "ok"


def test_exclusive_gpus_take_one_rank_each() -> None:
    assert finding(with_gpus(4, exclusive=True), "GPUs").status == "ok"


def test_ranks_on_gpus_take_more_memory() -> None:
    facts = change(with_gpus(4), "available_bytes", 2 * GB)
    assert finding(facts, "memory").status == "problem"
    assert finding(change(HEALTHY, "available_bytes", 2 * GB), "memory").status == "ok"


def test_without_a_trial_there_is_no_finding_of_one() -> None:
    assert "a real mesh" not in {each.title for each in examine(change(HEALTHY, "trial", None))}


def test_a_jupyter_without_a_widget_manager_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = tmp_path / "share" / "jupyter" / "labextensions"
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("jupyter_core.paths.SYSTEM_JUPYTER_PATH", [])
    assert find_jupyter({}, str(tmp_path)) == ""
    extensions.mkdir(parents=True)
    jupyter = find_jupyter({}, str(tmp_path))
    assert jupyter == str(tmp_path)
    assert find_missing_widgets(jupyter) == ("ipywidgets", "anywidget")
    (extensions / "@jupyter-widgets" / "jupyterlab-manager").mkdir(parents=True)
    assert find_missing_widgets(jupyter) == ("anywidget",)
    found = finding(
        msgspec.structs.replace(HEALTHY, jupyter=jupyter, missing_widgets=("anywidget",)), "widgets"
    )
    assert (found.status, found.remedy) == (
        "warning",
        f"`{jupyter}/bin/python -m pip install anywidget`, then reload the page",
    )
    (extensions / "anywidget").mkdir()
    assert find_missing_widgets(jupyter) == ()
    alone = msgspec.structs.replace(HEALTHY, jupyter="")
    assert "widgets" not in [each.title for each in examine(alone)]


def test_the_jupyter_is_the_one_that_began_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "share" / "jupyter").mkdir(parents=True)
    program = str(tmp_path / "bin" / "python")
    with subprocess.Popen(
        [program, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE
    ) as server:
        own = {"JPY_PARENT_PID": str(server.pid)}
        assert find_jupyter(own, "/nowhere") == str(tmp_path)
        server.communicate(b"\n")
    assert find_jupyter(own, "/nowhere") == ""
