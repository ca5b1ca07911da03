from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cellmesh.controller.options import Options
from cellmesh.controller.session.launch.local import describe_full_disk, make_ticket
from cellmesh.wire.ticket import remove_directory


@pytest.mark.parametrize(("num_pages", "is_full"), [(0, True), (1, True), (1 << 20, False)])
def test_a_start_that_leaves_no_log_says_that_the_disk_is_full(
    num_pages: int, is_full: bool, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = make_ticket(Options(num_ranks=1, mesh={"dp": 1}))
    remove_directory(Path(ticket.directory))  # as its guardian does
    disk = SimpleNamespace(f_bavail=num_pages, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", {runtime_dir / "cellmesh": disk}.__getitem__)
    text = describe_full_disk(ticket)
    assert is_full == (f"{4 * num_pages} kB are left: free some space" in text)
    assert is_full == bool(text)
