"""Which file system a path is on."""

from __future__ import annotations

import pytest

from cellmesh.cli.filesystems import filesystem_of, find_mount

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:30 / /home rw shared:2 master:1 - nfs4 server:/home rw
24 22 0:31 / /home/with\\040space rw - lustre pool rw
25 22 0:32 / /mnt rw - ext4 /dev/sdb rw
26 22 0:33 / /mnt rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes", "ext4"),
        ("/home", "nfs4"),
        ("/home/a/b", "nfs4"),
        ("/home/with space/c", "lustre"),
        ("/mnt/x", "overlay"),  # the later of two hides the other
    ],
)
def test_path_is_on_the_last_mount_above_it(path: str, kind: str) -> None:
    assert find_mount(path, MOUNTS) == kind


def test_file_system_of_this_host() -> None:
    assert filesystem_of("/proc/self") == "proc"
