"""Writes magics that changed the ranks (push, seed, save, load) as plain torch. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .frame import Draft, PagePart, condition
from .history import Checkpoint, Held, Push, Seed, quote
from .rewriting import under

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"


def write_push(count: int, push: Push, draft: Draft) -> PagePart:
    """Write pushed values that have a Python literal; leave a place to fill in for the others."""
    lines, missing = [], []
    for name, value in push.values.items():
        if value.literal:
            lines.append(f"{name} = {value.literal}\n")
            if value.is_temporary:
                draft.warnings.append(
                    f"In [{count}] pushed `{name}`, a path among temporary files, which may be gone"
                )
        else:
            missing.append(f"# {name} = ...  # supply it: {value.description}\n")
            draft.warnings.append(
                f"In [{count}] pushed `{name}`, a {value.description}: the script must be given it"
            )
    text = "".join(lines)
    if text and push.ranks is not None:
        text = under(condition(draft, *push.ranks), text)
    return PagePart((count,), f": %dist_push {' '.join(push.values)}", "".join(missing) + text)


def write_seed(count: int, seed: Seed, uses_numpy: bool, draft: Draft) -> PagePart:
    """Write the seeding of all generators that the script imports."""
    value = f"{seed.seed} + {draft.rank}" if seed.per_rank else str(seed.seed)
    draft.imports.add("import random")
    lines = [f"random.seed({value})\n"]
    if uses_numpy:
        draft.imports.add("import numpy")
        lines.append(f"numpy.random.seed({value})\n")
    lines.append(f"torch.manual_seed({value})\n")
    option = " --per-rank" if seed.per_rank else ""
    return PagePart((count,), f": %dist_seed {seed.seed}{option}", "".join(lines))


def write_checkpoint(count: int, checkpoint: Checkpoint, draft: Draft) -> PagePart:
    """Write a save or a load with `torch.distributed.checkpoint`."""
    kinds = {held.kind for held in checkpoint.items}
    action = checkpoint.action
    names = {"model": "model_state_dict", "optimizer": "optimizer_state_dict"}
    wanted = [f"get_{names[kind]}" for kind in sorted(kinds & names.keys())]
    if action == "load":
        wanted += [f"set_{names[kind]}" for kind in sorted(kinds & names.keys())]
    draft.imports.add("import torch.distributed.checkpoint as dcp")
    draft.imports.update(f"from {_STATE_DICTS} import {name}" for name in wanted)
    state = "".join(f"    {_key(held, draft)}: {_state(held)},\n" for held in checkpoint.items)
    title = f": %dist_{action} {' '.join(held.name for held in checkpoint.items)} {checkpoint.path}"
    if action == "save":
        text = (
            f"checkpoint = {{\n{state}}}\ndcp.save(checkpoint, "
            f"checkpoint_id={quote(checkpoint.path)})\n"
        )
        return PagePart((count,), title, text)
    lines = [
        f"checkpoint = {{\n{state}}}\ndcp.load(checkpoint, "
        f"checkpoint_id={quote(checkpoint.path)})\n"
    ]
    lines += [_restore(held, draft) for held in checkpoint.items]
    return PagePart((count,), title, "".join(lines))


def _key(held: Held, draft: Draft) -> str:
    return f'f"{held.name}@{{{draft.rank}}}"' if held.by_rank else f'"{held.name}"'


def _state(held: Held) -> str:
    match held.kind:
        case "model":
            return f"get_model_state_dict({held.name})"
        case "optimizer":
            return f"get_optimizer_state_dict({held.model}, {held.name})"
        case "stateful":
            return f"{held.name}.state_dict()"
    return held.name


def _restore(held: Held, draft: Draft) -> str:
    saved = f"checkpoint[{_key(held, draft)}]"
    match held.kind:
        case "model":
            return f"set_model_state_dict({held.name}, {saved})\n"
        case "optimizer":
            return f"set_optimizer_state_dict({held.model}, {held.name}, {saved})\n"
        case "stateful":
            return f"{held.name}.load_state_dict({saved})\n"
        case "tensor":  # was filled in place
            return ""
    return f"{held.name} = {saved}\n"


def describe_dims(dims: Mapping[str, int]) -> str:
    """Write mesh dims as ``%dist_mesh`` takes them: ``dp=2,tp=4``."""
    return " ".join(f"{name}={size}" for name, size in dims.items())
