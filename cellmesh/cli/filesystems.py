"""Finds the file system that a path is on, and whether other hosts may have the same one."""

from __future__ import annotations

import os

# Two hosts may both have mounted one of these; what is on any other, only this machine sees.
SHARED_FILESYSTEMS = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.sshfs",
        "gfs2",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "panfs",
        "smb3",
        "virtiofs",
        "wekafs",
    )
)


def filesystem_of(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that a path is on (``ext4``, ``tmpfs``, ``nfs4``); "" if
    it is not known.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return find_mount(os.path.realpath(path), file.read())
    except OSError:
        return ""


def find_mount(path: str, mountinfo: str) -> str:
    """Return the type of the last mount that a path is below; "" if there is none.

    Args:
        path: absolute, without symbolic links.
        mountinfo: the text of ``/proc/PID/mountinfo``.
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        words = line.split(" ")
        point = words[4].replace("\\040", " ")
        if len(point) >= len(best) and f"{path}/".startswith(f"{point.rstrip('/')}/"):
            best, kind = point, words[words.index("-") + 1]
    return kind
