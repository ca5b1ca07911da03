"""Functions that are called after the import of a module."""

from __future__ import annotations

import importlib
import sys

import pytest

from cellmesh.workers.rank.imports import AfterImport


def test_a_finder_of_the_old_kind_does_not_break_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    AfterImport({"colorsys": lambda module: loaded.append(module.__name__)}).install()
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    importlib.import_module("colorsys")
    assert loaded == ["colorsys"]
