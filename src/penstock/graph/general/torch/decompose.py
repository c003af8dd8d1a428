"""Splits ops that have no reader into others, by the decompositions that PyTorch has for them.

Ops with a reader stay whole: PyTorch's table would break attention, norms and activations into pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch._decomp import get_decompositions

__all__ = ["decomposed"]

_MAX_ROUNDS: Final = 5  # a decomposition may contain ops that have no reader either


def decomposed(exported: Any, known: Collection[str], own: Mapping[Any, Any]) -> Any:
    """Return an exported program in which ops are functional, and those that are not ``known`` split where possible.

    ``own`` are decompositions by op, which come first.
    """
    exported = exported.run_decompositions(dict(own))
    for _ in range(_MAX_ROUNDS):
        table = _table(exported, known)
        if not table:
            break
        try:
            exported = exported.run_decompositions(table)
        except Exception:  # one that does not take these sizes: the ops are refused by name
            break
    return exported


def _table(exported: Any, known: Collection[str]) -> dict[Any, Any]:
    """Return the decompositions of the ops that are not ``known``."""
    targets = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    ops = [op for op in targets if op.namespace == "aten" and str(op) not in known]
    ops = [op for op in ops if not str(op).startswith("aten.sym_")]  # sizes, which need no reader
    if not ops:
        return {}
    found, every = get_decompositions(ops), torch.export.default_decompositions()
    return {op: found[op] if op in found else every[op] for op in ops if op in found or op in every}
