"""Keeps ``len(tensor)``, ``int(size)`` and ``float(size)`` free in the files of a module.

Python's own functions must return a number of Python, with which PyTorch fixes a free size to that of the example.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

__all__ = ["free_builtins"]

_NOT_OWN: Final = ("torch", "builtins", "penstock")


def _length(value: Any) -> Any:
    """Return the length of a value, of a tensor with dimensions as PyTorch's number of its first size."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else builtins.len(value)


class _NumberType(type):
    """The type of classes that stand for ``int`` and ``float``, also in comparisons of types."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            converted: Any = torch.sym_int if cls is _FreeInt else torch.sym_float
            return converted(args[0])
        return cls.__base__(*args, **options)  # type: ignore[misc]

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)  # type: ignore[arg-type]

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__base__)  # type: ignore[arg-type]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class _FreeInt(int, metaclass=_NumberType):
    """``int``, which returns a free integer for a free number."""


class _FreeFloat(float, metaclass=_NumberType):
    """``float``, which returns a free number for a free size."""


_FREE: Final[Mapping[str, Any]] = {"len": _length, "int": _FreeInt, "float": _FreeFloat}


@contextmanager
def free_builtins(module: nn.Module) -> Iterator[None]:
    """Replace these functions in the Python files of the classes of a module, other than PyTorch's own."""
    names = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    own = [sys.modules[name] for name in names if name in sys.modules and name.partition(".")[0] not in _NOT_OWN]
    changed = [(vars(file), name) for file in own for name in _FREE if name not in vars(file)]
    for variables, name in changed:
        variables[name] = _FREE[name]
    try:
        yield
    finally:
        for variables, name in changed:
            del variables[name]
