"""Custom ops: written in PyTorch, and run natively by the C function of the same name.

``custom_op`` declares an op, as in examples/custom_op/network.py, and returns the function that networks call.  Eager
mode runs the kernel of a library that ``penstock.load_ops`` loaded, or else the PyTorch function.  Capture writes the
op's name and version into the graph, and a process that runs the bundle loads the library (docs/guides/custom-ops.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from penstock.config import check_integer
from penstock.env import use_reference
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.ops.eager import EagerOp, torch_schema
from penstock.ops.table import Op, add_custom_op, loaded_version

__all__ = ["custom_op", "custom_op_arrays", "custom_op_types"]

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
    """One custom op.  The PyTorch function determines the shapes of its outputs."""

    def __init__(self, op: Op, reference: Callable[..., Any]) -> None:
        super().__init__(op, reference)
        self.op = op
        self._types = lru_cache(256)(self._infer)

    def _infer(self, inputs: tuple[Any, ...], attrs: tuple[tuple[str, Any], ...]) -> list[tuple[Any, torch.dtype]]:
        metas = [None if spec is None else torch.empty(spec[0], dtype=spec[1], device="meta") for spec in inputs]
        result = self.reference(*metas, **dict(attrs))
        return [(tensor.shape, tensor.dtype) for tensor in (result if isinstance(result, tuple) else (result,))]

    def replace_reference(self, reference: Callable[..., Any]) -> None:
        """Replace the PyTorch function, and with it the shapes of the outputs."""
        self.reference = reference
        self._types.cache_clear()

    def allocate(self, tensors: tuple[Tensor | None, ...], attrs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return new outputs with the shapes that the PyTorch function gives."""
        inputs = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self._types(inputs, tuple(attrs.items())))

    def fake(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """Run the PyTorch function on tensors without values."""
        return self.reference(*tensors, **attrs)

    def run(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """Run the kernel of a loaded library, or else the PyTorch function."""
        loaded = None if use_reference() else loaded_version(self.name)
        if loaded is None:
            return self.reference(*tensors, **attrs)
        if loaded != (self.op.version, self.op.schema):
            raise UnsupportedError(
                f"[{self.name}] expected version {self.op.version} {self.op.schema} as declared, got version "
                f"{loaded[0]} {loaded[1]} in the loaded library"
            )
        return super().run(*tensors, **attrs)


def custom_op_types(
    name: str, inputs: Sequence[tuple[tuple[int, ...], str] | None], attrs: Mapping[str, Any]
) -> list[tuple[tuple[int, ...], str]] | None:
    """Return the shape and the type, "float32", of each output of a declared op for inputs of these; None if it is not
    declared in this process."""
    op = _ops.get(name)
    if op is None:
        return None
    metas = tuple(None if spec is None else (spec[0], getattr(torch, spec[1])) for spec in inputs)
    types = op._types(metas, tuple(attrs.items()))
    return [(tuple(int(size) for size in shape), str(dtype).removeprefix("torch.")) for shape, dtype in types]


def custom_op_arrays(name: str, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the PyTorch function of a declared op gives for numpy arrays, of which some may be None."""
    tensors = [None if array is None else torch.from_numpy(array.copy()) for array in arrays]
    tensors += [None] * (len(_ops[name].tensors) - len(tensors))
    result = _ops[name].reference(*tensors, **attrs)
    return tuple(tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,)))


def custom_op(
    name: str, *, version: int, schema: str, reference: Callable[..., Any], tolerance: float = 0.0
) -> Callable[..., Any]:
    """Declare a custom op and return it as a function of tensors (positional) and attributes (by keyword).

    ``name`` is "owner::op"; ``version`` and ``schema`` are those of the library's op (core/include/penstock_op.h).
    ``reference`` is the op in plain PyTorch, which defines what it computes and the shapes of its outputs.  All outputs
    are new, contiguous float32 or int32 tensors with the same number of rows.  ``tolerance`` bounds the relative error
    of the kernel against the reference; 0 promises the same bits.  Declaring the same op again, as a script does that
    is imported twice, replaces its ``reference``.  An op that ``torch.library.custom_op`` made before keeps PyTorch's
    function, whose parameters have the names of the schema.

    Raises InvalidArgumentError for a malformed name, version, schema or tolerance, and for an op that is already
    declared with another version or schema.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 63 or name.startswith("penstock::"):
        raise InvalidArgumentError(
            f'name: expected "owner::op" of lower-case letters, digits and _, got {name!r:.80}', param="name"
        )
    check_integer(f"{name}: version", version, 1, 2**31 - 1)
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
        raise InvalidArgumentError(
            f'{name}: schema: expected a line such as "(Tensor x, Weight? bias, *, float limit) -> Tensor", got '
            f"{schema!r:.200}",
            param="schema",
        )
    if not callable(reference):
        raise InvalidArgumentError(
            f"{name}: reference: expected a function, got {type(reference).__name__}", param="reference"
        )
    if not (isinstance(tolerance, (int, float)) and math.isfinite(tolerance) and tolerance >= 0):
        raise InvalidArgumentError(
            f"{name}: tolerance: expected a finite number from 0, got {tolerance!r:.60}", param="tolerance"
        )
    op = Op(name, version, schema, float(tolerance))
    declared = _ops.get(name)
    if declared is None:
        add_custom_op(op)
        _ops[name] = _register(op, reference)
    elif (declared.op.version, declared.op.schema) != (version, schema):
        raise InvalidArgumentError(
            f"{name}: already declared as version {declared.op.version} {declared.op.schema}, got {version} {schema}",
            param="name",
        )
    else:
        declared.replace_reference(reference)
    owner, short = name.split("::")
    function: Callable[..., Any] = getattr(getattr(torch.ops, owner), short)
    return function


def _register(op: Op, reference: Callable[..., Any]) -> _CustomOp:
    """Register the op with PyTorch, so that capture sees it as one node."""
    owner, short = op.name.split("::")
    custom = _CustomOp(op, reference)
    if hasattr(getattr(torch.ops, owner), short):
        return custom  # of torch.library.custom_op: PyTorch has its function already
    if owner not in _libraries:
        _libraries[owner] = torch.library.Library(owner, "FRAGMENT")  # type: ignore[no-untyped-call]
    library = _libraries[owner]
    library.define(short + torch_schema(op.schema), tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(short, custom.run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(op.name, custom.fake, lib=library)
    return custom
