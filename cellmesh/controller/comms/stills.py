"""What is left of a rank's widget once nobody answers for it: its last state, as text and HTML;
pure.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .mirror import Mirror

_MODEL = "IPY_MODEL_"
_MAX_LINES = 200
_MAX_CHARACTERS = 2_000
_REMARK = "font:11px monospace;opacity:.65;margin:2px 0"
_STYLE = "font:13px monospace;white-space:pre-wrap;line-height:1.5"


def draw_still(
    model_id: str, mirrors: Mapping[str, Mirror], text: str, why: str
) -> tuple[str, str]:
    """Draw a widget and those in it.

    Args:
        model_id: which.
        mirrors: all states that are known.
        text: of one whose state says nothing.
        why: it changes no more.

    Returns:
        Text, and HTML without script; what comes from users is escaped.
    """
    lines: list[tuple[str, str]] = []
    _add(model_id, mirrors, set(), lines)
    if [line for line, _ in lines if not line.startswith("[")] == []:
        lines = [(text, f"<div>{html.escape(text)}</div>")]
    body = "".join(content for _, content in lines)
    drawn = f'<div style="{_STYLE}">{body}</div><div style="{_REMARK}">{html.escape(why)}</div>'
    return "\n".join([*(line for line, _ in lines), why]), drawn


def _add(
    model_id: str, mirrors: Mapping[str, Mirror], seen: set[str], lines: list[tuple[str, str]]
) -> None:
    mirror = mirrors.get(model_id)
    if mirror is None or model_id in seen or len(lines) >= _MAX_LINES:
        return
    seen.add(model_id)
    state = mirror.state
    children = [child for child in _as_list(state.get("children")) if str(child).startswith(_MODEL)]
    if children:
        for child in children:
            _add(str(child).removeprefix(_MODEL), mirrors, seen, lines)
    elif "outputs" in state:
        lines.extend(map(_draw_output, _as_list(state["outputs"])))
    else:
        line = _describe(state)[:_MAX_CHARACTERS]
        lines.append((line, f"<div>{html.escape(line)}</div>"))


def _describe(state: Mapping[str, Any]) -> str:
    """A widget's words and its value, in a line."""
    name = str(state.get("_model_name", "")).removesuffix("Model")
    label = str(state.get("description") or "")
    options, index = state.get("_options_labels"), state.get("index")
    value = state.get("value")
    if isinstance(options, list) and isinstance(index, int) and 0 <= index < len(options):
        value = options[index]
    if value is None or isinstance(value, dict):
        return f"[{label or name}]"
    return f"{label}: {value}" if label else str(value)


def _draw_output(output: Any) -> tuple[str, str]:
    if not isinstance(output, dict):
        return "", ""
    data = output.get("data") or {"text/plain": output.get("text", "")}
    text = str(data.get("text/plain", ""))[-_MAX_CHARACTERS:]
    image = data.get("image/png")
    if isinstance(image, str):
        return text, f'<div><img src="data:image/png;base64,{html.escape(image.strip())}"/></div>'
    return text.rstrip("\n"), f"<div>{html.escape(text)}</div>"


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
