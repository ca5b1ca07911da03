"""What control groups of both versions allow."""

from __future__ import annotations

from pathlib import Path

from cellmesh.wire.limits import Quota, read_quota


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
