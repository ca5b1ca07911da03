"""Makes files that ``torch.compile`` builds appear in inductor's cache whole or not at all.

The compiler writes a library under its own name, and a rank that is killed leaves the first half:
later compilations take it for the library and fail, in every process of the user. Built under
another name, it is renamed when it is whole. (Inductor writes its other files so, by
`write_atomic`.)
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import types
from typing import Any

from .after_import import AfterImport

_MODULE = "torch._inductor.cpp_builder"


def build_whole_files() -> None:
    """Patch inductor so that this rank and its compile workers build C++ libraries under a
    temporary name.
    """
    if _MODULE in sys.modules:  # preloaded
        _patch(sys.modules[_MODULE])
    else:
        AfterImport({_MODULE: _patch}).install()


def _patch(module: types.ModuleType) -> None:
    kind: Any = getattr(module, "CppBuilder", None)
    plain = getattr(kind, "build", None)
    if plain is None or hasattr(plain, "cellmesh"):
        return

    def build(builder: Any) -> None:
        target, output = getattr(builder, "_target_file", ""), getattr(builder, "_output", "")
        if not target or not output.endswith(f" {target}"):  # another version of it
            plain(builder)
            return
        part = f"{target}.{os.getpid()}.part"
        for left in glob.glob(
            f"{glob.escape(target)}.*.part"
        ):  # the builder holds the target's lock, so no other process builds it
            os.unlink(left)
        builder._output = f"{output.removesuffix(target)}{part}"
        try:
            plain(builder)
            os.replace(part, target)
        finally:
            builder._output = output
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    build.cellmesh = True  # type: ignore[attr-defined]
    kind.build = build
    kind.__reduce__ = lambda builder: (restore, (vars(builder),))


def restore(state: dict[str, Any]) -> Any:
    """Unpickle a C++ builder in a rank's compile worker, with the rank's patch."""
    from torch._inductor import cpp_builder

    _patch(cpp_builder)
    builder: Any = object.__new__(cpp_builder.CppBuilder)
    vars(builder).update(state)
    return builder
