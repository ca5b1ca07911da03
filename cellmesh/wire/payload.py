"""Pickles Python values for other processes: cloudpickle, protocol 5, large buffers out of band.

Pickle is used because users push functions, classes and closures of their notebook. It runs code on
loading, so `loads` is called only on data from an authenticated peer in a message that decoded.

The memory of tensors and arrays is sent out of band, without a copy. Classes of the notebook and of
ranks' cells are sent by value. cloudpickle gives such a class a random number when it is first
pickled, so the same cell on two ranks would make two classes, and equal dataclasses of two ranks
would differ in the notebook. Here the number is derived from the class's definition. A class that
is defined again with other contents is another class.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from cloudpickle import cloudpickle

from ..errors import HostError, MeshUsageError, UnpicklableError
from . import limits, segments
from .codec import Frame
from .messages import Pickled

# Longer sources are not sent.
_MAX_TEXT = 1 << 18


# Position of `co_filename` among the arguments that make a code object.
_FILE_NAME = 10


class _Lines(tuple[Any, ...]):
    """An entry of `linecache` (size, None for the modification time, lines, file name) with the
    source of a function that was sent.

    Attributes:
        cell: n of the cell ``In[n]`` with this source; 0 if unknown.
    """

    cell = 0


class Sources:
    """The source texts that one pickle already contains, so that no text is added twice."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, int] | None] = {}

    def reduce(self, code: types.CodeType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the pickle reduction of a code object together with its source.

        Args:
            code: the code object.
            reduced: its reduction without the source.
        """
        name = code.co_filename
        if name not in self._known:
            self._known[name] = _find(name)
        known = self._known[name]
        return reduced if known is None else (restore, (name, *known, *reduced[:2]))


def restore(
    name: str, text: str, cell: int, make: Callable[..., types.CodeType], args: tuple[Any, ...]
) -> types.CodeType:
    """Rebuild a pickled code object, and register its source with `linecache` if it is new."""
    if name not in linecache.cache:
        lines = _Lines((len(text), None, text.splitlines(keepends=True), name))
        lines.cell = cell
        linecache.cache[name] = lines
    return make(*args)


def cell_of(name: str) -> int:
    """Return n of the cell ``In[n]`` whose code has this file name; 0 for other code."""
    return int(getattr(linecache.cache.get(name), "cell", 0))


def _find(name: str) -> tuple[str, int] | None:
    entry: Any = linecache.cache.get(name)
    if (
        entry is None or len(entry) != 4 or entry[1] is not None
    ):  # the lines are in a file, or unknown
        return None
    text = "".join(entry[2])
    if len(text) > _MAX_TEXT:
        return None
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cells = shell.compile._filename_map if shell is not None else {}
    return text, cell_of(name) or int(cells.get(name, 0))


class _Lost:
    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> Any:
        return complain, (self._text,)


def complain(text: str) -> NoReturn:
    """Raise `HostError`; a pickle made by `stand_in` calls this function when it is loaded."""
    raise HostError(text)


def stand_in(text: str) -> Pickled:
    """Return a pickle that raises `HostError` when it is loaded, in place of a lost value.

    Args:
        text: message of the error.
    """
    return Pickled(pickle.dumps(_Lost(text), protocol=5))


# Smaller buffers are copied into the stream, which costs less than a frame.
OUT_OF_BAND_BYTES = 64 * 1024
# Texts up to this length are pickled without cloudpickle, as numbers are.
_MAX_SHORT = 4096
_SCALARS = frozenset((bool, int, float, type(None), str, bytes))
_MAX_DEPTH = 6
# Modules whose objects `_reduce_array` reduces.
_ARRAY_MODULES = frozenset(("numpy", "torch", "torch.storage", "torch._subclasses.fake_tensor"))
_TORCH_REBUILDS = "torch._utils"  # `_reduce_array` reduces its functions, too

Reducer = Callable[[Any], Any]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler with an additional reducer; code objects include their source."""

    def __init__(self, file: io.IOBase, reducer: Reducer | None, **kwargs: Any) -> None:
        super().__init__(file, **kwargs)
        self._reducer = reducer
        self._sources = Sources()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            make, args = self.dispatch_table[types.CodeType](obj)
            # cloudpickle 3.1.3 hides the file's name, by which tracebacks find the source.
            named = (*args[:_FILE_NAME], obj.co_filename, *args[_FILE_NAME + 1 :])
            return self._sources.reduce(obj, (make, named))
        if self._reducer is not None:
            reduced = self._reducer(obj)
            if reduced is not NotImplemented:
                return reduced
        kind = type(obj)
        if kind is functools.cached_property:  # has a lock until Python 3.12
            state = {name: value for name, value in vars(obj).items() if name != "lock"}
            return kind, (obj.func,), state
        if kind.__module__ in _ARRAY_MODULES or (
            kind is types.FunctionType and obj.__module__ == _TORCH_REBUILDS
        ):
            reduced = _reduce_array(obj)
            if reduced is not NotImplemented:
                return reduced
        if issubclass(kind, type) and obj.__module__ != "builtins":
            identify(obj)
            return _reduce_class(obj, super().reducer_override(obj))
        return super().reducer_override(obj)


class _Nowhere(io.RawIOBase):
    """A binary file that drops everything written to it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _CheckedStream(io.BytesIO):
    """A stream for a pickle that refuses large writes which, together with a copy on the ranks, do
    not fit into memory.
    """

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        if num_bytes >= limits.CHECKED_BYTES:
            limits.check_fits(2 * num_bytes)
        return super().write(data)


def dumps(value: Any, name: str, reducer: Reducer | None = None) -> tuple[Pickled, list[Frame]]:
    """Pickle a value, with large buffers out of band.

    Args:
        value: any object that cloudpickle can pickle.
        name: the user's name of the value, for error messages.
        reducer: called first to reduce an object (as ``pickle.Pickler.reducer_override``); may
            return ``NotImplemented``, or raise `UnpicklableError` with a hint.

    Returns:
        The pickle, and its out-of-band buffers, each a frame.

    Raises:
        UnpicklableError: the value cannot be pickled; the message names the responsible part.
    """
    if is_short(value):
        return Pickled(pickle.dumps(value, protocol=5)), []
    buffers: list[Frame] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = _CheckedStream()
    _dump(value, name, reducer, _Pickler(stream, reducer, protocol=5, buffer_callback=keep_in_band))
    return Pickled(stream.getvalue(), len(buffers)), buffers


def is_short(value: Any) -> bool:
    """Return whether a value is a number, a short text or None, which need no cloudpickle."""
    kind = type(value)
    return kind in _SCALARS and not (kind in (str, bytes) and len(value) > _MAX_SHORT)


def check_dumps(value: Any, name: str, reducer: Reducer | None = None) -> None:
    """Check that a value can be pickled, without keeping the pickle in memory.

    Raises:
        UnpicklableError: the value cannot be pickled; the message names the responsible part.
    """
    _dump(value, name, reducer, _pickler_to_nowhere(reducer))


def _dump(value: Any, name: str, reducer: Reducer | None, pickler: _Pickler) -> None:
    try:
        pickler.dump(value)
    except UnpicklableError as e:
        path, _ = _find_culprit(value, name, reducer, UnpicklableError)
        where = "" if path == name else f" ({path})"
        raise UnpicklableError(f"{name!r}: {e}{where}") from e
    except Exception as e:
        # cloudpickle turns a RecursionError into a PicklingError.
        if isinstance(e, RecursionError) or isinstance(
            e.__cause__ or e.__context__, RecursionError
        ):
            raise UnpicklableError(f"{name!r} cannot be pickled: it nests too deeply") from e
        path, part = _find_culprit(value, name, reducer)
        reason = f"{type(e).__name__}: {e}"
        where = "" if path == name else f": {path} is what cannot"
        raise UnpicklableError(
            f"{name!r} cannot be pickled{where} (a {_type_name(part)}; {reason})"
        ) from e


def _pickler_to_nowhere(reducer: Reducer | None) -> _Pickler:
    return _Pickler(_Nowhere(), reducer, protocol=5, buffer_callback=lambda buffer: None)


def loads(payload: Pickled, buffers: Sequence[Frame]) -> Any:
    """Unpickle the result of `dumps`.

    Args:
        payload: the pickle.
        buffers: its out-of-band buffers, in order. They become the memory of the arrays inside.

    Returns:
        The value.

    Raises:
        HostError: the pickle is in a segment that cannot be opened or mapped.
    """
    if payload.is_mapped:
        mapped = segments.map_private(segments.open_segment(buffers[0]))
        if payload.stream:
            return pickle.loads(payload.stream, buffers=mapped)
        return pickle.loads(mapped[-1], buffers=mapped[:-1])
    return pickle.loads(payload.stream, buffers=buffers)


def _type_name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _fails(value: Any, reducer: Reducer | None, kind: type[Exception]) -> bool:
    try:
        _pickler_to_nowhere(reducer).dump(value)
    except Exception as e:
        return isinstance(e, kind)
    return False


def _find_culprit(
    value: Any, path: str, reducer: Reducer | None, kind: type[Exception] = Exception
) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be pickled on its own, and its path."""
    for _ in range(_MAX_DEPTH):
        for step, part in _parts(value):
            if part is not value and _fails(part, reducer, kind):
                path, value = path + step, part
                break
        else:
            break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("{...}", part) for part in value)
    elif isinstance(value, types.FunctionType):
        yield from _closure(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", part) for key, part in list(vars(value).items()))


def _closure(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f" -> closure variable {name}", cell.cell_contents
        except ValueError:  # not yet bound
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f" -> global {name}", function.__globals__[name]


# ---------------------------------------------------------------- tensors and arrays

# From this size on, strided arrays are made contiguous, and received memory is used in place.
LARGE_BYTES = 64 * 1024


def _reduce_array(value: Any) -> Any:
    """Return the pickle reduction of a tensor, storage or array (see
    `pickle.Pickler.reducer_override`).

    Args:
        value: an object of a class that ``torch`` or ``numpy`` defines, or a function of
            ``torch._utils``, by which torch rebuilds tensors.

    Returns:
        The reduction; ``NotImplemented`` for that of its class.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = type(value)
    if numpy is not None and kind is numpy.ndarray:
        flags = value.flags
        if flags.forc or value.dtype.hasobject or value.nbytes < LARGE_BYTES:
            return NotImplemented
        _check_fits(value.nbytes)
        return numpy.ascontiguousarray(value).__reduce_ex__(5)
    if torch is None:
        return NotImplemented
    if kind is types.FunctionType:
        is_of_new_dtypes = value is getattr(torch._utils, "_rebuild_tensor_v3", None)
        return (find_rebuild, ()) if is_of_new_dtypes else NotImplemented
    if kind is torch.storage.TypedStorage:
        return _reduce_storage(value._untyped_storage, value.dtype)
    if kind is torch.UntypedStorage:
        return _reduce_storage(value, None)
    if kind is torch.Tensor and value.layout is torch._mkldnn:
        raise UnpicklableError("a tensor in the layout of mkldnn: send `x.to_dense()`")
    if kind.__name__ == "FakeTensor":
        raise UnpicklableError(
            "a FakeTensor, which has no values: send a tensor on `meta` (`torch.empty_like(x, "
            'device="meta")`)'
        )
    if kind is torch.Tensor and _is_part(value, torch):
        _check_fits(value.nbytes)
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        return copy.__reduce_ex__(5)
    return NotImplemented


def find_rebuild() -> Any:
    """Return the function that rebuilds tensors of torch's newer dtypes (float8, uint16, ...).

    torch reduces these with an untyped storage, but its own function needs a typed one, which only
    `torch.load` makes.
    """
    return _rebuild_tensor


def _rebuild_tensor(storage: Any, *args: Any) -> Any:
    import torch

    return torch._utils._rebuild_tensor_v3(_typed(storage, torch.uint8), *args)  # type: ignore[no-untyped-call]


def make_storage(num_bytes: int, dtype: Any, device: str) -> Any:
    """Make, in the receiving process, a torch storage that was sent without contents: an empty one,
    or one on ``meta``.

    Args:
        num_bytes: size of the storage, in bytes.
        dtype: see `rebuild_storage`.
        device: torch's name of the device.
    """
    import torch

    storage = torch.UntypedStorage(num_bytes, device=device)  # type: ignore[no-untyped-call]
    return storage if dtype is None else _typed(storage, dtype)


def rebuild_storage(buffer: Any, dtype: Any) -> Any:
    """Rebuild a torch storage on the memory in which it was received.

    Args:
        buffer: writable memory.
        dtype: dtype of a typed storage; None for an untyped one.
    """
    import torch

    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    if storage.nbytes() < LARGE_BYTES:
        storage = storage.clone()  # type: ignore[no-untyped-call]  # memory of torch's own, which it can resize
    return storage if dtype is None else _typed(storage, dtype)


def move_storage(storage: Any, dtype: Any, device: str) -> Any:
    """Move a received torch storage to the device that it was sent from.

    Args:
        storage: the received storage, on the CPU.
        dtype: see `rebuild_storage`.
        device: torch's name of the device.

    Raises:
        MeshUsageError: this process has no such device.
    """
    import torch

    try:
        there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    except (RuntimeError, AssertionError) as e:  # the latter if torch is built without it
        raise MeshUsageError(
            f"a tensor on {device} was sent to a process that has no such device: send `x.cpu()`, "
            "or, with a device for each rank, a part to each with `push(x=x, shard=0)`"
        ) from e
    there.copy_(storage)
    return there if dtype is None else _typed(there, dtype)


def _typed(storage: Any, dtype: Any) -> Any:
    typed: Any = sys.modules["torch"].storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


def _reduce_storage(storage: Any, dtype: Any) -> Any:
    num_bytes = storage.nbytes()
    if not num_bytes or storage.device.type == "meta":
        return make_storage, (num_bytes, dtype, "meta" if storage.device.type == "meta" else "cpu")
    if storage.device.type != "cpu":
        _check_fits(num_bytes)
        return move_storage, (storage.cpu(), dtype, str(storage.device))
    memory = (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
    memory.storage = storage  # keeps it alive as long as its memory is used
    return rebuild_storage, (pickle.PickleBuffer(memory), dtype)


def _check_fits(num_bytes: int) -> None:
    """Raise an error if a value is large and the copy of it for its pickle does not fit into
    memory.
    """
    if num_bytes >= limits.CHECKED_BYTES:
        limits.check_fits(num_bytes)


def _is_part(tensor: Any, torch: Any) -> bool:
    """Return whether a tensor is less than half of a large storage, all of which its pickle would
    contain.
    """
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    num_bytes = tensor.untyped_storage().nbytes()
    return bool(num_bytes >= LARGE_BYTES and 2 * tensor.nbytes < num_bytes)


# ---------------------------------------------------------------- classes by value

# Attributes that Python adds to a class, or that only describe the place of its definition.
_LEFT_OUT = {
    "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__annotate_func__",
    "__annotations_cache__", "__slotnames__", "_abc_impl", "__abstractmethods__",
    "_member_map_", "_value2member_map_", "_member_names_", "_hashable_values_",
    "_unhashable_values_", "_unhashable_values_map_",
}  # fmt: skip
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_MAX_PARTS = 100_000


# Called with each class of ``__main__`` that this process has unpickled.
listeners: list[Callable[[type], object]] = []


def identify(kind: type) -> None:
    """Set cloudpickle's id of a class that is pickled by value to a digest of its definition.

    A class that has an id, or whose definition has no digest, keeps cloudpickle's id.
    """
    by_class = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    if kind.__module__ != "__main__" or kind in by_class:
        return
    try:
        number = digest(kind)
    except Exception:  # raised by user code, or the definition is too large
        return
    with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        by_class[kind] = number
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[number] = kind


def keep_qualname(kind: type, reduced: Any) -> bool:
    """Add a class's qualified name to cloudpickle's reduction, which omits it; return whether that
    reduction is by value.
    """
    if type(reduced) is not tuple or len(reduced) != 6:
        return False
    if reduced[0] is cloudpickle._make_skeleton_class:
        reduced[1][3]["__qualname__"] = kind.__qualname__
    return True


def _reduce_class(kind: type, reduced: Any) -> Any:
    """Return the pickle reduction of a class, made from cloudpickle's reduction of it."""
    if not keep_qualname(kind, reduced):
        return reduced
    outer: Any = None
    names = kind.__qualname__.split(".")
    if len(names) > 1 and "<locals>" not in names:  # found in the class around it
        outer = _main().get(names[0])
    return *reduced[:2], (reduced[2], outer), None, None, fill


def fill(kind: type, state: tuple[Any, Any]) -> None:
    """Set the attributes of a class that unpickling has created or found.

    A class that this process has defined itself keeps functions that are equal to the pickled ones,
    as they share the globals of its other code.
    """
    (attributes, slots), _ = state
    own = _main()
    kept = {
        name for name, value in attributes.items() if _is_same(vars(kind).get(name), value, own)
    }
    changed = {name: value for name, value in attributes.items() if name not in kept}
    cloudpickle._class_setstate(kind, (changed, slots))
    if kind.__module__ == "__main__":
        for listener in listeners:
            listener(kind)


def _main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _is_same(current: Any, given: Any, own: dict[str, Any]) -> bool:
    if type(current) is not type(given):
        return False
    if isinstance(current, types.FunctionType):
        return current.__globals__ is own and current.__code__ == given.__code__
    if isinstance(current, classmethod | staticmethod):
        return _is_same(current.__func__, given.__func__, own)
    return False


def digest(kind: type) -> str:
    """Return a digest of a class's definition, equal in all processes for equal definitions.

    The definition includes name, bases, attributes, the code of methods, their defaults and
    closures; not the globals that methods use, nor the place of the definition.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for part in _Parts().of(kind):
        hashed.update(part.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.hexdigest()


class _Parts:
    """Lists the parts of a class's definition as texts, from which its digest is computed."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is reused
        self._num_parts = 0

    def of(self, value: Any) -> Iterator[str]:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ValueError("too many parts")
        kind = type(value)
        yield kind.__qualname__
        if kind in _PLAIN:
            yield repr(value)
            return
        if id(value) in self._seen:
            yield str(self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        yield from self._contents(value, kind)

    def _contents(self, value: Any, kind: type) -> Iterator[str]:
        if kind in (tuple, list):
            yield str(len(value))
            for each in value:
                yield from self.of(each)
        elif kind is dict:
            for key, each in value.items():
                yield from self.of(key)
                yield from self.of(each)
            yield "}"
        elif kind in (set, frozenset):
            yield from sorted("\0".join(_Parts().of(each)) for each in value)
        elif kind is types.CodeType:
            yield from self._code(value)
        elif isinstance(value, types.FunctionType | type):
            if cloudpickle._should_pickle_by_reference(value):
                yield f"{value.__module__}.{value.__qualname__}"
            elif isinstance(value, type):
                yield from self._class(value)
            else:
                yield from self._function(value)
        elif isinstance(value, classmethod | staticmethod):
            yield from self.of(value.__func__)
        elif kind is property:
            yield from self.of((value.fget, value.fset, value.fdel))
        elif kind in (types.MemberDescriptorType, types.GetSetDescriptorType, types.ModuleType):
            yield value.__name__
        elif kind is types.MappingProxyType:
            yield from self.of(dict(value))
        elif kind is types.CellType:
            yield from self.of(cloudpickle._get_cell_contents(value))
        else:
            yield from self._object(value)

    def _class(self, kind: type) -> Iterator[str]:
        yield kind.__qualname__
        yield from self.of((type(kind), *cloudpickle._get_bases(kind)))
        for name, each in sorted(vars(kind).items()):
            if name not in _LEFT_OUT:
                yield name
                yield from self.of(each)
        if issubclass(kind, enum.Enum):
            yield from self.of([(each.name, each.value) for each in kind])

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield from self._code(function.__code__)
        yield from self.of(
            (function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function))
        )

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_qualname
        yield str((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        yield str((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
        yield code.co_code.hex()
        yield from self.of(code.co_consts)

    def _object(self, value: Any) -> Iterator[str]:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):  # by name, as a function with a cache
            yield reduced
            yield from self.of(dict(getattr(value, "__dict__", {})))
            return
        for part in reduced:
            is_iterator = part is not None and hasattr(part, "__next__")
            yield from self.of(list(part) if is_iterator else part)
