"""JSON that ranks send, in a form that every front end takes."""

from __future__ import annotations

import json
from typing import Any


def unpack(packed: bytes) -> Any:
    """Read JSON; half of a character (a lone surrogate), which no front end takes, becomes "?"."""
    value = json.loads(packed)
    if b"\\ud" in packed:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def unpack_bundle(packed: bytes) -> dict[str, Any]:
    """A bundle of MIME types with its metadata, whatever user code has given for them."""
    bundle = unpack(packed)
    data, metadata = bundle.get("data"), bundle.get("metadata")
    return {
        **bundle,
        "data": data if isinstance(data, dict) else {"text/plain": str(data)},
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
