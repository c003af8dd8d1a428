"""Pack the matrices of a network for the kernels: the scheme of each, and its bytes.

A linear gets the network's scheme, a router float32, and an output head the scheme's ``head``.  A table that is not
shared with a linear keeps the checkpoint's own float type.  ``penstock.graph.passes.assign_scheme`` has the same
rules, so that eager mode and a bundle compute with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.core import layouts, native
from penstock.errors import InvalidFileError
from penstock.nn.embedding import LMHead
from penstock.nn.experts import ExpertLinear, Router
from penstock.nn.latent import HeadLinear
from penstock.nn.linear import Linear
from penstock.nn.weight import MatrixLayer, WeightPart
from penstock.ops.eager import core_context
from penstock.ops.reference import shape_packed
from penstock.quant.hadamard import rotate_weight
from penstock.quant.scheme import find_scheme

__all__ = [
    "SharedMatrix",
    "load_weights",
    "pack_blocks",
    "pack_matrix",
    "pack_network",
    "pack_parts",
    "pack_quantized",
    "shared_matrices",
]

_ROWS_LAYOUTS = {"f32": layouts.ROWS_F32, "f16": layouts.ROWS_F16, "bf16": layouts.ROWS_BF16}
_DTYPES = {torch.float32: layouts.F32, torch.float16: layouts.F16, torch.bfloat16: layouts.BF16}

_LINEARS = (Linear, ExpertLinear, HeadLinear)


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix and the layers that use it, more than one when they are tied.  ``name`` is its first name."""

    name: str
    layers: tuple[MatrixLayer, ...]

    @property
    def rows(self) -> int:
        """The number of logical rows."""
        return self.layers[0].rows

    @property
    def cols(self) -> int:
        """The number of logical columns."""
        return self.layers[0].cols

    @property
    def parts(self) -> tuple[WeightPart, ...]:
        """The tensors of the checkpoint that the rows come from."""
        return self.layers[0].weight_parts(self.name.rpartition(".")[0])

    def placement(self, scheme: str, table_dtype: str, schemes: Mapping[str, str] | None = None) -> tuple[str, int]:
        """Return the scheme and the ``ps_layout`` of the matrix in a network with ``scheme``.

        ``schemes``: those of the checkpoint's tensors, if they differ.
        """
        row, known = find_scheme(scheme), schemes or {}
        own = {known.get(part.name, "f32") for part in self.parts}
        stored = find_scheme(own.pop() if len(own) == 1 else "f32")
        if any(isinstance(layer, Router) for layer in self.layers):
            return "f32", layouts.T16_F32
        has_head = any(isinstance(layer, LMHead) for layer in self.layers)
        is_linear = has_head or any(isinstance(layer, _LINEARS) for layer in self.layers)
        if stored.name not in _ROWS_LAYOUTS or (schemes is not None and is_linear):
            row = stored
        elif has_head:
            row = find_scheme(row.head)
        elif not is_linear:
            dtype = stored.name if known and all(part.name in known for part in self.parts) else table_dtype
            return dtype, _ROWS_LAYOUTS[dtype]
        return row.name, row.layout

    def set_packed(self, packed: Tensor, scheme: str) -> None:
        """Set the packed matrix in every layer."""
        for layer in self.layers:
            layer.set_packed(packed, scheme)


def shared_matrices(network: nn.Module) -> Iterator[SharedMatrix]:
    """Yield the logical matrices of a network in order of first use; tied layers share one."""
    layers: dict[int, list[MatrixLayer]] = {}
    names: dict[int, str] = {}
    for path, module in network.named_modules():
        if isinstance(module, MatrixLayer) and not module.is_packed:
            layers.setdefault(id(module.weight), []).append(module)
            names.setdefault(id(module.weight), f"{path}.weight" if path else "weight")
    for key, members in layers.items():
        yield SharedMatrix(names[key], tuple(members))


def _empty(layout: int, rows: int, cols: int) -> Tensor:
    return torch.zeros(native.layout_bytes(layout, rows, cols), dtype=torch.uint8, device="cpu")


