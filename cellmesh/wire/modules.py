"""Keeps ranks' modules in the version that the notebook has loaded, while the user edits them.

A function of a user's module is sent by name, together with a table of the notebook's modules and
the version of the file that each was loaded from (`Stamp`). A rank that has loaded another version
reloads the module first, as ``%autoreload`` does: functions, classes and instances that it holds
are updated in place. If the file has changed since the notebook loaded it, the rank cannot load the
notebook's version, and the call is refused.

The table is updated after a module was loaded, not at each call; a rank compares it with its
modules once.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeshUsageError, UnpicklableError

# Modification time of a source file, in seconds since the epoch, and its size in bytes.
Stamp = tuple[float, int]

_CACHED = type(functools.cache(lambda: None))
_INSTALLED = ("site-packages", "dist-packages")


class _Table(msgspec.Struct, array_like=True):
    """The table that the notebook sends to ranks: the versions of its loaded modules' files, and
    its import path.
    """

    stamps: dict[str, Stamp]
    path: list[str]


class LoadedModules:
    """The modules of this process and the versions of their files; modules outside of site-packages
    and Python's library are the user's.

    A process has one instance, as it has one `sys.modules`.

    Attributes:
        num_loads: number of loads and reloads of modules since `record`.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] = {}  # by file, of the text that was loaded
        self.num_loads = 0
        self._files: dict[str, str] = {}  # of the user's modules, by name
        self._installed: set[str] = set()  # names of the others
        self._shell: Any = None
        self._state = (-1, 0, 0)
        self._table = b""
        self._differing: dict[bytes, frozenset[str]] = {}  # by table, modules that are refused
        self._old_objects: dict[Any, Any] = {}  # weak references, of `superreload`

    def record(self) -> None:
        """Install a hook that records the version of the file from which a module is loaded."""
        ipython = sys.modules.get("IPython")
        self._shell = ipython.get_ipython() if ipython is not None else None
        plain = SourceFileLoader.path_stats
        if hasattr(plain, "cellmesh"):
            return

        @functools.wraps(plain)
        def path_stats(loader: SourceFileLoader, path: str) -> Any:
            stats = plain(loader, path)
            self._stamps[path] = (stats["mtime"], stats["size"])
            self.num_loads += 1
            self._differing.clear()
            return stats

        path_stats.cellmesh = True  # type: ignore[attr-defined]
        SourceFileLoader.path_stats = path_stats  # type: ignore[assignment,method-assign]
        self._refresh()

    # ---- in the notebook

    def reducer(self) -> Callable[[Any], Any]:
        """Return a reducer for pickling that refers to the user's functions, classes and modules by
        name where ranks can import them.
        """
        is_fresh = False

        def reduce(value: Any) -> Any:
            nonlocal is_fresh
            kind = type(value)
            is_module = kind is types.ModuleType
            if not (
                is_module or kind is types.FunctionType or kind is _CACHED or issubclass(kind, type)
            ):
                return NotImplemented
            name = value.__name__ if is_module else value.__module__
            if name in self._installed:
                return NotImplemented
            if name != "__main__":
                if not is_fresh:
                    self._refresh()
                    is_fresh = True
                by_name = self._by_name(value, name, "" if is_module else value.__qualname__)
                if by_name is not None:
                    return by_name
            if kind is _CACHED:
                return cached_again, (value.__wrapped__, value.cache_parameters())
            if kind is types.FunctionType and "_torchdynamo_orig_callable" in value.__dict__:
                raise UnpicklableError(
                    "what torch.compile made cannot travel: call torch.compile on the ranks"
                )
            return NotImplemented

        return reduce

    def _by_name(self, value: Any, name: str, names: str) -> Any:
        """Return a pickle reduction of a function or class to its module and name; None if it must
        be pickled by value.
        """
        module = sys.modules.get(name)
        if module is None or _follow(module, names) is not value:
            return None
        if name in self._files:
            return find, (name, names, self._table)
        if name in self._installed:
            return NotImplemented
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)  # made at run time: ranks cannot import it
        return None

    def _refresh(self) -> None:
        """Update the table of the notebook's modules if modules were loaded since the last
        update.
        """
        state = (
            self.num_loads,
            len(sys.modules),
            0 if self._shell is None else self._shell.execution_count,
        )
        if state == self._state:
            return
        if state[:2] != self._state[:2]:
            specs = {
                name: _spec(module)
                for name, module in list(sys.modules.items())
                if name != "__main__"
            }
            self._files = {
                name: file for name, spec in specs.items() if (file := _users_file(spec))
            }
            self._installed = {
                name for name, spec in specs.items() if spec is not None
            } - self._files.keys()
        magics = (
            None
            if self._shell is None
            else self._shell.magics_manager.registry.get("AutoreloadMagics")
        )
        followed: dict[str, float] = getattr(
            getattr(magics, "_reloader", None), "modules_mtimes", {}
        )
        for name, file in self._files.items():
            stamp = self._stamps.get(file)
            # Loaded before `record`, or updated in place by %autoreload before this cell.
            if stamp is None or followed.get(name, stamp[0]) != stamp[0]:
                now = _stamp(file)
                if now is not None and (stamp is None or followed[name] == now[0]):
                    self._stamps[file] = now
        stamps = {
            name: self._stamps[file] for name, file in self._files.items() if file in self._stamps
        }
        self._table = msgspec.msgpack.encode(
            _Table(stamps, [each or os.getcwd() for each in sys.path])
        )
        self._state = state

    # ---- on a rank

    def find(self, name: str, names: str, table: bytes) -> Any:
        """Return an object of a module in this process, which is reloaded first if the notebook has
        another version of it.

        Args:
            name: name of the module.
            names: dotted path of the object in the module; "" for the module itself.
            table: encoded table of the notebook's modules.

        Raises:
            MeshUsageError: the module's file has changed since the notebook loaded it.
            ImportError: this process cannot import the module.
        """
        if name not in sys.modules:
            self._import(name, table)
        differing = self._differing.get(table)
        if differing is None:
            differing = self._update(table)
            self._differing = {table: differing}
        if name in differing:
            raise MeshUsageError(
                f"{sys.modules[name].__file__} has changed since the notebook loaded it: reload "
                f"it there (`importlib.reload({name})`, or `%autoreload 2`) and call again"
            )
        return _follow(sys.modules[name], names)

    def _import(self, name: str, table: bytes) -> None:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            path = msgspec.msgpack.decode(table, type=_Table).path
            sys.path += [
                each for each in path if each not in sys.path
            ]  # the notebook added them after the start
            importlib.invalidate_caches()
            importlib.import_module(name)

    def _update(self, table: bytes) -> frozenset[str]:
        differing = []
        for name, stamp in msgspec.msgpack.decode(table, type=_Table).stamps.items():
            file = _users_file(_spec(sys.modules.get(name)))
            if self._stamps.get(file, stamp) == stamp:
                continue
            if _stamp(file) == stamp:
                self._reload(name, file)
            else:
                differing.append(name)
        return frozenset(differing)

    def reload_changed(self) -> list[str]:
        """Reload the user's modules whose files have changed since they were loaded, as
        ``%autoreload`` does: functions, classes and instances are updated in place. Return the
        names of the modules.

        Raises:
            Exception: exception of the first module that could not be reloaded; all other changed
                modules were reloaded.
        """
        reloaded, failures = [], list[Exception]()
        for name, module in list(sys.modules.items()):
            file = _users_file(_spec(module))
            stamp, now = self._stamps.get(file), _stamp(file) if file else None
            if name == "__main__" or stamp is None or now is None or now == stamp:
                continue
            try:
                self._reload(name, file)
                reloaded.append(name)
            except Exception as error:
                error.add_note(f"{name} could not be reloaded, and is as it was")
                failures.append(error)
        if failures:
            raise failures[0]
        return reloaded

    def _reload(self, name: str, file: str) -> None:
        from IPython.extensions.autoreload import superreload  # rarely used

        stamp = self._stamps[file]
        try:
            superreload(sys.modules[name], old_objects=self._old_objects)  # type: ignore[no-untyped-call]
        except BaseException:
            self._stamps[file] = stamp  # the module still has the previous version
            raise


loaded = LoadedModules()


def find(name: str, names: str, table: bytes) -> Any:
    """Return an object of a user's module, for a pickle that refers to it by name
    (`LoadedModules.find`).
    """
    return loaded.find(name, names, table)


def cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    """Rebuild a `functools.cache` function that was sent by value, with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def _follow(value: Any, names: str) -> Any:
    for name in names.split(".") if names else ():
        value = getattr(value, name, None)
    return value


def _spec(module: Any) -> ModuleSpec | None:
    return vars(module).get("__spec__") if issubclass(type(module), types.ModuleType) else None


@functools.cache
def _not_users() -> tuple[str, str]:
    return str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a module's file is the user's, not a package's, Python's or cellmesh's."""
    return (
        file.endswith(".py")
        and not file.startswith(_not_users())
        and not any(f"/{each}/" in file for each in _INSTALLED)
    )


def _users_file(spec: ModuleSpec | None) -> str:
    """Return the source file of a module if the module is the user's; "" for other modules."""
    file = getattr(spec, "origin", None)
    return file if type(file) is str and is_users(file) else ""


def _stamp(file: str) -> Stamp | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime, status.st_size
