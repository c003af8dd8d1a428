"""The readers of ONNX's ops, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from penstock.graph.onnx.context import Site

__all__ = ["READERS", "Reader", "reads"]

Reader: TypeAlias = Callable[[Site], Any]
"""Adds a node's calls, and returns its output, or a tuple of its outputs in which None is one that nobody reads."""

READERS: Final[dict[str, Reader]] = {}


def reads(*ops: str) -> Callable[[Reader], Reader]:
    """Register a function as the reader of ops of ONNX's own domain."""

    def register(reader: Reader) -> Reader:
        for op in ops:
            READERS[op] = reader
        return reader

    return register
