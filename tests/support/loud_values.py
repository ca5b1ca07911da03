"""Values with code of their own, which notes that it runs."""

from __future__ import annotations

from typing import Any

import torch

RAN: list[str] = []


def noting(name: str, answer: Any = None) -> Any:
    """A method that notes its name in `RAN`, and raises or returns the answer."""

    def run(*args: Any, **kwargs: Any) -> Any:
        RAN.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run


class Loud:
    """Has code for all that Python asks of an object; its hash is that of a string."""

    kind = "a class's"

    def __init__(self) -> None:
        self.held = torch.ones(2)

    __class__ = property(noting("class", object))  # type: ignore[assignment]
    weight = property(noting("property", 1))
    __getattr__ = noting("getattr", AttributeError())
    __getitem__ = noting("getitem", 3)
    __repr__ = noting("repr", "Loud")
    __hash__ = noting("hash", hash("a"))
    __eq__ = noting("eq", False)
    __lt__ = noting("lt", False)


class LoudTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        RAN.append("torch function")
        return super().__torch_function__(func, types, args, kwargs or {})
