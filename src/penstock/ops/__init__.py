"""The op table: names, schemas, shape rules, PyTorch references, and the native kernels as PyTorch ops.

Knows no graph.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "eager":  # it imports PyTorch
        from importlib import import_module

        return import_module("penstock.ops.eager")
    raise AttributeError(f"module 'penstock.ops' has no attribute {name!r:.60}")
