"""Notices that a cell has bound a name which the rank was given (`rank`, `world_size`, `device`,
`mesh`) to something else: later cells would compute with it, often on some ranks only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

_NAMES = ("rank", "world_size", "device", "mesh")


class GivenNames:
    """The values of a rank's own names, as the rank was given them; a name whose value has been
    replaced is said once.

    Args:
        namespace: of the rank; has these values.

    Attributes:
        values: by name, without those that have been said.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self.values: dict[str, Any] = {}
        self.renew(_NAMES)

    def renew(self, names: Iterable[str]) -> None:
        """Note the values that the rank has just been given."""
        self.values.update({n: self._namespace[n] for n in names if n in self._namespace})

    def forget(self, names: Iterable[str]) -> None:
        """Forget names that the notebook itself has bound, by a push."""
        for name in names:
            self.values.pop(name, None)

    def say(self) -> str:
        """Say which names have another value now, and how to have theirs again; "" for none."""
        texts = []
        for name, given in list(self.values.items()):
            value = self._namespace.get(name, given)
            if value is given or _is_alike(value, given):
                continue
            del self.values[name]
            texts.append(
                f"`{name}` now has another value than this rank was given: "
                f"{_how_to_restore(name, given)} restores it"
            )
        return "\n".join(texts)


def _is_alike(value: Any, given: Any) -> bool:
    """Return whether a value does as well as the given one; runs no code of users."""
    kind = type(given)
    with contextlib.suppress(Exception):  # a mesh that is only half made
        if kind.__name__ == "device" and type(value) in (str, int, kind):
            value = kind(value)  # a device without index is the rank's own
            return bool(value.type == given.type and value.index in (None, given.index))
        return type(value) is kind and bool(value == given)
    return False


def _how_to_restore(name: str, given: Any) -> str:
    if name == "device":
        return f"`device = torch.device({str(given)!r})`"
    if name == "mesh":
        dims = zip(given.mesh_dim_names, given.shape, strict=True)
        return f"`%dist_mesh {' '.join(f'{dim}={size}' for dim, size in dims)}`"
    return f"`{name} = dist.get_{name}()`"
