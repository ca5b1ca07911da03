"""The sentence on modules that a zygote has imported, and the clock of imports on ranks."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

import pytest

from cellmesh.wire.preload import Preloads, change_preloads, learn, quick_to_import
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


def test_a_start_waits_for_the_quick_packages_of_a_project(tmp_path: Path) -> None:
    took_s = {"quick": 1.0, "torch.part": 9.0, "slow": 20.0, "slow.part": 0.1, "also": 1.9}
    project = Preloads(project=str(tmp_path), modules=took_s)
    names = (*took_s, "quick.part")
    assert quick_to_import(project, names) == ("quick", "torch.part", "also", "quick.part")


def test_a_start_waits_for_all_that_its_script_has_imported(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    own = Preloads(project=str(script), modules={"slow": 20.0})
    assert quick_to_import(own, ["slow"]) == ("slow",)
