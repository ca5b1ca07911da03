"""What has to be equal on every rank of a collective: size and dtype of a tensor, and the root.

Read off each collective as it begins, as tensors are not held for it: a third of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from ...wire.groups import Begun

# So many collectives of a group are known: where ranks have parted, one may be some ahead.
NUM_RECENT = 8

Signature = tuple[int, Any, int]  # number of elements, dtype, and root in the group
Signed = tuple[int, str, int, Any, int]  # with number and name of the collective before it
_NOTHING: Signature = (-1, None, -1)
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# Where ranks may take and give different amounts, what the inputs are made of is equal.
_BY_INPUT = frozenset({"gather", "reduce_scatter"})
_WITHOUT_TENSORS = frozenset({"barrier", "monitored_barrier"})


def signer(method: str) -> Callable[[Any, Any], Signature]:
    """Return the function that reads the signature off the arguments of a method of
    ``ProcessGroup``.
    """
    if method in _WITHOUT_TENSORS:
        return lambda args, kwargs: _NOTHING
    if method in _ROOTED:
        return _rooted(1 if method in _BY_INPUT else 0)
    if method.endswith("_coalesced"):
        return _coalesced
    if method == "alltoall":  # its parts may differ from pair to pair
        return lambda args, kwargs: (-1, _size(args, 0)[1], -1)
    if method == "alltoall_base":
        return _split
    place = 1 if method in _BY_INPUT else 0
    return lambda args, kwargs: _size(args, place)


def _size(args: Any, place: int) -> Signature:
    try:
        tensor = args[place]
        while type(tensor) is not Tensor and not isinstance(tensor, Tensor):
            tensor = tensor[0]
        return tensor.numel(), tensor.dtype, -1
    except (IndexError, TypeError):  # by keyword, or there is none
        return _NOTHING


def _rooted(place: int) -> Callable[[Any, Any], Signature]:
    def sign(args: Any, kwargs: Any) -> Signature:
        num_elements, dtype, _ = _size(args, place)
        root = getattr(args[-1] if args else kwargs.get("opts"), "rootRank", -1)
        return num_elements, dtype, root

    return sign


def _coalesced(args: Any, kwargs: Any) -> Signature:
    num_elements, dtype, _ = _size(args, 0)
    try:
        tensors = args[0]
        return sum(each.numel() for each in tensors), dtype, -1
    except (AttributeError, IndexError, TypeError):  # lists of lists
        return (-1, dtype, -1) if num_elements >= 0 else _NOTHING


def _split(args: Any, kwargs: Any) -> Signature:
    num_elements, dtype, _ = _size(args, 0)
    is_even = len(args) > 3 and not args[2] and not args[3]
    return num_elements if is_even else -1, dtype, -1


def compare_first(store: Store, key: str, mine: Begun, place: str) -> None:
    """Compare a collective that this rank is about to begin with that of the first member who has
    got there; raise RuntimeError if they cannot meet, as gloo would end the process.

    Args:
        store: which all members use; if it cannot be reached, nothing is compared.
        key: of this collective in the store, the same on all members.
        mine: the collective.
        place: names the group, as ``on dp``.
    """
    text = f"{mine.name}{_amount(mine)}"
    try:
        theirs = bytes(store.compare_set(key, "", text)).decode()
    except Exception:
        return
    if theirs != text:
        raise RuntimeError(
            f"{place} the next operation is {text} on this rank and {theirs} on another: these "
            "cannot meet, so this rank has not begun it (after a stop or a failure, ranks may have "
            "gone on from different places)"
        )


def _amount(begun: Begun) -> str:
    size = "" if begun.num_elements < 0 else f"{begun.num_elements:,} "
    root = f" with rank {begun.root} as its root" if begun.root >= 0 else ""
    return f" of {size}{begun.dtype}{root}" if begun.dtype else root


def as_begun(
    number: int, name: str, num_elements: int, dtype: Any, root: int, ranks: tuple[int, ...] = ()
) -> Begun:
    """Return the description of a collective that other processes get.

    Args:
        number, name, num_elements, dtype, root: as in `Signed`.
        ranks: the group's members, () for all.
    """
    root = ranks[root] if ranks and 0 <= root < len(ranks) else root
    dtype = "" if dtype is None else str(dtype).removeprefix("torch.")
    return Begun(number, name, num_elements, dtype, root)
