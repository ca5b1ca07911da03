"""The sentence on modules that a zygote has imported, and the clock of imports on ranks."""

from __future__ import annotations

from types import FunctionType

import pytest

from cellmesh.workers.preload import Preloaded, timed


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
