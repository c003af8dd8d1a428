"""All readers of ops."""

from __future__ import annotations

from typing import Final

from penstock.graph.onnx import (
    attention,
    control,
    elementwise,
    images,
    indices,
    norms,
    products,
    quantized,
    recurrent,
    reductions,
    resizing,
    shapes,
)
from penstock.graph.onnx.registry import READERS, Reader

__all__ = ["FAMILIES", "reader_of"]

FAMILIES: Final = (
    attention, control, elementwise, images, indices, norms, products, quantized, recurrent, reductions, resizing,
    shapes,
)  # fmt: skip
"""The modules whose import registers their readers."""


def reader_of(op: str) -> Reader | None:
    """Return the reader of an op of ONNX's own domain, or None."""
    return READERS.get(op)
