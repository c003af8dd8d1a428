"""Tensors of the Open Inference Protocol: the interface between protocols and servables, and the codec of tensors.

A leaf: it imports nothing of the package, and anything may import it.
"""

from __future__ import annotations

from penstock.tensors.types import (
    DTYPES,
    InferRequest,
    InferResponse,
    Methods,
    MethodStatistics,
    ModelState,
    Running,
    ServedMethod,
    Tensor,
    TensorSpec,
)

__all__ = [
    "DTYPES",
    "InferRequest",
    "InferResponse",
    "MethodStatistics",
    "Methods",
    "ModelState",
    "Running",
    "ServedMethod",
    "Tensor",
    "TensorSpec",
]
