"""Reads JSON that ranks send, and repairs what front ends refuse."""

from __future__ import annotations

import json
from typing import Any


def unpack(packed: bytes) -> Any:
    """Decode JSON; replace lone surrogates, which no front end accepts, by "?"."""
    value = json.loads(packed)
    if b"\\ud" in packed:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def unpack_bundle(packed: bytes) -> dict[str, Any]:
    """Decode a MIME bundle with metadata, whatever types user code has given for its values."""
    bundle = unpack(packed)
    data, metadata = bundle.get("data"), bundle.get("metadata")
    return {
        **bundle,
        "data": data if isinstance(data, dict) else {"text/plain": str(data)},
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
