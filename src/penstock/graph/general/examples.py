"""Sizes that a network takes, with which a reader checks its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.draft import Draft
from penstock.graph.general.shape_rules import infer
from penstock.graph.general.sizes import SizeExpression, SizeLike, as_text, evaluate
from penstock.graph.ir import DType

__all__ = ["example_sizes"]

_CANDIDATES: Final = (0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 224, 256, 320, 512, 640, 1024, 2048, 4096, 16000)


def example_sizes(draft: Draft) -> dict[str, int]:
    """Return a number for each named size with which every call has its shapes.

    Every size takes the same number, as far as its range allows.  Raises UnsupportedError with the call that fits for
    none of those that are tried.
    """
    symbols = draft.symbols()
    refusal: Exception | None = None
    for candidate in _CANDIDATES:
        sizes = {item.name: min(max(candidate, item.min), item.max) for item in symbols}
        try:
            _check(draft, sizes)
        except (InvalidArgumentError, UnsupportedError, ZeroDivisionError) as error:
            refusal = refusal or error
            continue
        return sizes
    raise UnsupportedError(f"sizes: expected ranges of sizes that the network takes: {refusal}", param="sizes")


@dataclass(frozen=True)
class _Concrete:
    """A tensor with constant sizes, for shape rules."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


def _check(draft: Draft, sizes: Mapping[str, int]) -> None:
    """Infer every call for these sizes.  Raises InvalidArgumentError for one that does not fit."""
    known: dict[int, _Concrete] = {}

    def number(size: SizeLike) -> int:
        return evaluate(as_text(size), sizes) if isinstance(size, SizeExpression) else size

    for tensor in draft.inputs:
        known[id(tensor)] = _Concrete(tensor.name, tensor.dtype, tuple(number(size) for size in tensor.shape))
    for call in draft.calls:
        inputs: list[Any] = []
        for item in call.inputs:
            if item is not None and id(item) not in known:
                known[id(item)] = _Concrete(item.name, item.dtype, tuple(number(size) for size in item.shape))
            inputs.append(None if item is None else known[id(item)])
        attrs = {
            key: tuple(number(size) for size in value) if isinstance(value, tuple) else value
            for key, value in call.attrs.items()
        }
        if "::" in call.op:  # the rule of a custom op is its library's
            types = [(tensor.dtype, tensor.shape) for tensor in call.outputs]
        else:
            _, types = infer(call.op, inputs, attrs, call.name)
        for tensor, (dtype, sizes_of_output) in zip(call.outputs, types, strict=True):
            concrete = tuple(number(size) for size in sizes_of_output)
            if any(size < 1 and own != 0 for size, own in zip(concrete, tensor.shape, strict=True)):
                raise InvalidArgumentError(f"{call.name} ({call.op}): expected elements, got {list(concrete)}")
            if concrete != tuple(number(size) for size in tensor.shape):
                raise InvalidArgumentError(f"{call.name} ({call.op}): expected {tensor}, got {list(concrete)}")
            known[id(tensor)] = _Concrete(tensor.name, dtype, concrete)
