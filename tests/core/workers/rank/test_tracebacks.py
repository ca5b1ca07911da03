"""Tracebacks in which the user's frames stand out."""

from __future__ import annotations

import json
import linecache
import textwrap
import traceback
import types
import warnings

import pytest
from IPython.core.ultratb import AutoFormattedTB

from cellmesh.wire.codec import encode
from cellmesh.workers.rank.tracebacks import (
    format_without_own_frames,
    make_renderer,
    name_cells_in_warnings,
    with_all_frames,
    with_few_frames,
)
from cellmesh.workers.static_lookup import plain_traceback


def raised(source: str, **names: object) -> BaseException:
    """The exception of a cell."""
    filename = f"<cell {abs(hash(source))}>"
    source = textwrap.dedent(source)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(source, filename, "exec"), {"__name__": "__main__", **names})
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def render(error: BaseException, mode: str = "Context") -> str:
    like = AutoFormattedTB(mode=mode, theme_name="nocolor")  # type: ignore[no-untyped-call]
    renderer = make_renderer(like)
    assert renderer.mode == mode
    tb: types.TracebackType | None = error.__traceback__
    lines = renderer.structured_traceback(type(error), error, tb, tb_offset=0)
    return str(renderer.stb2text(lines))


def test_a_run_of_frames_of_libraries_is_one_line() -> None:
    text = render(raised("import json\n\njson.loads('{')\n", json=json))
    few, whole = with_few_frames(text), with_all_frames(text)
    assert few.count("[... 3 frames, to json/decoder.py:") == 1
    assert "json.loads('{')" in few
    assert "raw_decode" in few
    assert "JSONDecodeError: Expecting property name" in few
    assert len(few.splitlines()) < 15 < len(whole.splitlines())
    assert "[... " not in whole
    assert "\x00" not in few + whole


def test_own_frames_are_left_out() -> None:
    error = raised("encode([object()])", encode=encode)
    text = render(error)
    assert "wire/codec" not in with_all_frames(text) + with_few_frames(text)
    assert "encode([object()])" in with_few_frames(text)
    assert "\n\n\n" not in with_all_frames(text) + with_few_frames(text)
    assert "\x00" not in with_all_frames(text) + with_few_frames(text)
    group = ExceptionGroup("several", [error])
    for plain in (
        format_without_own_frames(traceback.TracebackException.from_exception(group)),
        render(error, "Plain"),
    ):
        assert "wire/codec" not in plain
        assert "encode([object()])" in plain


def test_warnings_name_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    name_cells_in_warnings(lambda name: 27 if "-27-" in name else 0)
    linecache.cache["<ipython-input-27-abc>"] = (6, None, ["one\n", "two()\n"], "")
    text = warnings.formatwarning("old", UserWarning, "<ipython-input-27-abc>", 2)
    assert text == "In[27]:2: UserWarning: old\n  two()\n"
    assert warnings.formatwarning("old", UserWarning, "/a.py", 1).startswith("/a.py:1: ")


def test_a_traceback_that_is_not_rendered_has_the_notes_that_are_text() -> None:
    error = ValueError("no group")
    error.add_note("call init_process_group")
    error.__notes__.append(3)  # type: ignore[arg-type]
    assert plain_traceback(error, None) == (
        "Traceback (most recent call last):\nValueError: no group\ncall init_process_group"
    )
    error.__notes__ = 5  # type: ignore[assignment]
    assert plain_traceback(error, None).endswith("ValueError: no group")
