"""The help for what a rank has, asked for while its main thread runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.oinspect import Inspector
from torch import nn

from cellmesh.wire.looks import Explain
from cellmesh.workers.looking.explaining import explain


class Own:
    """What somebody wrote."""

    num_texts = 0

    def __repr__(self) -> str:
        Own.num_texts += 1
        return "own"


class OwnModule(nn.Module):
    """A module with a text of its own."""

    __repr__ = Own.__repr__  # type: ignore[assignment]


def freed() -> torch.Tensor:
    value = torch.ones(1 << 20)
    value.untyped_storage().resize_(0)
    return value


@pytest.mark.parametrize("detail", [0, 1])
def test_help_runs_no_repr_and_reads_no_elements(detail: int) -> None:
    names = {"own": Own(), "freed": freed(), "many": [1, Own(), freed()], "two": 2, "function": freed}
    names |= {"layers": nn.Sequential(nn.Linear(2, 3)), "mixed": nn.Sequential(OwnModule())}
    inspector = Inspector(theme_name="nocolor")
    shell: Any = SimpleNamespace(user_ns=names, inspector=inspector, cell_of=lambda file: None)
    told = {name: explain(shell, Explain(name, detail)) for name in names}
    assert "String form: 2" in told["two"]
    assert "Tensor[1048576]" in told["freed"]
    assert "Tensor[1048576]" in told["many"]
    assert "What somebody wrote." in told["own"] or detail
    assert "function" in told["function"]
    assert "(0): Linear(in_features=2" in told["layers"]
    assert "<Sequential>" in told["mixed"]
    assert Own.num_texts == 0
    assert "info" not in vars(inspector)
