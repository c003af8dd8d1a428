"""Ops of users' own: written in PyTorch, run natively by the C function of the same name.

An op is declared by ``custom_op``, as in examples/custom_op/network.py.  Networks call what it returns; eager mode runs
the kernel of a library that ``penstock.load_ops`` loaded, or the PyTorch function while there is none.  Capture writes
the op's name and version into the graph, and whoever runs the bundle loads the library (docs/custom-ops.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from penstock.config import check_integer
from penstock.env import use_reference
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.ops.eager import EagerOp, torch_schema
from penstock.ops.table import Op, add_custom_op, loaded_version

__all__ = ["custom_op"]

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*::[a-z_][a-z0-9_]*")
_ARGUMENT: Final = r"(?:Tensor|Weight)\?? [a-z_][a-z0-9_]*"
_ATTR: Final = r"(?:int|float|bool|str) [a-z_][a-z0-9_]*"
_SCHEMA: Final = re.compile(
    rf"\(Tensor [a-z_][a-z0-9_]*(?:, {_ARGUMENT}){{0,7}}(?:, \*(?:, {_ATTR}){{1,8}})?\)"
    r" -> (?:Tensor|\(Tensor, Tensor\))"
)
_libraries: dict[str, torch.library.Library] = {}
_ops: dict[str, _CustomOp] = {}


class _CustomOp(EagerOp):
    """One op of a user's own: outputs are shaped as its PyTorch function shapes them."""

    def __init__(self, op: Op, reference: Callable[..., Any]) -> None:
        super().__init__(op, reference)
        self.op = op
        self._types = lru_cache(256)(self._infer)

    def _infer(self, inputs: tuple[Any, ...], attrs: tuple[tuple[str, Any], ...]) -> list[tuple[Any, torch.dtype]]:
        metas = [None if one is None else torch.empty(one[0], dtype=one[1], device="meta") for one in inputs]
        return [(tensor.shape, tensor.dtype) for tensor in _tuple_of(self.reference(*metas, **dict(attrs)))]

    def replace_reference(self, reference: Callable[..., Any]) -> None:
        """From now on the op is this function, and has its shapes."""
        self.reference = reference
        self._types.cache_clear()

    def allocate(self, tensors: tuple[Tensor | None, ...], attrs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Fresh outputs, of the shapes that the PyTorch function gives."""
        inputs = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self._types(inputs, tuple(attrs.items())))

    def fake(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """The function itself, on tensors without values."""
        return self.reference(*tensors, **attrs)

    def run(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """The kernel of the loaded library, else the function."""
        found = None if use_reference() else loaded_version(self.name)
        if found is None:
            return self.reference(*tensors, **attrs)
        if found != (self.op.version, self.op.schema):
            raise UnsupportedError(
                f"[{self.name}] expected version {self.op.version} {self.op.schema}, as declared, found version "
                f"{found[0]} {found[1]} in the library that is loaded"
            )
        return super().run(*tensors, **attrs)


def _tuple_of(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def custom_op(
    name: str, *, version: int, schema: str, reference: Callable[..., Any], tolerance: float = 0.0
) -> Callable[..., Any]:
    """Declares an op of one's own and returns it as a function of tensors (positional) and attributes (by keyword).

    ``name`` is "owner::op"; ``version`` and ``schema`` are those of the library's op (core/include/penstock_op.h).
    ``reference`` is the op in plain PyTorch, which says what it computes and what shapes come out: all outputs are new,
    contiguous float32 or int32 tensors with equally many rows.  ``tolerance`` bounds the kernel's relative error
    against it; 0 promises the same bits.  Declaring the same again, as a script that is read twice does, takes the
    newer ``reference``.

    Raises InvalidArgumentError for a malformed name, version, schema or tolerance, and for another version or schema of
    an op that is declared.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 63 or name.startswith("penstock::"):
        raise InvalidArgumentError(f'name: expected "owner::op" of small letters, digits and _, found {name!r:.80}')
    check_integer(f"{name}: version", version, 1, 2**31 - 1)
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
        raise InvalidArgumentError(
            f'{name}: schema: expected a line as "(Tensor x, Weight? bias, *, float limit) -> Tensor", found '
            f"{schema!r:.200}"
        )
    if not callable(reference):
        raise InvalidArgumentError(f"{name}: reference: expected a function, found {type(reference).__name__}")
    if not (isinstance(tolerance, (int, float)) and math.isfinite(tolerance) and tolerance >= 0):
        raise InvalidArgumentError(f"{name}: tolerance: expected 0 or more, found {tolerance!r:.60}")
    op = Op(name, version, schema, float(tolerance))
    known = _ops.get(name)
    if known is None:
        add_custom_op(op)
        _ops[name] = _register(op, reference)
    elif (known.op.version, known.op.schema) != (version, schema):
        raise InvalidArgumentError(f"{name}: version {known.op.version} {known.op.schema} is declared already")
    else:
        known.replace_reference(reference)
    owner, short = name.split("::")
    function: Callable[..., Any] = getattr(getattr(torch.ops, owner), short)
    return function


def _register(op: Op, reference: Callable[..., Any]) -> _CustomOp:
    """With PyTorch, as an op that capture sees whole."""
    owner, short = op.name.split("::")
    if owner not in _libraries:
        _libraries[owner] = torch.library.Library(owner, "FRAGMENT")  # type: ignore[no-untyped-call]
    library, custom = _libraries[owner], _CustomOp(op, reference)
    library.define(short + torch_schema(op.schema), tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(short, custom.run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(op.name, custom.fake, lib=library)
    return custom
