"""The sentence on modules that a zygote has imported, and the clock of imports on ranks."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

import pytest

from cellmesh.wire.preload import change_preloads, learn
from cellmesh.workers.preload import Loading, Preloaded, timed


def test_the_sentence_on_preloaded_modules() -> None:
    assert Preloaded().describe() == ""
    names = (
        "torch._dynamo",
        "cellmesh.workers.warm_up",
        "yaml",
        "transformers.trainer",
        "transformers",
    )
    assert Preloaded(names, 90 << 20, 2.5).describe() == (
        "imported before the fork: parts of torch and modules that this project's ranks import, of "
        "yaml, transformers, in 2.5 s and 90 MB, once for all ranks"
    )
    assert Preloaded(("yaml",)).describe().startswith("imported before the fork: modules that")


def test_a_failed_import_is_not_reported() -> None:
    ends: list[tuple[str, bool]] = []

    def plain(name: str, import_: object) -> object:
        if name == "bad":
            raise ImportError(name)
        return name

    assert isinstance(plain, FunctionType)
    find = timed(
        plain, lambda name: None, lambda name, begun, is_whole: ends.append((name, is_whole))
    )
    assert find("good", None) == "good"
    with pytest.raises(ImportError):
        find("bad", None)
    assert ends == [("good", True), ("bad", False)]


def test_a_module_that_took_ranks_long_has_longer_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    change_preloads(path, lambda found: learn(found, "project", {"slow_library": 20.0}))
    assert Loading([["slow_library"]], str(path), "argument", hangs_s=10.0).hangs_s == 60.0
    assert Loading([["slow_library"]], str(path), "argument", hangs_s=90.0).hangs_s == 90.0
