"""The checks of ``cellmesh doctor`` on made-up machines, and how tickets and control groups are
read.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from cellmesh.cli.doctor import torch_checks
from cellmesh.cli.doctor.doctor import examine
from cellmesh.cli.doctor.facts import (
    Facts,
    Hardware,
    Limits,
    Meshes,
    Network,
    RuntimeDirectory,
    System,
    Trial,
)
from cellmesh.cli.doctor.findings import (
    Finding,
    format_bytes,
    format_seconds,
    parse_version,
    plural,
)
from cellmesh.cli.doctor.host_checks import unknown_interfaces
from cellmesh.cli.doctor.probe import Driver, Gpu, Probe, Torch, probe_driver
from cellmesh.cli.doctor.torch_checks import is_same_python
from cellmesh.cli.meshes import classify
from cellmesh.cli.rendering import echo_findings
from cellmesh.wire.cgroups import Quota, read_quota
from cellmesh.wire.ticket import Ticket

GB = 10**9
H100 = Gpu("NVIDIA H100", 80 * GB, 79 * GB)

HEALTHY = Facts(
    num_ranks=4,
    system=System(
        name="Linux",
        release="6.1.0-18-amd64",
        python=(3, 11, 7),
        executable="/env/bin/python",
        packages={
            "torch": "2.13.0+cpu",
            "pyzmq": "27.0",
            "ipykernel": "7.4.0",
            "ipython": "9.18.1",
            "msgspec": "0.18.6",
        },
        missing_calls={},
    ),
    probe=Probe(
        torch=Torch(
            version="2.13.0+cpu",
            import_s=0.9,
            num_threads=1,
            has_distributed=True,
            has_gloo=True,
            has_nccl=False,
            nccl=(),
            cuda="",
            num_gpus=0,
            initialized_cuda=False,
        ),
        error="",
        driver=Driver(),
    ),
    hardware=Hardware(
        num_cores=8,
        num_usable_cores=8,
        quota_cores=None,
        available_bytes=16 * GB,
        total_bytes=32 * GB,
        shm_bytes=16 * GB,
        shm_free_bytes=16 * GB,
        shm_error="",
        omp_num_threads=0,
    ),
    limits=Limits(open_files=1024, open_files_hard=1048576, tasks=None, address_space_bytes=None),
    runtime=RuntimeDirectory(
        path="/home/ada/.local/share/jupyter/runtime/cellmesh",
        exists=True,
        owned=True,
        mode=0o700,
        filesystem="ext4",
        free_bytes=50 * GB,
        error="",
        socket_bytes=70,
    ),
    network=Network(
        loopback_error="",
        hostname="box",
        addresses=("192.0.2.7",),
        hostname_error="",
        hostname_s=0.001,
        interfaces=("lo", "eth0"),
        chosen={},
    ),
    kernels={"python3": "/env/bin/python"},
    meshes=Meshes(running=("train",), stale=(), strange={}),
    trial=Trial(num_ranks=2, backend="gloo", start_s=1.2, collective_s=0.003, stop_s=0.1),
)


def change(facts: Any, path: str, value: Any) -> Any:
    """A copy with another value at ``probe.torch.version``."""
    name, _, rest = path.partition(".")
    inner = change(getattr(facts, name), rest, value) if rest else value
    return msgspec.structs.replace(facts, **{name: inner})


def with_gpus(
    in_machine: int = 2, *, gpu: Gpu = H100, driver_cuda: tuple[int, int] = (13, 0), **torch: Any
) -> Facts:
    """The healthy machine with GPUs."""
    facts = change(HEALTHY, "probe.driver", Driver("580.65", driver_cuda, (gpu,) * in_machine))
    told = {"cuda": "13.0", "has_nccl": True, "nccl": (2, 28, 9), "num_gpus": in_machine, **torch}
    return change(facts, "probe.torch", msgspec.structs.replace(HEALTHY.probe.torch, **told))


def finding(facts: Facts, title: str) -> Finding:
    [found] = [each for each in examine(facts) if each.title == title]
    return found


def test_a_healthy_machine_has_nothing_but_ok() -> None:
    findings = examine(HEALTHY)
    assert {each.status for each in findings} == {"ok"}
    assert [each.remedy for each in findings] == [""] * len(findings)
    assert len({each.title for each in findings}) == len(findings)


def test_a_healthy_machine_with_gpus_has_nothing_but_ok() -> None:
    facts = with_gpus(4)
    assert {each.status for each in examine(facts)} == {"ok"}
    assert "NVIDIA H100" in finding(facts, "GPUs").text
    assert "2.28.9: for up to 4 ranks" in finding(facts, "NCCL").text
    assert finding(facts, "torch.distributed").text == "with gloo and NCCL"


CASES: list[tuple[str, Any, str, str, str, str]] = [
    # path, value, title, status, in the text, in the remedy
    ("system.name", "Darwin", "system", "problem", "Linux only", "virtual machine"),
    ("system.python", (3, 10, 4), "Python", "problem", "3.10.4", "Python 3.11 or newer"),
    ("system.packages", {}, "packages", "problem", "torch is not installed", "'torch>=2.11'"),
    ("probe.torch", None, "torch", "problem", "libcudart", "/env/bin/python -c 'import torch'"),
    ("probe.torch.import_s", 40.0, "torch", "warning", "imported in 40.0 s", "local disk"),
    ("probe.torch.num_threads", 5, "forking ranks", "warning", "5 threads", "update"),
    (
        "probe.torch.initialized_cuda",
        True,
        "forking ranks",
        "problem",
        "no forked rank",
        "sitecustomize",
    ),
    (
        "probe.torch.has_distributed",
        False,
        "torch.distributed",
        "problem",
        "without torch.dist",
        "official",
    ),
    ("probe.torch.has_gloo", False, "torch.distributed", "problem", "without gloo", "official"),
    (
        "kernels",
        {"python3": "/usr/bin/python3"},
        "notebook kernel",
        "warning",
        "/usr/bin/python3",
        "ipykernel",
    ),
    (
        "kernels",
        {},
        "notebook kernel",
        "warning",
        "none at all",
        "/env/bin/python -m ipykernel install",
    ),
    ("hardware.omp_num_threads", 4, "cores", "warning", "16 threads", "unset OMP_NUM_THREADS"),
    (
        "hardware.num_usable_cores",
        2,
        "cores",
        "warning",
        "2 of them for us (CPU affinity)",
        "at most 2",
    ),
    ("hardware.quota_cores", 1.5, "cores", "warning", "quota grants the time of 1.5", "at most 1"),
    (
        "hardware.available_bytes",
        280_000_000,
        "memory",
        "problem",
        "280 MB of 32.0 GB",
        "at most 2,",
    ),
    (
        "hardware.available_bytes",
        100_000_000,
        "memory",
        "problem",
        "take about 310 MB",
        "end what else",
    ),
    ("hardware.available_bytes", 500_000_000, "memory", "warning", "500 MB", "--mem"),
    (
        "hardware.shm_free_bytes",
        64_000_000,
        "/dev/shm",
        "warning",
        "64 MB of 16.0 GB",
        "--shm-size",
    ),
    (
        "hardware.shm_error",
        "Read-only",
        "/dev/shm",
        "warning",
        "cannot be written: Read-only",
        "remount",
    ),
    (
        "limits.open_files",
        100,
        "open files",
        "problem",
        "about 3 ranks, and 4 are wanted",
        "`ulimit -n 4096`",
    ),
    ("limits.tasks", 30, "processes", "problem", "need about 60", "--pids-limit"),
    (
        "limits.address_space_bytes",
        2 * GB,
        "address space",
        "problem",
        "2.0 GB",
        "ulimit -v unlimited",
    ),
    (
        "limits.address_space_bytes",
        64 * GB,
        "address space",
        "warning",
        "64.0 GB",
        "ulimit -v unlimited",
    ),
    ("runtime.mode", 0o755, "runtime directory", "problem", "mode 0755", "chmod 700 /home/ada"),
    (
        "runtime.owned",
        False,
        "runtime directory",
        "problem",
        "another owner",
        "JUPYTER_RUNTIME_DIR",
    ),
    (
        "runtime.error",
        "No space left",
        "runtime directory",
        "problem",
        "No space",
        "JUPYTER_RUNTIME_DIR",
    ),
    (
        "runtime.socket_bytes",
        108,
        "runtime directory",
        "problem",
        "at most 107",
        "JUPYTER_RUNTIME_DIR",
    ),
    ("runtime.free_bytes", 10**6, "runtime directory", "problem", "1 MB free", "free some space"),
    ("runtime.free_bytes", 10**8, "runtime directory", "warning", "100 MB free", "free some space"),
    ("runtime.filesystem", "nfs4", "runtime directory", "warning", "nfs4", "JUPYTER_RUNTIME_DIR"),
    (
        "network.loopback_error",
        "unreachable",
        "loopback",
        "problem",
        "unreachable",
        "ip link set lo up",
    ),
    (
        "network.hostname_error",
        "cannot bind",
        "host name",
        "warning",
        "not this host's",
        "/etc/hosts",
    ),
    ("network.hostname_s", 5.0, "host name", "warning", "5.0 s to resolve", "127.0.1.1 box"),
    (
        "network.chosen",
        {"GLOO_SOCKET_IFNAME": "ib0"},
        "interfaces",
        "problem",
        "interface ib0",
        "unset GLOO",
    ),
    (
        "network.chosen",
        {"GLOO_SOCKET_IFNAME": "eth0"},
        "interfaces",
        "ok",
        "GLOO_SOCKET_IFNAME=eth0",
        "",
    ),
    ("meshes.stale", ("old",), "meshes", "warning", "old", "cellmesh ps"),
    ("meshes.strange", {"/r/x": "no ticket"}, "meshes", "warning", "no ticket", "rm -r /r/x"),
    ("trial.error", "HostError: no", "a real mesh", "problem", "HostError: no", "doctor --json"),
    (
        "trial.leftovers",
        ("process 7",),
        "a real mesh",
        "problem",
        "process 7",
        "cellmesh stop --all",
    ),
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
    assert [
        each.title for each in examine(facts) if each.status != "ok" and each.title != title
    ] == []
    assert bool(found.remedy) == (found.status != "ok")


GPU_CASES: list[tuple[str, Facts, str, str, str]] = [
    (
        "broken driver",
        change(HEALTHY, "probe.driver", Driver(error="mismatch")),
        "warning",
        "mismatch",
        "restart",
    ),
    (
        "CPU build",
        with_gpus(cuda="", num_gpus=0, has_nccl=False),
        "warning",
        "without CUDA",
        "CUDA build",
    ),
    ("old driver", with_gpus(driver_cuda=(12, 8)), "problem", "built for CUDA 13.0", "CUDA 12"),
    ("hidden", with_gpus(2, num_gpus=0), "warning", "hides all", "unset CUDA_VISIBLE_DEVICES"),
    (
        "exclusive",
        with_gpus(gpu=Gpu("A100", GB, GB, exclusive=True)),
        "problem",
        "4 ranks do not fit on 2",
        "start 2",
    ),
    (
        "full",
        with_gpus(gpu=Gpu("A100", 40 * GB, GB)),
        "warning",
        "GPU 0: 1.0 GB of 40.0 GB free",
        "nvidia-smi",
    ),
]


@pytest.mark.parametrize(
    ("facts", "status", "text", "remedy"), [c[1:] for c in GPU_CASES], ids=[c[0] for c in GPU_CASES]
)
def test_what_keeps_torch_from_gpus(facts: Facts, status: str, text: str, remedy: str) -> None:
    found = finding(facts, "GPUs")
    assert (found.status, text in found.text, remedy in found.remedy) == (status, True, True), found


def test_an_older_minor_cuda_of_the_driver_will_do() -> None:
    assert finding(with_gpus(driver_cuda=(13, 0), cuda="13.1"), "GPUs").status == "ok"


def test_exclusive_gpus_take_one_rank_each() -> None:
    facts = with_gpus(4, gpu=Gpu("A100", GB, GB, exclusive=True))
    assert finding(facts, "GPUs").status == "ok"


def test_torch_without_nccl_on_gpus() -> None:
    assert finding(with_gpus(has_nccl=False, nccl=()), "NCCL").status == "warning"


def test_ranks_on_gpus_take_more_memory() -> None:
    facts = change(with_gpus(4), "hardware.available_bytes", 2 * GB)
    assert finding(facts, "memory").status == "problem"
    assert finding(change(HEALTHY, "hardware.available_bytes", 2 * GB), "memory").status == "ok"


@pytest.mark.parametrize(
    ("missing", "release", "status", "remedy"),
    [
        (
            {"pidfd_open": "Function not implemented"},
            "4.18.0-553.el8",
            "problem",
            "Linux 5.3 or newer",
        ),
        ({"pidfd_open": "Operation not permitted"}, "6.1.0", "problem", "seccomp"),
        ({"memfd_create": "Operation not permitted"}, "6.1.0", "warning", "seccomp"),
    ],
)
def test_missing_system_calls(
    missing: dict[str, str], release: str, status: str, remedy: str
) -> None:
    facts = change(change(HEALTHY, "system.missing_calls", missing), "system.release", release)
    found = finding(facts, "system calls")
    assert (found.status, remedy in found.remedy) == (status, True), found


def test_open_files_that_only_the_administrator_can_raise() -> None:
    facts = change(HEALTHY, "limits", Limits(64, 256, None, None))
    assert "limits.conf" in finding(facts, "open files").remedy


def test_a_directory_that_is_not_there_yet_is_judged_by_where_it_would_be_made() -> None:
    runtime = msgspec.structs.replace(HEALTHY.runtime, exists=False, owned=False, mode=0o1777)
    assert finding(change(HEALTHY, "runtime", runtime), "runtime directory").status == "ok"


def test_a_name_that_does_not_resolve() -> None:
    network = msgspec.structs.replace(HEALTHY.network, addresses=(), hostname_error="Name unknown")
    found = finding(change(HEALTHY, "network", network), "host name")
    assert found.status == "warning"
    assert found.text.startswith("box does not resolve (Name unknown)")


def test_without_a_trial_nothing_is_said_of_one() -> None:
    assert "a real mesh" not in {each.title for each in examine(change(HEALTHY, "trial", None))}


def test_what_torch_cannot_tell_is_not_judged() -> None:
    titles = {each.title for each in examine(change(HEALTHY, "probe.torch", None))}
    assert "torch" in titles
    assert titles.isdisjoint({"forking ranks", "torch.distributed", "NCCL"})


def test_minimums_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    required = dict(item.split(">=") for item in project["dependencies"])
    wanted = {name: parse_version(required[name]) for name in torch_checks.MINIMUMS}
    assert dict(torch_checks.MINIMUMS) == wanted
    assert (
        parse_version(project["requires-python"].removeprefix(">=")) == torch_checks.MINIMUM_PYTHON
    )


@pytest.mark.parametrize(
    ("value", "unknown"),
    [
        ("eth", []),
        ("eth0,ib", ["ib"]),
        ("=eth", ["eth"]),
        ("=eth0:1", []),
        ("^docker", []),
    ],
)
def test_ncclls_way_to_name_interfaces(value: str, unknown: list[str]) -> None:
    assert unknown_interfaces("NCCL_SOCKET_IFNAME", value, ("lo", "eth0")) == unknown


def test_gloo_wants_exact_names() -> None:
    assert unknown_interfaces("GLOO_SOCKET_IFNAME", "eth,lo", ("lo", "eth0")) == ["eth"]


@pytest.mark.parametrize(
    ("command", "same"),
    [
        ("python3", True),
        ("python3.11", True),
        ("/env/bin/python", True),
        ("/usr/bin/python3", False),
        ("julia", False),
        ("", False),
    ],
)
def test_which_kernels_start_this_python(command: str, same: bool) -> None:
    assert is_same_python(command, "/env/bin/python3.11") is same


# ---- reading


def test_no_driver_where_there_is_no_library() -> None:
    assert probe_driver("libno-such-library.so.1") == Driver()


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "self": "0::/job/step\n",
            "fs/cpu.max": "max 100000\n",
            "fs/job/cpu.max": "400000 100000\n",
            "fs/job/step/cpu.max": "max 100000\n",
            "fs/job/memory.max": "4000\n",
            "fs/job/memory.current": "3000\n",
            "fs/job/memory.stat": "anon 2000\ninactive_file 500\n",
            "fs/job/step/memory.max": "max\n",
            "fs/job/step/memory.current": "100\n",
            "fs/job/step/pids.max": "50\n",
            "fs/job/step/pids.current": "20\n",
        },
    )
    assert read_quota(tmp_path / "fs", tmp_path / "self") == Quota(4.0, 4000, 1500, 30)


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            # The path is that of the host: in the container only the top is to be seen.
            "self": "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00\n2:pids:/docker/f00\n0::/\n",
            "fs/memory/memory.limit_in_bytes": "8000",
            "fs/memory/memory.usage_in_bytes": "9000",
            "fs/memory/memory.stat": "cache 1\ntotal_inactive_file 100\n",
            "fs/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "fs/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "fs/pids/pids.max": "max",
            "fs/pids/pids.current": "3",
        },
    )
    assert read_quota(tmp_path / "fs", tmp_path / "self") == Quota(1.5, 8000, 0, None)


def test_no_limits_of_control_groups(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "self": "1:memory,cpu:/\n",
            "fs/memory,cpu/cpu.cfs_quota_us": "-1",
            "fs/memory,cpu/cpu.cfs_period_us": "100000",
            "fs/memory,cpu/memory.limit_in_bytes": "9223372036854771712",
            "fs/memory,cpu/memory.usage_in_bytes": "1",
        },
    )
    assert read_quota(tmp_path / "fs", tmp_path / "self") == Quota()
    assert read_quota(tmp_path / "nowhere", tmp_path / "nothing") == Quota()


def ticket(agent_pid: int) -> Ticket:
    return Ticket(
        name="train",
        key="00",
        directory="/run/cellmesh/train",
        num_ranks=2,
        backend="auto",
        mesh_dim_names=("dp",),
        mesh_shape=(2,),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=1,
        created_at=0.0,
        agent_pid=agent_pid,
    )


@pytest.mark.parametrize(
    ("agent_pid", "pids", "age_s", "state"),
    [
        (70, [70, 71], 3600.0, "running"),
        (70, [71], 3600.0, "leftover"),
        (70, [], 1.0, "stale"),
        (0, [], 1.0, "starting"),
        (0, [70], 90.0, "starting"),
        (0, [], 61.0, "stale"),
    ],
)
def test_a_meshs_state_by_what_is_seen_of_it(
    agent_pid: int, pids: list[int], age_s: float, state: str
) -> None:
    assert classify(ticket(agent_pid), pids, age_s) == state


# ---- writing


def test_findings_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    echo_findings(
        [
            Finding("memory", "ok", "16 GB"),
            Finding("/dev/shm", "warning", "64 MB", "`--shm-size=8g`"),
            Finding("loopback", "problem", "down", "`ip link set lo up`"),
        ]
    )
    assert capsys.readouterr().out == (
        "ok       memory    16 GB\n"
        "warning  /dev/shm  64 MB\n"
        "                   mend: `--shm-size=8g`\n"
        "problem  loopback  down\n"
        "                   mend: `ip link set lo up`\n"
        "\n"
        "1 problem, 1 warning\n"
    )


def test_findings_on_a_terminal_are_wrapped_and_coloured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    with click.Context(click.Command("doctor"), color=True):
        echo_findings([Finding("memory", "ok", "word " * 20)])
    out = capsys.readouterr().out
    assert "\x1b[32mok     \x1b[0m" in out
    plain = re.sub(r"\x1b\[\d+m", "", out).splitlines()
    assert max(map(len, plain)) <= 50
    assert plain[1].startswith(" " * 17 + "word")
    assert plain[-1] == "all is well"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (64e6, "64 MB"), (1.5e9, "1.5 GB"), (2e12, "2.0 TB")],
)
def test_bytes_as_people_read_them(number: float, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0125, "12.5 ms"),
        (1.25, "1.2 s"),
        (40, "40 s"),
        (119, "119 s"),
        (300, "5 min"),
        (7200, "2 h"),
        (2e5, "2 days"),
    ],
)
def test_seconds_as_people_read_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plurals() -> None:
    assert [plural(1, "rank"), plural(2, "rank"), plural(0, "process")] == [
        "1 rank",
        "2 ranks",
        "0 processes",
    ]
