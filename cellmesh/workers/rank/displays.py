"""Sends what a rank's shell displays as messages: values of last expressions, and
`display(...)`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from ...wire.output import DisplayKind

Show = Callable[[DisplayKind, bytes, str], None]


# Where an object lies in memory: it differs between ranks that show the same.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")


def _to_bundle(data: dict[str, Any], metadata: dict[str, Any] | None) -> bytes:
    text = data.get("text/plain")
    if len(data) > 1 and isinstance(text, str) and " at 0x" in text:
        data = {**data, "text/plain": _ADDRESS.sub(">", text)}
    return json.dumps({"data": data, "metadata": metadata or {}}, default=_jsonable).encode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):  # images; Jupyter carries them as base64 text
        return base64.b64encode(value).decode()
    return repr(value)


class RankDisplayHook(DisplayHook):
    """Sends the value of a cell's last expression."""

    def quiet(self) -> bool:
        shell: Any = self.shell
        ends_quietly = self.semicolon_at_end_of_expression(shell.cell_source)  # type: ignore[no-untyped-call]
        return shell.quiet_cell or bool(ends_quietly)

    def start_displayhook(self) -> None: ...

    def write_output_prompt(self) -> None: ...

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        shell: Any = self.shell
        shell.show("result", _to_bundle(format_dict, md_dict), "")

    def finish_displayhook(self) -> None: ...


class RankDisplayPublisher(DisplayPublisher):
    """Sends the arguments of ``display(...)``."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        display_id = str((transient or {}).get("display_id", ""))
        self.shell.show("update" if update else "display", _to_bundle(data, metadata), display_id)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.show("clear", b"wait" if wait else b"", "")
