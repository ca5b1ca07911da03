"""What is read of requirements and of the runtime directory."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from cellmesh.cli.doctor import facts


def test_requirements_that_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=999", "no-such-package-here>=1", "msgspec>=0.1", 'nothing; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: required)
    unmet = facts._find_unmet()
    assert list(unmet) == ["torch>=999", "no-such-package-here>=1"]
    assert unmet["torch>=999"] == f"{importlib.metadata.version('torch')} is installed"
    assert unmet["no-such-package-here>=1"] == "not installed"


def test_runtime_directory_is_tried_as_a_start_does(tmp_path: Path) -> None:
    root = tmp_path / "cellmesh"
    assert facts._why_fails(lambda: facts._try_runtime(root)) == ""
    assert list(root.iterdir()) == []
    os.chmod(root, 0o755)
    assert f"chmod 700 {root}" in facts._why_fails(lambda: facts._try_runtime(root))
    long = tmp_path / ("x" * 100)
    assert "too long" in facts._why_fails(lambda: facts._try_runtime(long))
