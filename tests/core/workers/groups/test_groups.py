"""The private parts of torch that are leant on: all are there, and one that is not is named."""

from __future__ import annotations

import pytest

from cellmesh.workers.groups import check_torch, find_missing


def test_the_installed_torch_has_all() -> None:
    check_torch()


@pytest.mark.parametrize(
    ("module", "part", "named"),
    [
        ("torch.distributed.gone", "thing", "torch.distributed.gone.thing"),
        ("torch._C", "_gone", "torch._C._gone"),
        ("torch._C", "Future.gone", "torch._C.Future.gone"),
        ("torch.distributed.distributed_c10d", "_new_process_group_helper(backend, rnks)",
         "torch.distributed.distributed_c10d._new_process_group_helper(rnks)"),
    ],
)  # fmt: skip
def test_missing_internals_of_a_torch_are_named(module: str, part: str, named: str) -> None:
    assert list(find_missing({module: (part,)})) == [named]
    with pytest.raises(
        ImportError, match=r"torch \S+ has no torch.*: cellmesh is tried with torch 2\.11"
    ):
        check_torch({module: (part,)})
