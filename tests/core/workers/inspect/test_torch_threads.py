"""How many threads torch computes with while a look goes on, in this thread and in others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from cellmesh.workers.inspect.safe_read import reading


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_thread(ask: Callable[[], int]) -> int:
    told: list[int] = []
    thread = threading.Thread(target=lambda: told.append(ask()))
    thread.start()
    thread.join()
    return told[0]


def look(is_beside: bool) -> int:
    with reading(is_beside):
        assert torch.get_num_threads() == 1
        # One that begins now, as a data loader's or a checkpoint's may.
        return in_thread(torch.get_num_threads)


def test_only_the_look_computes_with_one_thread() -> None:
    assert look(is_beside=False) == 3
    assert torch.get_num_threads() == 3
    assert in_thread(lambda: look(is_beside=True)) == 3
    assert torch.get_num_threads() == 3
    assert in_thread(torch.get_num_threads) == 3
