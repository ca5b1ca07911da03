"""Completes code and shows help from a rank's namespace, by IPython's completer and inspector.

Both run beside the main thread, and only while it is idle, so that neither delays a cell or its
interrupt. While a rank runs a cell, only names are completed.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import keyword
import os
import re
import threading
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from IPython.core.completer import IPCompleter, completions_sorting_key, position_to_cursor
from torch import nn

from ..wire.codec import Frame
from ..wire.inspect import Complete, CompletionRequest, Completions, Explain
from .inspect.names import users_names
from .inspect.safe_repr import quiet_text
from .inspect.static_eval import NeedsCode, Unknown, follow, in_classes

if TYPE_CHECKING:
    from .rank.features import RankContext
    from .rank.shell import RankShell

_MAX_TEXTS = 5000


@dataclass(frozen=True)
class CompletionHandler:
    """Answers requests for completions and help on one rank, on any thread.

    Args:
        context: context of the rank.
    """

    context: RankContext
    _in_use: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, request: CompletionRequest, buffers: tuple[Frame, ...]) -> Completions | str:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        return self._answer(request, is_idle=True)

    def handle_beside(self, request: CompletionRequest) -> Completions | str:
        """Answer a request for completions or help on another thread; while the main thread is
        busy, complete only from names.
        """
        # Completion may run an object's code, which may never return: let no second thread wait for
        # it.
        is_idle = self.context.interrupts.running < 0 and self._in_use.acquire(blocking=False)
        try:
            return self._answer(request, is_idle)
        finally:
            if is_idle:
                self._in_use.release()

    def _answer(self, request: CompletionRequest, is_idle: bool) -> Completions | str:
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(request, Complete):
                return complete(self.context.shell, request, is_idle)
            return explain(self.context.shell, request, is_idle)


make_handler = CompletionHandler


# ---------------------------------------------------------------- completion

_NAME = re.compile(r"(?<![\w.'\"])(?:[^\W\d]\w*)?$")
_PATH = re.compile(
    r"(?<![\w.)\]}'\"])[^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\n]*'|\"[^\"\n]*\")\])*$"
)
_MATCHERS = {"dict_key_matcher", "python_matcher", "python_matches", "python_func_kw_matcher"}
if "eval" in IPCompleter.python_func_kw_matches.__code__.co_names:
    _MATCHERS.remove("python_func_kw_matcher")  # before IPython 9, it evaluates properties


class NameCompleter(IPCompleter):
    """IPython's completer without magics and files, which the notebook completes by itself."""

    @property
    def matchers(self) -> list[Any]:
        """The IPython matchers that are used: for names, attributes, dict keys and keyword
        arguments.
        """
        return [each for each in super().matchers if getattr(each, "__name__", "") in _MATCHERS]

    def _evaluate_expr(self, expr: str) -> Any:
        # IPython's guarded evaluation refuses attributes of modules, which have a `__getattr__`.
        # Given several lines, it would try each part of them, which takes seconds.
        line = expr.rpartition("\n")[2]
        path = _PATH.search(line)
        if path is not None:
            with contextlib.suppress(NeedsCode, NameError, AttributeError, LookupError):
                return follow(path.group(), self.namespace)
        return super()._evaluate_expr(line)  # type: ignore[no-untyped-call]


def complete(shell: RankShell, request: Complete, is_idle: bool) -> Completions:
    """Return the possible completions at the cursor of a `Complete` request.

    Args:
        shell: shell of the rank.
        request: the code and the cursor.
        is_idle: whether no cell runs; while one runs, only names are completed.
    """
    name = _NAME.search(request.code[: request.cursor])
    if name is not None and (request.users_only or not is_idle):
        names: Iterable[str] = users_names(shell)
        if not request.users_only:
            names = [*names, *shell.user_ns, *vars(builtins), *keyword.kwlist]
        typed = name.group()
        is_shown = typed.startswith("_")
        fitting = (each for each in names if each.startswith(typed))
        found = {each: "variable" for each in fitting if is_shown or not each.startswith("_")}
        return _completions(request, typed, found)
    return _complete_by_ipython(shell, request) if is_idle else _completions(request, "", {})


def _complete_by_ipython(shell: RankShell, request: Complete) -> Completions:
    completer = NameCompleter(  # type: ignore[no-untyped-call]
        shell=shell, namespace=shell.user_ns, global_namespace={}, use_jedi=False
    )
    line, column = position_to_cursor(request.code, request.cursor)
    # Not `completions`: its warnings can be silenced only for all threads of the process.
    results = completer._complete(full_text=request.code, cursor_line=line, cursor_pos=column)
    fragment = ""
    found: dict[str, str] = {}
    for result in results.values():
        texts = {each.text: each.type or "" for each in result["completions"]}
        if texts and (not found or result["matched_fragment"] == fragment):
            fragment = result["matched_fragment"]
            found |= texts
    if "dict key" in found.values():
        return _completions(request, fragment, found, is_whole=True)
    # Texts of attributes start after the dot; in some versions of IPython, with the owner.
    _, dot, typed = fragment.rpartition(".")
    found = {text.rpartition(".")[2]: kind for text, kind in found.items()}
    return _completions(request, typed, found, is_whole=bool(dot))


def _completions(
    request: Complete, typed: str, found: dict[str, str], is_whole: bool = False
) -> Completions:
    texts = tuple(sorted(found, key=completions_sorting_key)[:_MAX_TEXTS])
    kinds = tuple(found[text] for text in texts)
    return Completions(request.cursor - len(typed), request.cursor, texts, kinds, is_whole)


# ---------------------------------------------------------------- help

_BOUND_BY_PYTHON = (
    types.FunctionType, staticmethod, classmethod, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
_NO_STRING_FORM = 2


def explain(shell: RankShell, request: Explain, is_idle: bool) -> str:
    """Return the help on a name, as for ``name?`` or ``name??``; "" if this rank lacks the name."""
    if not is_idle:
        is_known = re.split(r"\W", request.name, maxsplit=1)[0] in shell.user_ns
        return f"{request.name}: help is shown when no cell runs on the rank" if is_known else ""
    try:
        found = _find(request.name, shell)
    except (Unknown, NameError, AttributeError, LookupError):
        return ""
    inspector = copy.copy(shell.inspector)
    inspector.str_detail_level = _NO_STRING_FORM  # a repr reads memory that a cell may free
    fields = inspector.info(found, request.name, detail_level=request.detail)
    fields["string_form"] = quiet_text(found)
    if issubclass(type(found), nn.Module):
        fields["definition"] = inspector._getdef(found.forward, request.name)
        reprs = [in_classes(type(each), "__repr__") for each in found.modules()]
        if all(each.__module__.startswith("torch.") for each in reprs):  # these read no elements
            fields["string_form"] = str(found)
    file = fields["file"] or ""
    if cell := shell.cell_of(file) or shell.cell_of(os.path.basename(file)):
        fields["file"] = f"In[{cell}]"
    bundle = inspector._make_info_unformatted(found, fields, None, request.detail, ())
    return str(inspector.format_mime(bundle)["text/plain"])


def _find(name: str, shell: RankShell) -> Any:
    """Return the object of a dotted name; for a property, the property object, as reading its value
    would run code.
    """
    try:
        return follow(name, shell.user_ns)
    except NeedsCode:
        owner_name, _, last = name.rpartition(".")
        owner = follow(owner_name, shell.user_ns)
        kind = owner if isinstance(owner, type) else type(owner)
        found = in_classes(kind, last)
        if type(found) in _BOUND_BY_PYTHON:
            return found.__get__(None if owner is kind else owner, kind)
        return found
