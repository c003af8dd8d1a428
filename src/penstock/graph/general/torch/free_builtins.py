"""Keeps ``len(tensor)``, ``int(size)`` and ``float(size)`` free in the files of a module, and two functions of PyTorch.

Python's own functions must return a number of Python, with which PyTorch fixes a free size to that of the example.
``torch.linspace`` and ``torch.as_tensor`` take numbers of Python and fix it, too.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch._refs import tensor as tensor_of_numbers
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["FreeFunctions", "free_builtins"]

_NOT_OWN: Final = ("torch", "builtins", "penstock")
_REPLACED: Final = threading.RLock()  # held while files have the functions of this module


def _length(value: Any) -> Any:
    """Return the length of a value, of a tensor with dimensions as PyTorch's number of its first size."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else builtins.len(value)


class _NumberType(type):
    """The type of classes that stand for ``int`` and ``float`` where a file calls them or checks instances."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            converted: Any = torch.sym_int if cls is _FreeInt else torch.sym_float
            return converted(args[0])
        return cls.__base__(*args, **options)  # type: ignore[misc]

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)  # type: ignore[arg-type]

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__base__)  # type: ignore[arg-type]


class _FreeInt(int, metaclass=_NumberType):
    """``int``, which returns a free integer for a free number."""


class _FreeFloat(float, metaclass=_NumberType):
    """``float``, which returns a free number for a free size."""


_FREE: Final[Mapping[str, Any]] = {"len": _length, "int": _FreeInt, "float": _FreeFloat}


@contextmanager
def free_builtins(module: nn.Module) -> Iterator[None]:
    """Replace these functions in the Python files of the classes of a module, other than PyTorch's own.

    ``int`` and ``float`` stay Python's in a file that also uses them as types (``dtype=int``, ``type(n) is float``),
    and in one without a source.  One thread replaces at a time; others wait.  Code of these files that runs in other
    threads meanwhile calls the replacements, too.  They return what Python's return, except for PyTorch's free numbers.
    """
    names = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    own = [sys.modules[name] for name in names if name in sys.modules and name.partition(".")[0] not in _NOT_OWN]
    with _REPLACED:
        changed = [(vars(file), name) for file in own for name in _replaceable(file) if name not in vars(file)]
        for variables, name in changed:
            variables[name] = _FREE[name]
        try:
            yield
        finally:
            for variables, name in changed:
                del variables[name]


class FreeFunctions(TorchFunctionMode):
    """Makes ``torch.linspace`` and ``torch.as_tensor`` of free numbers from functions that keep them free."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or the one that stands for it."""
        kwargs = kwargs or {}
        replacement = _FUNCTIONS.get(func)
        is_free = replacement and any(map(_is_free, pytree.tree_leaves((args, kwargs))))
        return (replacement if replacement and is_free else func)(*args, **kwargs)


def _is_free(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
    """Return ``steps`` numbers from ``start`` to ``end``; PyTorch computes the second half from the end."""
    if any(isinstance(value, torch.Tensor) for value in (start, end)) or not (_is_free(start) or _is_free(end)):
        return torch.linspace(start, end, steps, **options)
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    numbers = torch.arange(steps, dtype=dtype, **options)
    at_least: Any = torch.sym_max
    values: torch.Tensor = numbers * ((end - start) / at_least(steps - 1, 1)) + start
    return values


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    make: Any = tensor_of_numbers
    made: torch.Tensor = make(data, dtype=dtype, device=device)
    return made


_FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {torch.linspace: _linspace, torch.as_tensor: _as_tensor}


def _replaceable(file: ModuleType) -> frozenset[str]:
    """Return the functions that a replacement changes in no other way than for free numbers."""
    try:
        return _without_types(inspect.getsource(file))
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or none of Python
        return frozenset(["len"])


@lru_cache(maxsize=64)
def _without_types(source: str) -> frozenset[str]:
    """Return the names of ``_FREE`` without those that a file uses as types.  PyTorch compares types by identity."""
    loaded: list[ast.Name] = []
    allowed: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in ("int", "float"):
            loaded.append(node)
        elif isinstance(node, ast.Call):
            allowed.update(_called(node))
        elif isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            allowed.update(ast.walk(node.annotation))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            allowed.update(ast.walk(node.returns))
    return frozenset(_FREE) - {node.id for node in loaded if node not in allowed}


def _called(call: ast.Call) -> Sequence[ast.expr]:
    """Return what a call calls itself, and as ``map``, and the types with which it checks instances."""
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if kind in ("isinstance", "issubclass") and len(call.args) == 2:
        return (call.func, *_alternatives(call.args[1]))
    return (call.func, *call.args[:1]) if kind == "map" else (call.func,)


def _alternatives(types: ast.expr) -> Sequence[ast.expr]:
    """Return the types in ``(int, float)`` and ``int | float``."""
    if isinstance(types, ast.Tuple):
        return [kind for element in types.elts for kind in _alternatives(element)]
    if isinstance(types, ast.BinOp) and isinstance(types.op, ast.BitOr):
        return [*_alternatives(types.left), *_alternatives(types.right)]
    return (types,)
