"""The element type of each tensor of a GGUF file, and the type that memory has it in, before anything is packed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import GgufWeights
from penstock.core.layouts import FLOAT_DTYPES
from penstock.core.weights import layout_bytes
from penstock.quant.scheme import find_scheme

__all__ = ["TensorGroup", "tensor_groups"]

_LAYER: Final = re.compile(r"\.\d+\.")
_ROUTER: Final = ".ffn_gate_inp."


@dataclass
class TensorGroup:
    """Tensors of equal type and shape that differ in the number of the layer.

    ``name`` has "*" instead of that number.  ``memory_type``: the type of the values in memory, by its name in GGUF.
    ``reason``: why that is float32 for matrices that the file has in fewer bits.
    """

    name: str
    shape: tuple[int, ...]
    file_type: str
    memory_type: str
    num_tensors: int
    file_bytes: int
    memory_bytes: int
    reason: str = ""


def tensor_groups(checkpoint: Checkpoint) -> list[TensorGroup]:
    """Return the tensors of a GGUF file in the order of the file; those that no parameter reads are left out.

    The types in memory are those of an export without ``scheme``.
    """
    memory: dict[str, tuple[set[str], int]] = {}
    stored: dict[str, StoredTensor] = {}
    reasons: dict[str, str] = {}
    for file in [file for file in checkpoint.weight_files if isinstance(file, GgufWeights)]:
        for name in file.tensors:
            origins = file.origins(name)
            is_router = any(_ROUTER in origin.name for origin in origins)
            kind, num_bytes = _in_memory(checkpoint, name, is_router)
            for origin in origins:
                stored[origin.name] = origin
                reasons.setdefault(origin.name, file.widening_reason(name))
                kinds, total = memory.get(origin.name, (set(), 0))
                memory[origin.name] = kinds | {kind}, total + num_bytes // len(origins)
    groups: dict[tuple[object, ...], TensorGroup] = {}
    for origin in sorted(stored.values(), key=lambda tensor: (tensor.name.startswith("blk."), tensor.offset)):
        kinds, total = memory[origin.name]
        name, kind = _LAYER.sub(".*.", origin.name, count=1), " and ".join(sorted(kinds))
        key = name, origin.shape, origin.kind.name, kind
        group = groups.setdefault(key, TensorGroup(name, origin.shape, origin.kind.name, kind, 0, 0, 0))
        group.reason = group.reason or reasons[origin.name]
        group.num_tensors += 1
        group.file_bytes += origin.num_bytes
        group.memory_bytes += total
    return list(groups.values())


def _in_memory(checkpoint: Checkpoint, name: str, is_router: bool) -> tuple[str, int]:
    """Return the type and the size of a parameter in memory: vectors and routers are float32, others as stored."""
    info, own = checkpoint.tensors[name], checkpoint.block_scheme(name)
    if is_router or len(info.shape) != 2 or (own is None and info.dtype not in FLOAT_DTYPES):
        return "F32", 4 * math.prod(info.shape)
    scheme = own or info.dtype
    return scheme.upper(), layout_bytes(find_scheme(scheme).layout, *info.shape)
