"""What a value is made of: its tensors' facts, histograms, digests and samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from ...wire.inspect import Counts, Digests, Found, Histogram, Item, Overview, Sample, Sampled
from .chunks import readable, sample_of_parts
from .description import as_tensor, describe, has_own_code, kind_of, own_part
from .digests import digests_of_parts
from .safe_read import Reader, UnreadableError, reading
from .safe_repr import quiet_text
from .statistics import histogram_of
from .tree import MAX_PLAIN, as_known, find, settings_of, walk

_NOT_READ = "not read: there is much in this value; choose it to have its numbers"


def overview(value: Any, subject: Overview, is_beside: bool) -> Found:
    """The tensors in a value, and what they are."""
    items: list[Item] = []
    shared: dict[tuple[str, int], str] = {}
    num_left_out = num_read = num_plain = 0
    parts: Iterator[tuple[str, Any]] = (
        iter([(subject.path, find(value, subject.path))]) if subject.path else walk(value)
    )
    with torch.no_grad(), one_thread():
        for path, part in parts:
            num_plain += not as_known(part)
            if len(items) >= subject.max_items or (num_plain > MAX_PLAIN and not as_known(part)):
                num_left_out += 1
                continue
            size = _num_elements(part)
            is_read = not num_read or num_read + size <= subject.max_elements
            with looking(is_beside) as read:
                facts = describe(part, is_read, read=read, is_beside=is_beside)
            if is_read:
                num_read += size
            elif not facts.note:
                facts = msgspec.structs.replace(facts, note=_NOT_READ)
            memory = _memory_of(part)
            items.append(Item(path, facts, shared.get(memory) if memory else None))
            if memory:
                shared.setdefault(memory, path)
    text = _text_of(value, len(items) + num_left_out)
    return Found(kind_of(value), text, tuple(items), num_left_out, is_beside)


def histogram(value: Any, subject: Histogram, is_beside: bool) -> Counts:
    """How the elements of one tensor are spread."""
    if subject.num_bins < 1:
        raise ValueError("a histogram has at least one bin")
    data = data_at(value, subject.path, is_beside)
    with looking(is_beside) as read:
        return Counts(tuple(histogram_of(data, subject.low, subject.high, subject.num_bins, read)))


def digests(value: Any, subject: Digests, is_beside: bool) -> tuple[str, ...]:
    """Digests of runs of one tensor's elements."""
    data = data_at(value, subject.path, is_beside)
    with looking(is_beside) as read:
        return digests_of_parts(data, subject.parts, read)


def sample(value: Any, subject: Sample, is_beside: bool) -> Sampled:
    """Some elements of one tensor."""
    data = data_at(value, subject.path, is_beside)
    with looking(is_beside) as read:
        picked = sample_of_parts(data, subject.parts, subject.max_elements, read)
        return Sampled(picked.numpy(), picked.numel() == data.numel())


@contextmanager
def looking(is_beside: bool) -> Iterator[Reader]:
    """What reads tensors, without autograd."""
    # What a tensor's class makes of an operation is of no interest, and may raise.
    with (
        torch._C.DisableTorchFunctionSubclass(),
        torch.no_grad(),
        one_thread(),
        reading(is_beside) as read,
    ):
        yield read


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on this thread alone.

    Pieces are small: where cores are taken, waiting for other threads at each costs ten times what
    they save. The number is each thread's own: the main thread, if it runs meanwhile, keeps its.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    # A thread that computes for the first time takes the number that was set last, wherever that
    # was.
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    other.start()
    other.join()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def tensor_at(value: Any, path: str, is_beside: bool = False) -> torch.Tensor:
    """The rank's part of a tensor in a value.

    Raises:
        LookupError: there is nothing at this path.
        TypeError: there is no tensor, or one that only code of its class can read.
    """
    part = find(value, path)
    tensor = as_tensor(part)
    if tensor is None:
        raise TypeError(f"{path or 'it'} is no tensor: {kind_of(part)}")
    if is_beside and has_own_code(tensor):
        raise TypeError(f"{kind_of(part)} has code of its own, which does not run beside a cell")
    return own_part(tensor).local


def data_at(value: Any, path: str, is_beside: bool = False) -> torch.Tensor:
    """What holds the elements of a tensor in a value (see `readable`)."""
    try:
        return readable(tensor_at(value, path, is_beside), is_beside)[0]
    except UnreadableError as error:
        raise ValueError(str(error)) from None


def _text_of(value: Any, num_items: int) -> str:
    if as_tensor(value) is not None:
        return ""
    if issubclass(type(value), Optimizer):
        return settings_of(value)
    if issubclass(type(value), nn.Module):
        return f"{type(value).__name__}, {num_items} parameters and buffers"
    return quiet_text(value)


def _num_elements(part: Any) -> int:
    try:
        if isinstance(part, torch.Tensor):
            return int(own_part(part).local.numel())
        return int(part.size) if hasattr(part, "__array_interface__") else 0
    except Exception:  # of a tensor without a shape
        return 0


def _memory_of(part: Any) -> tuple[str, int] | None:
    """Which memory a tensor lies in; None if that cannot be told."""
    if not isinstance(part, torch.Tensor):
        return None
    try:
        local = own_part(part).local
        pointer = local.untyped_storage().data_ptr()
        return (str(local.device), pointer) if pointer else None
    except Exception:  # sparse, fake, not initialised
        return None
