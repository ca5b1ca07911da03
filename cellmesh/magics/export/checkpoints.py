"""Finds out, for `%dist_export`, what the names are that ranks have just saved or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ...controller.mesh import Mesh
from ..line import unquote
from .history import Checkpoint, Held


def look_at_checkpoint(mesh: Mesh, action: str, words: Sequence[str]) -> Checkpoint:
    """Record a save or load that has ended; asks the ranks about its names.

    Args:
        mesh: who did it.
        action: "save" or "load".
        words: what the magic was given: names, and the path.
    """

    # A nested function travels as what it is: ranks import nothing of the notebook's.
    def look(names: list[str], path: str) -> list[tuple[str, str, str, str]]:
        """Return a value's name, kind, the model of an optimizer, and a digest of what may
        differ by rank.
        """
        import hashlib
        import pickle
        import sys

        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        namespace: dict[str, Any] = vars(sys.modules["__main__"])
        if not names:
            keys = FileSystemReader(path).read_metadata().state_dict_metadata
            names = list(dict.fromkeys(key.partition(".")[0].partition("@")[0] for key in keys))
        modules = {
            key: value for key, value in namespace.items() if isinstance(value, torch.nn.Module)
        }
        found = []
        for name in names:
            value = namespace[name]
            kind, model, digest = "value", "", ""
            if name in modules:
                kind = "model"
            elif isinstance(value, torch.optim.Optimizer):
                kind = "optimizer"
                wanted = {
                    id(parameter) for group in value.param_groups for parameter in group["params"]
                }
                owners = {
                    key: held
                    for key, module in modules.items()
                    if wanted <= (held := {id(parameter) for parameter in module.parameters()})
                }
                model = min(owners, key=lambda key: (key not in names, len(owners[key])))
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                kind = "stateful"
            else:
                kind = "tensor" if isinstance(value, torch.Tensor) else "value"
                if not hasattr(value, "device_mesh"):  # a DTensor says by itself what is where
                    digest = hashlib.blake2b(pickle.dumps(value)).hexdigest()
            found.append((name, kind, model, digest))
        return found

    *names, path = words
    told = mesh.run(look, names, unquote(path))
    items = []
    for rows in zip(*told.values(), strict=True):
        name, kind, model, _ = rows[0]
        items.append(Held(name, kind, model, by_rank=len({digest for *_, digest in rows}) > 1))
    done: Literal["save", "load"] = "save" if action == "save" else "load"
    return Checkpoint(done, tuple(items), unquote(path))
