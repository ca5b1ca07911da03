"""Renders tracebacks by IPython so that frames of user code stand out: omits frames of cellmesh,
and shortens consecutive frames of libraries to one line. Also keeps the sources and names of cells.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.compilerop import CachingCompiler, PyCF_MASK
from IPython.core.ultratb import AutoFormattedTB

from ...wire import payload
from .stack_inspection import OWN_FOLDER, is_own_code, is_user_code, parse_again, shorten_path

# Marks around a rendered frame of a library; no frame of user code contains such characters, as
# its source is text.
_BEGIN, _MIDDLE, _END = "\x00[", "\x00|", "\x00]"
_LEFT_OUT = "\x00-"  # a frame of cellmesh, which is removed with the end of its line
_ONE = re.compile(r"\x00\[(?P<place>[^\x00]*)\x00\|(?P<text>[^\x00]*)\x00\]")
_RUN = re.compile(r"(?:\x00\[[^\x00]*\x00\|[^\x00]*\x00\]\n?)+")


class _Renderer(AutoFormattedTB):
    """IPython's traceback renderer, which here marks the frames of libraries in its text and omits
    frames of cellmesh.
    """

    def format_record(self, frame_info: Any) -> str:
        text = super().format_record(frame_info)
        frame: types.FrameType | None = frame_info.frame
        if frame is None or is_user_code(frame):
            return text
        if is_own_code(frame):
            return _LEFT_OUT
        code = frame.f_code
        place = f"{shorten_path(code.co_filename)}:{frame_info.lineno} in {code.co_name}"
        return _marked(place, text)

    def _format_list(self, extracted_list: list[Any]) -> list[str]:
        """Format the frames of a traceback for ``%xmode Plain``."""
        return super()._format_list(without_own(extracted_list))


def without_own(frames: Iterable[Any]) -> list[Any]:
    """Return the frame summaries of a traceback that are not of cellmesh."""
    return [frame for frame in frames if not frame.filename.startswith(OWN_FOLDER)]


def format_without_own_frames(error: traceback.TracebackException) -> str:
    """Return a traceback in Python's format, without frames of cellmesh."""
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            each.stack[:] = without_own(each.stack)
            others = (each.__cause__, each.__context__, *(each.exceptions or ()))
            left += [other for other in others if other is not None]
    return "".join(error.format())


def _marked(place: str, text: str) -> str:
    return f"{_BEGIN}{place}{_MIDDLE}{text.replace(chr(0), '')}{_END}"


def make_renderer(like: AutoFormattedTB) -> AutoFormattedTB:
    """Return a traceback renderer that marks libraries' frames, with the settings of IPython's own
    renderer.
    """
    renderer: AutoFormattedTB = _Renderer.__new__(_Renderer)
    vars(renderer).update(vars(like))
    return renderer


def with_all_frames(text: str) -> str:
    """Return a traceback rendered by `make_renderer` in the form that IPython would show, with all
    frames of libraries.
    """
    text = text.replace(f"{_LEFT_OUT}\n", "")
    return _ONE.sub(lambda found: found["text"], text) if "\x00" in text else text


def with_few_frames(text: str) -> str:
    """Return a traceback rendered by `make_renderer`, with consecutive frames of libraries
    shortened to one line.
    """
    text = text.replace(f"{_LEFT_OUT}\n", "")
    return _RUN.sub(_describe_run, text) if "\x00" in text else text


def _describe_run(run: re.Match[str]) -> str:
    places = [found["place"] for found in _ONE.finditer(run[0])]
    end = "\n\n" if run[0].endswith("\n") else "\n"  # blank lines separate IPython's frames
    number = f"{len(places)} frames, to " if len(places) > 1 else ""
    return f"    [... {number}{places[-1]}]{end}"


def name_cells_in_warnings(cell_of: Callable[[str], int]) -> None:
    """Make warnings name cells as tracebacks do (``In[27]:3``), not by their code files.

    Args:
        cell_of: returns n of the cell ``In[n]`` with a code file name, 0 if none has it.
    """
    plain: Callable[..., str] = warnings.formatwarning

    def format_warning(
        message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if cell := cell_of(filename):
            line = line or linecache.getline(filename, lineno).strip() or None
            filename = f"In[{cell}]"
        return plain(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


# ---------------------------------------------------------------- cells

# Number of cells whose sources are kept for tracebacks.
_MAX_CELLS = 3_000


class RankCompiler(CachingCompiler):
    """IPython's compiler on a rank: names cells in tracebacks (``In[3]``), also cells whose
    functions were pickled and sent to the rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[str, None] = {}  # code files of cells, oldest first

    def is_plain(self) -> bool:
        """Return whether this rank compiles cells as the controller does: no earlier cell had a
        future statement, and `assert` is not optimized away.
        """
        return not (self.flags & PyCF_MASK or sys.flags.optimize)

    def ast_parse(self, *args: Any, **kwargs: Any) -> ast.AST:
        """Parse a cell, in spite of parses on other threads."""
        return parse_again(lambda: super(RankCompiler, self).ast_parse(*args, **kwargs))

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Name the code file of a cell, and store the cell's source under that name."""
        name = self.get_code_name(raw_code or "", transformed_code, number)
        self.keep(name, transformed_code, number)
        return name

    def keep(self, name: str, source: str, number: int) -> None:
        """Store a cell's source under the name of its code file, for tracebacks; drop the oldest
        cell beyond a maximum number.
        """
        self._filename_map[name] = number
        lines = [f"{line}\n" for line in source.splitlines()]
        linecache.cache[name] = (len(source), None, lines, name)
        self._names.pop(name, None)
        self._names[name] = None  # as the newest
        if len(self._names) > _MAX_CELLS:
            oldest = next(iter(self._names))
            del self._names[oldest]
            self._filename_map.pop(oldest, None)
            linecache.cache.pop(oldest, None)

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return the name of a code file in tracebacks, as ``Cell In[3]`` for a cell."""
        cell = payload.cell_of(name)
        return ("Cell", f"In[{cell}]") if cell else super().format_code_name(name)
