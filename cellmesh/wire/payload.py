"""Pickles Python values for other processes: cloudpickle, protocol 5, large buffers out of band.

Pickle is chosen as users push functions, classes and closures of their notebook. It runs code on
loading, so `loads` is called only on data from an authenticated peer in a message that
decoded.
"""

from __future__ import annotations

import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import cloudpickle

from ..errors import HostError, UnpicklableError
from . import classes
from .codec import Frame
from .limits import CHECKED_BYTES
from .messages import Pickled

# Longer sources stay where they are.
_MAX_TEXT = 1 << 18


class _Lines(tuple[Any, ...]):
    """An entry of `linecache` (size, None for the modification time, lines, file name) with the
    source of a function that was sent.

    Attributes:
        cell: the ``In[n]`` that they are, 0 if that is not known.
    """

    cell = 0


class Sources:
    """The source texts that a pickle already contains, so that each is in it once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, int] | None] = {}

    def reduce(self, code: types.CodeType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return how pickle is to reduce a code object together with its source.

        Args:
            code: the code object.
            reduced: how it does without.
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
    """Return n of the cell ``In[n]`` that has this code file name, 0 for other code."""
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
        text: what became of the value.
    """
    return Pickled(pickle.dumps(_Lost(text), protocol=5))


# Smaller buffers cost less copied into the stream than sent as a frame.
OUT_OF_BAND_BYTES = 64 * 1024
# Of what is in the stream: there, and where ranks map it.
_NUM_COPIES = 2
_MAX_DEPTH = 6
# Whose objects reduce as `tensors.reduce` says.
_ARRAY_MODULES = frozenset(("numpy", "torch", "torch.storage", "torch._subclasses.fake_tensor"))
_TORCH_REBUILDS = "torch._utils"  # whose functions do so, too

Reducer = Callable[[Any], Any]


class BufferHolder(Protocol):
    """Notes which shared-memory segments this process still uses."""

    def hold(self, loan: int) -> Callable[[], object]:
        """Note a segment that is used from now on; return a function to call, on any thread, after
        its last use.
        """


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler with an additional reducer; code objects include their source."""

    def __init__(self, file: io.IOBase, reducer: Reducer | None, **kwargs: Any) -> None:
        super().__init__(file, **kwargs)
        self._reducer = reducer
        self._sources = Sources()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            return self._sources.reduce(obj, self.dispatch_table[types.CodeType](obj))
        if self._reducer is not None:
            reduced = self._reducer(obj)
            if reduced is not NotImplemented:
                return reduced
        kind = type(obj)
        if kind.__module__ in _ARRAY_MODULES or (
            kind is types.FunctionType and obj.__module__ == _TORCH_REBUILDS
        ):
            from . import tensors  # a process that has none does without

            reduced = tensors.reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        if issubclass(kind, type) and obj.__module__ != "builtins":
            classes.identify(obj)
            return classes.reduce(obj, super().reducer_override(obj))
        return super().reducer_override(obj)


class _Nowhere(io.RawIOBase):
    """A binary file that drops everything written to it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _CheckedStream(io.BytesIO):
    """A stream that accepts large writes only if they and their copies fit into memory."""

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        if num_bytes >= CHECKED_BYTES:
            from . import limits  # most processes never ask

            limits.check_fits(_NUM_COPIES * num_bytes)
        return super().write(data)


def dumps(
    value: Any, name: str, reducer: Reducer | None = None, is_small: bool = False
) -> tuple[Pickled, list[Frame]]:
    """Pickle a value, with large buffers beside the stream.

    Args:
        value: any object that cloudpickle can pickle.
        name: what the user calls it, for the error.
        reducer: asked first how an object reduces (as ``pickle.Pickler.reducer_override``); may
            return ``NotImplemented``, or raise `UnpicklableError` with a hint.
        is_small: whether it is known that the value cannot be larger than memory.

    Returns:
        The pickle, and its out-of-band buffers, each a frame.

    Raises:
        UnpicklableError: it cannot be pickled; names the part of it that cannot.
    """
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

    stream = io.BytesIO() if is_small else _CheckedStream()
    _dump(value, name, reducer, _Pickler(stream, reducer, protocol=5, buffer_callback=keep_in_band))
    return Pickled(stream.getvalue(), len(buffers)), buffers


def check_dumps(value: Any, name: str, reducer: Reducer | None = None) -> None:
    """Check that a value can be pickled, without keeping the pickle in memory.

    Raises:
        UnpicklableError: it cannot be pickled; names the part of it that cannot.
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


def loads(payload: Pickled, buffers: Sequence[Frame], holder: BufferHolder | None = None) -> Any:
    """Unpickle the result of `dumps`.

    Args:
        payload: the pickle.
        buffers: its out-of-band buffers, in order. They become the memory of the arrays inside.
        holder: notes the segment that the value lies in.

    Returns:
        The value.

    Raises:
        HostError: the pickle is in a segment, which cannot be opened or mapped.
    """
    if payload.is_mapped:
        from . import segments  # small values do without

        frame = segments.open_segment(buffers[0])
        mapped = segments.map_private(
            frame, None if holder is None else holder.hold(frame.ref.loan)
        )
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