def pack_matrix(values: Tensor, layout: int, rotated: bool = False) -> Tensor:
    """Pack ``values`` [rows, cols] of float32, float16 or bfloat16; an integer ``layout`` rounds to nearest.

    ``rotated``: they are rotated first, for a scheme that has ``hadamard``.
    """
    rows, cols = values.shape
    values = _prepared(values, rotated)
    packed = _empty(layout, rows, cols)
    native.pack(
        core_context(), layout, rows, cols, 0, rows, _DTYPES[values.dtype], values.data_ptr(), packed.data_ptr()
    )
    return shape_packed(packed, layout, rows)


def _prepared(values: Tensor, rotated: bool) -> Tensor:
    values = values.detach().contiguous()
    return torch.from_numpy(rotate_weight(values.float().numpy())) if rotated else values


def pack_quantized(values: native.QuantizedRows, layout: int) -> Tensor:
    """Pack values that are already quantized."""
    rows, cols = values.q.shape
    packed = _empty(layout, rows, cols)
    native.pack_quantized(core_context(), layout, rows, cols, 0, rows, values, packed.data_ptr())
    return shape_packed(packed, layout, rows)


def pack_blocks(parts: Sequence[tuple[NDArray[np.uint8], int]], layout: int, rows: int, cols: int) -> Tensor:
    """Pack a matrix from rows of GGUF's blocks, each with the row at which they begin."""
    packed = _empty(layout, rows, cols)
    for blocks, start in parts:
        at = (layout, rows, cols, start, len(blocks))
        native.pack_blocks(core_context(), *at, np.ascontiguousarray(blocks), packed.data_ptr())
    return shape_packed(packed, layout, rows)


def pack_parts(
    parts: Sequence[tuple[Tensor | native.QuantizedRows, int]], layout: int, rows: int, rotated: bool = False
) -> Tensor:
    """Pack a matrix of ``rows`` rows from parts, each with the row at which it begins: floats or quantized values.

    ``rotated``: floats are rotated first.
    """
    first = parts[0][0]
    cols = (first if isinstance(first, Tensor) else first.q).shape[1]
    packed = _empty(layout, rows, cols)
    for values, start in parts:
        if isinstance(values, Tensor):
            values = _prepared(values, rotated)
            at = (layout, rows, cols, start, len(values), _DTYPES[values.dtype], values.data_ptr())
            native.pack(core_context(), *at, packed.data_ptr())
        else:
            at_rows = (layout, rows, cols, start, len(values.q))
            native.pack_quantized(core_context(), *at_rows, values, packed.data_ptr())
    return shape_packed(packed, layout, rows)


def load_weights(
    network: nn.Module,
    scheme: str,
    table_dtype: str,
    read: Callable[[str, int, bool], Tensor],
    schemes: Mapping[str, str] | None = None,
) -> None:
    """Set every matrix and vector of a network, one at a time, to what ``read(name, layout, rotated)`` returns.

    ``read`` gets a checkpoint name, a ``ps_layout`` and whether floats are rotated before they are packed, and returns
    the packed tensor, or the float32 values of a vector (layout 0).  ``table_dtype`` ("f32", "f16", "bf16") is the type
    that embedding tables keep.  ``schemes``: those of the checkpoint's tensors, if they differ.
    """
    for matrix in list(shared_matrices(network)):
        placed, layout = matrix.placement(scheme, table_dtype, schemes)
        matrix.set_packed(read(matrix.name, layout, find_scheme(placed).hadamard), placed)
    for path, module in network.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = read(f"{path}.{name}" if path else name, 0, False)
            if values.shape != parameter.shape:
                raise InvalidFileError(
                    f"tensor {path}.{name}: shape: expected {list(parameter.shape)}, got {list(values.shape)}"
                )
            setattr(module, name, nn.Parameter(values.float(), requires_grad=False))


def pack_network(network: nn.Module, scheme: str, table_dtype: str = "f32") -> None:
    """Pack the matrices of a network whose parameters have values."""
    for matrix in list(shared_matrices(network)):
        placed, layout = matrix.placement(scheme, table_dtype)
        values: Tensor = matrix.layers[0].weight
        if layout in _ROWS_LAYOUTS.values():
            dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
            values = values.to(dtypes[table_dtype])
        matrix.set_packed(pack_matrix(values, layout, find_scheme(placed).hadamard), placed)
