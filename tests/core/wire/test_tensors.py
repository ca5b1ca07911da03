"""Tensors of every dtype, layout and class of the installed torch: each arrives equal, or is
refused in a sentence that names the part which cannot travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.masked import masked_tensor
from torch.nn.utils.rnn import pack_sequence

from cellmesh.errors import UnpicklableError
from cellmesh.wire import payload
from cellmesh.workers.replicas import copying

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
MATRIX = torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 4]])


def send(value: Any) -> Any:
    """Return what arrives of a value that is pushed, pulled or passed."""
    pickled, buffers = payload.dumps(value, "value")
    return payload.loads(pickled, [bytearray(buffer) for buffer in buffers])


def heal(value: Any) -> Any:
    """Return what arrives of a name that is copied to a replaced rank."""
    namespace = {"value": value}
    names, reasons = copying.survey(namespace)
    if reasons:
        raise UnpicklableError(reasons["value"])
    pickled, buffers = copying.gather(namespace, names)
    return payload.loads(pickled, [bytearray(buffer) for buffer in buffers])["value"]


@pytest.fixture(params=[send, heal], ids=["send", "heal"])
def travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("cellmesh.workers.replicas.copying.move_in", _stay)
    with warnings.catch_warnings():  # of torch's, of what is a prototype
        warnings.simplefilter("ignore")
        yield request.param


def _stay(path: object, directory: object) -> dict[str, Any]:
    return {}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def _make(dtype: torch.dtype, length: int) -> torch.Tensor:
    if dtype in QUANTIZED:
        return torch._empty_affine_quantized([length], scale=0.5, zero_point=1, dtype=dtype)
    tensor = torch.empty(length, dtype=dtype)
    _bytes_of(tensor).copy_(torch.arange(_bytes_of(tensor).numel()) % 251)
    return tensor


@pytest.mark.parametrize("length", [0, 200_000])
def test_each_dtype_travels(travel: Callable[..., Any], length: int) -> None:
    for dtype in DTYPES:
        tensor = _make(dtype, length)
        arrived = travel({"whole": tensor, "part": tensor[: length // 2]})
        whole, part = arrived["whole"], arrived["part"]
        assert (whole.dtype, whole.shape) == (dtype, tensor.shape)
        assert torch.equal(_bytes_of(whole), _bytes_of(tensor))
        assert (part.dtype, part.shape) == (dtype, (length // 2,))
        if dtype in QUANTIZED:
            assert (whole.q_scale(), whole.q_zero_point()) == (0.5, 1)


class WithFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Wrapper(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return func(*args, **(kwargs or {}))


def _small_f8() -> torch.Tensor:
    return torch.arange(4.0).to(torch.float8_e5m2)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: MATRIX.t(),
    "coo": lambda: MATRIX.to_sparse_coo(),
    "coo of uint16": lambda: torch.sparse_coo_tensor(
        [[0, 1], [1, 0]], torch.tensor([1, 2], dtype=torch.uint16), (2, 2)
    ),
    "csr": lambda: MATRIX.to_sparse_csr(),
    "bsr": lambda: MATRIX.to_sparse_bsr((1, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)]),
    "channels per scale": lambda: torch.quantize_per_channel(
        MATRIX, torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.quint8
    ),
    "conjugate of complex32": lambda: torch.ones(3, dtype=torch.complex32).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "meta": lambda: torch.ones(3, device="meta", dtype=torch.float8_e5m2),
    "parameter": lambda: torch.nn.Parameter(MATRIX.clone()),
    "uninitialized parameter": torch.nn.UninitializedParameter,
    "buffer": lambda: torch.nn.Buffer(_small_f8()),
    "masked": lambda: masked_tensor(MATRIX, MATRIX > 0),
    "with __torch_function__": lambda: _small_f8().as_subclass(WithFunction),
    "with __torch_dispatch__": lambda: Wrapper(MATRIX.clone()),
    "packed sequence": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    "untyped storage": lambda: torch.ones(3).untyped_storage(),
    "storage on meta": lambda: torch.UntypedStorage(5, device="meta"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_and_class_travels(travel: Callable[..., Any], name: str) -> None:
    value = LAYOUTS[name]()
    arrived = travel(value)
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)
    assert getattr(arrived, "layout", None) == getattr(value, "layout", None)
    assert getattr(arrived, "requires_grad", None) == getattr(value, "requires_grad", None)


def test_a_jagged_tensor_travels(travel: Callable[..., Any]) -> None:
    """Its repr has a symbol for the length, which each process chooses."""
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
    arrived = travel(jagged)
    assert arrived.layout == torch.jagged
    assert [each.tolist() for each in arrived.unbind()] == [each.tolist() for each in jagged]


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # type: ignore[no-untyped-call]
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MATRIX.to_mkldnn(), r"a tensor in the layout of mkldnn: send `x\.to_dense\(\)`"),
        (_fake, r"a FakeTensor, which has no values: send a tensor on `meta`"),
        (torch.Event, r"cannot be pickled .a torch\.Event"),
    ],
    ids=["mkldnn", "fake", "event"],
)
def test_others_are_refused(
    travel: Callable[..., Any], make: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(UnpicklableError, match=sentence):
        travel(make())
