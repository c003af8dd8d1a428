"""A checkpoint as a network reads it: parameters that come from rows of a fused tensor, or from one of another form.

A network declares them in ``tensor_sources()``; ``penstock.models.sources`` has functions that make such tables.  A
folder that Penstock wrote from a network (quantized, or saved) has the network's own names and forms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import OWN_NAMES, ConfigReader, show, show_tensors
from penstock.core.native import QuantizedRows
from penstock.errors import InvalidFileError
from penstock.quant.matrix import concatenate_rows
from penstock.quant.mxfp4 import BLOCK_BYTES, BLOCK_LEN, mxfp4_to_bf16, mxfp4_to_gguf
from penstock.quant.tensor_writer import TensorEntry

__all__ = [
    "STACKED_GATES", "MappedCheckpoint", "Projection", "Source", "Sources", "has_own_names", "has_stacked_experts",
    "resolve_sources",
]  # fmt: skip

STACKED_GATES: Final = ".experts.gate_up_proj"
"""The end of the name of a tensor with the gates and up projections of all experts of a layer."""


@dataclass(frozen=True)
class Projection:
    """A linear of several heads over the rows of a tensor, as one matrix for each head: [heads * rows, head_dim].

    ``weight`` [heads * head_dim, columns] and ``bias`` are the names of its tensors; ``norm`` the beginning of those of
    a layer norm of the rows, "" without one, and ``eps`` that of the norm.
    """

    weight: str
    bias: str
    num_heads: int
    norm: str = ""
    eps: float = 0.0

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that it reads."""
        return (self.weight, self.bias, *((f"{self.norm}.weight", f"{self.norm}.bias") if self.norm else ()))

    def without_prefix(self, prefix: str) -> Projection:
        """Return the projection whose tensor names lack ``prefix``."""
        weight, bias, norm = (name.removeprefix(prefix) for name in (self.weight, self.bias, self.norm))
        return replace(self, weight=weight, bias=bias, norm=norm)

    def apply(self, rows: NDArray[np.float32], tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the matrices of ``rows`` [n, columns], computed in float64; ``tensors``: the values of its own."""
        x = rows.astype(np.float64)
        if self.norm:
            x = x - x.mean(1, keepdims=True)
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + self.eps) * tensors[2] + tensors[3]
        y = x @ tensors[0].astype(np.float64).T + tensors[1]
        by_head = y.reshape(len(y), self.num_heads, -1).transpose(1, 0, 2)
        return np.ascontiguousarray(by_head.reshape(len(y) * self.num_heads, -1), np.float32)


@dataclass(frozen=True)
class Source:
    """The source of a parameter: ``tensor[index]``, transposed if ``transposed``, of it the rows in ``rows``.

    ``rows`` are ranges [start, stop) in the order of the parameter's rows; none means all rows.  ``index`` selects from
    the first dimension of a tensor with one dimension more, such as stacked experts.  ``plus`` is added in float32, and
    so is row ``added_row`` of the tensor ``add_row``.  The first ``skipped`` rows of ``tensor`` need not be read.  With
    ``scales``, the name of another tensor, ``tensor`` has MXFP4 blocks [..., rows, groups, 16], and the values are read
    as bf16.  With ``rows_transposed`` the parameter is the transpose of ``rows``; a rank that has a part of it has the
    ranges ``columns`` of the tensor, where none means all.  With ``unit_rows`` every row is divided by its length (L2
    norm) in float32.  ``times`` multiplies in float32.  With ``softplus`` the values are log(1 + exp(x)) of the
    tensor's, computed in float64.  With ``column`` the tensor is a vector, read as a matrix of one column; with
    ``flat`` it is a matrix, read as a vector.  With ``has_gaps`` some rows before the last one may not be read.
    With ``projection`` the parameter is what it makes of all rows.  ``tap`` selects from the last dimension of a tensor
    with one dimension more: a step of a convolution's kernel.
    """

    tensor: str
    rows: tuple[tuple[int, int], ...] = ()
    transposed: bool = False
    plus: float = 0.0
    index: int | None = None
    skipped: int = 0
    add_row: str = ""
    scales: str = ""
    added_row: int = 0
    rows_transposed: bool = False
    unit_rows: bool = False
    times: float | None = None
    column: bool = False
    flat: bool = False
    has_gaps: bool = False
    columns: tuple[tuple[int, int], ...] = ()
    softplus: bool = False
    projection: Projection | None = None
    tap: int | None = None

    @property
    def is_computed(self) -> bool:
        """True if the values are computed from the tensor's, in float32."""
        is_changed = self.plus or self.add_row or self.unit_rows or self.softplus or self.projection
        return bool(is_changed) or self.times is not None


Sources = Mapping[str, Source | tuple[Source, ...]]
"""By parameter name; several sources are rows one below another.  A name that is absent is that of its tensor."""


def has_own_names(config: ConfigReader) -> bool:
    """Return True for a folder that Penstock wrote from a network, whose tensors are its parameters."""
    return config.quantization() is not None or config.bool(OWN_NAMES, False)


def has_stacked_experts(tensors: Iterable[str]) -> bool:
    """Return True for a folder with one tensor for all experts of a layer, as transformers 5 has them in memory."""
    return any(name.endswith(STACKED_GATES) for name in tensors)


def resolve_sources(
    sources: Sources, names: Iterable[str], stored: Collection[str], prefix: str = ""
) -> dict[str, tuple[Source, ...]]:
    """Return the sources of the parameters ``names`` in a folder that has the tensors ``stored``.

    ``prefix`` begins every tensor name in ``sources``; folders of the bare model lack it.
    """
    if prefix and not any(name.startswith(prefix) for name in stored):
        sources = _without_prefix(sources, names, prefix)
    return {
        name: pieces if isinstance(pieces, tuple) else (pieces,)
        for name in names
        if (pieces := sources.get(name)) is not None
    }


class MappedCheckpoint(Checkpoint):
    """A checkpoint whose ``tensors`` are the parameters of a network, and the stored tensors that it does not read.

    ``shapes``: of the parameters.  ``sources``: as ``resolve_sources`` returns them.  ``unread``: patterns of names of
    tensors that the network need not read.  ``copies``: names of tensors that it need not read if they equal another
    one, which is given.  ``is_part``: of a rank, which need not read all rows of its tensors.
    Reads are views where a parameter is one range of rows, and otherwise copies of one parameter.  Raises
    InvalidFileError, which names the stored tensor, for one that is missing, has another shape, or has rows that no
    parameter reads.
    """

    def __init__(
        self,
        stored: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Mapping[str, tuple[Source, ...]],
        *,
        unread: Sequence[str] = (),
        copies: Mapping[str, str] | None = None,
        is_part: bool = False,
    ) -> None:
        super().__init__(stored.folder, stored.config, stored.weight_files, stored.made_files)
        self.config, self.head_differs = stored.config, stored.head_differs  # of the stored tensors, not the parameters
        self.equal_head = stored.equal_head
        self._unread, self._copies = tuple(unread), dict(copies or {})
        self._stored = self.tensors
        self._sources = sources
        read: dict[str, list[Source]] = {}
        for piece in (piece for pieces in self._sources.values() for piece in pieces):
            read.setdefault(piece.tensor, []).append(piece)
        scales = {piece.scales: piece for own in read.values() for piece in own if piece.scales}
        missing = sorted((read.keys() | scales.keys()) - self._stored.keys())
        if missing:
            raise InvalidFileError(
                f"{self.folder}: lacks {show_tensors(missing)}, which the network reads", param=missing[0]
            )
        for piece in scales.values():
            self._check_scales(piece)
        for tensor, readers in read.items() if not is_part else ():
            self._check_rows(tensor, readers)
        for piece in (piece for pieces in self._sources.values() for piece in pieces):
            if piece.add_row:
                self._check_added(piece)
            if piece.projection is not None:
                self._check_projection(piece, piece.projection)
        self.tensors = {name: info for name, info in self._stored.items() if name not in read and name not in scales}
        for name in self._sources:
            self.tensors[name] = self._info(name, shapes[name])

    def redundant_names(self, unread: Collection[str] = ()) -> set[str]:
        """Return the names of tensors that a network need not read; ``unread``: those that it does not read."""
        names = {name for name in self.tensors if name not in self._sources}
        named = {name for name in names if any(fnmatchcase(name, pattern) for pattern in self._unread)}
        pairs = [(name, own) for name, own in self._copies.items() if name in names and own in self.tensors]
        named |= {name for name, own in pairs if self.has_equal(name, own)}
        return super().redundant_names(unread) | named

    def read(self, name: str) -> NDArray[Any]:
        """Return the parameter, or the stored tensor: float32, uint16 (the bits of f16 and bf16), int8 or uint8."""
        pieces = self._sources.get(name)
        if pieces is None:
            return super().read(name)
        arrays = [self._read_piece(piece) for piece in pieces]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def block_scheme(self, name: str) -> str | None:
        """Return the scheme of a parameter that has whole rows of tensors with one scheme."""
        pieces = self._sources.get(name)
        if pieces is None:
            return super().block_scheme(name)
        if all(own.scales and not (own.transposed or own.is_computed) for own in pieces):
            return "mxfp4"
        is_whole = not any(
            piece.transposed
            or piece.rows_transposed
            or piece.is_computed
            or piece.column
            or piece.flat
            or piece.index is not None
            or piece.tap is not None
            or piece.scales
            for piece in pieces
        )
        schemes = {super(MappedCheckpoint, self).block_scheme(piece.tensor) for piece in pieces}
        return schemes.pop() if is_whole and len(schemes) == 1 else None

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the blocks of a parameter that has a ``block_scheme``, uint8 [rows, bytes of a row]."""
        pieces = self._sources.get(name)
        if pieces is None:
            return super().read_blocks(name)
        rows = []
        for piece in pieces:
            blocks = self._mxfp4_blocks(piece) if piece.scales else super().read_blocks(piece.tensor)
            rows += [blocks[start:stop] for start, stop in piece.rows or ((0, len(blocks)),)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def read_rows(self, name: str) -> QuantizedRows:
        """Return the integers and scales of a parameter with ``has_rows``."""
        pieces = self._sources.get(name)
        if pieces is None:
            return super().read_rows(name)
        parts = []
        for piece in pieces:
            own = super().read_rows(piece.tensor)
            ranges = piece.rows or ((0, len(own.q)),)
            parts += [QuantizedRows(own.q[start:stop], own.scales[start:stop]) for start, stop in ranges]
        return concatenate_rows(parts)

    def _mxfp4_blocks(self, piece: Source) -> NDArray[np.uint8]:
        blocks, scales = (super(MappedCheckpoint, self).read(name) for name in (piece.tensor, piece.scales))
        if piece.index is not None:
            blocks, scales = blocks[piece.index], scales[piece.index]
        return mxfp4_to_gguf(blocks, scales)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of a parameter or of a range of its bytes.  Views stay valid."""
        pieces = self._sources.get(name)
        if pieces is None:
            super().release(name, begin, end)
            return
        own = pieces[0]
        is_turned = own.transposed or own.rows_transposed or own.tap is not None
        is_view = len(pieces) == 1 and len(own.rows) <= 1 and not (is_turned or own.is_computed or own.scales)
        if is_view and end is not None:
            info = self._stored[own.tensor]
            offset = (own.index or 0) * (info.num_bytes // info.shape[0]) if own.index is not None else 0
            if own.rows:
                offset += own.rows[0][0] * _row_bytes(info, own.index)
            super().release(own.tensor, offset + begin, offset + end)
        elif end is None or end == self.tensors[name].num_bytes:
            for tensor in {piece.tensor for piece in pieces}:
                super().release(tensor)

    def _read_piece(self, piece: Source) -> NDArray[Any]:
        values, dtype = super().read(piece.tensor), self._stored[piece.tensor].dtype
        if piece.index is not None:
            values = values[piece.index]
        if piece.tap is not None:
            values = values[..., piece.tap]
        if piece.scales:
            scales = super().read(piece.scales)
            values, dtype = mxfp4_to_bf16(values, scales if piece.index is None else scales[piece.index]), "bf16"
        if piece.transposed:
            values = values.T
        if piece.column:
            values = values[:, None]
        if piece.flat:
            values = values.reshape(-1)
        if len(piece.rows) == 1:
            values = values[slice(*piece.rows[0])]
        elif piece.rows:
            values = values[np.concatenate([np.arange(start, stop) for start, stop in piece.rows])]
        if piece.rows_transposed:
            values = values.T
        if piece.columns:
            values = np.concatenate([values[start:stop] for start, stop in piece.columns])
        if piece.plus:
            values, dtype = to_float32(np.ascontiguousarray(values), dtype) + np.float32(piece.plus), "f32"
        if piece.times is not None:
            values, dtype = to_float32(np.ascontiguousarray(values), dtype) * np.float32(piece.times), "f32"
        if piece.softplus:
            wide = to_float32(np.ascontiguousarray(values), dtype).astype(np.float64)
            values, dtype = np.logaddexp(0.0, wide).astype(np.float32), "f32"
        if piece.unit_rows:
            values, dtype = to_float32(np.ascontiguousarray(values), dtype), "f32"
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
        if piece.add_row:
            row = np.ascontiguousarray(super().read(piece.add_row)[piece.added_row])
            row = to_float32(row, self._stored[piece.add_row].dtype)
            values = to_float32(np.ascontiguousarray(values), dtype) + row
        if piece.projection is not None:
            own = [self._floats(name) for name in piece.projection.tensors]
            values = piece.projection.apply(to_float32(np.ascontiguousarray(values), dtype), own)
        return np.ascontiguousarray(values)

    def _floats(self, name: str) -> NDArray[np.float32]:
        """Return a stored tensor in float32."""
        return to_float32(np.ascontiguousarray(super().read(name)), self._stored[name].dtype)

    def _shape(self, piece: Source) -> tuple[int, ...]:
        """Return the shape in which ``piece.rows`` counts; InvalidFileError for too few dimensions."""
        info = self._stored[piece.tensor]
        shape = info.shape if piece.index is None else info.shape[1:]
        shape = shape if piece.tap is None else shape[:-1]
        if piece.scales:
            shape = (shape[0], shape[1] * BLOCK_LEN)
        if piece.column and len(shape) == 1:
            shape = (*shape, 1)
        if piece.flat:
            shape = (math.prod(shape),)
        if not shape or (piece.transposed and len(shape) != 2):
            raise InvalidFileError(
                f"{info.file}: tensor {show(piece.tensor)}: shape: expected a matrix, got {list(info.shape)}",
                param=piece.tensor,
            )
        return shape[::-1] if piece.transposed else shape

    def _check_rows(self, tensor: str, pieces: list[Source]) -> None:
        """Check that the parameters read all rows of a stored tensor, and no others."""
        info = self._stored[tensor]
        by_index: dict[int | None, list[Source]] = {}
        for piece in pieces:
            by_index.setdefault(piece.index, []).append(piece)
        if None not in by_index and by_index.keys() != set(range((info.shape or (0,))[0])):
            raise self._wrong_size(tensor, f"{len(by_index)} matrices", list(info.shape))
        taps = {piece.tap for piece in pieces}
        if None not in taps and taps != set(range(info.shape[-1] if len(info.shape) > 1 else 0)):
            raise self._wrong_size(tensor, f"{len(taps)} as the last size", list(info.shape))
        for own in by_index.values():
            num_rows = self._shape(own[0])[0]
            end = own[0].skipped
            for start, stop in sorted(rows for piece in own for rows in piece.rows or ((0, num_rows),)):
                if start > end and not own[0].has_gaps:
                    break
                end = max(end, stop)
            if end != num_rows:
                last = max((stop for piece in own for _, stop in piece.rows), default=end)
                raise self._wrong_size(tensor, f"{last} {'columns' if own[0].transposed else 'rows'}", list(info.shape))

    def _check_scales(self, piece: Source) -> None:
        """Check that a tensor has MXFP4 blocks, and another one a scale for each."""
        blocks, scales = self._stored[piece.tensor], self._stored[piece.scales]
        num_dims = 3 if piece.index is None else 4
        if blocks.dtype != "u8" or len(blocks.shape) != num_dims or blocks.shape[-1] != BLOCK_BYTES:
            raise self._wrong_size(
                piece.tensor, f"U8 of {num_dims} dimensions, {BLOCK_BYTES} the last", list(blocks.shape)
            )
        if scales.dtype != "u8" or scales.shape != blocks.shape[:-1]:
            raise self._wrong_size(piece.scales, f"U8 of {list(blocks.shape[:-1])}", list(scales.shape))

    def _check_added(self, piece: Source) -> None:
        """Check that the tensor one of whose rows is added exists, and has this row and the same length of rows."""
        info = self._stored.get(piece.add_row)
        if info is None:
            raise InvalidFileError(
                f"{self.folder}: lacks {show_tensors([piece.add_row])}, which the network reads", param=piece.add_row
            )
        row = self._shape(piece)[1:]
        if info.shape[1:] != row or len(info.shape) < 2 or info.shape[0] <= piece.added_row:
            raise self._wrong_size(piece.add_row, f"rows of {list(row)}", list(info.shape))

    def _check_projection(self, piece: Source, projection: Projection) -> None:
        """Check that the tensors of a projection exist and fit the rows that it reads."""
        columns = self._shape(piece)[-1]
        missing = [name for name in projection.tensors if name not in self._stored]
        if missing:
            raise InvalidFileError(
                f"{self.folder}: lacks {show_tensors(missing)}, which the network reads", param=missing[0]
            )
        num_rows = (self._stored[projection.weight].shape or (0,))[0]
        shapes = ((num_rows, columns), (num_rows,), (columns,), (columns,))
        for name, shape in zip(projection.tensors, shapes, strict=False):
            if self._stored[name].shape != shape or num_rows % projection.num_heads:
                raise self._wrong_size(name, str(list(shape)), list(self._stored[name].shape))

    def _wrong_size(self, tensor: str, expected: str, actual: list[int]) -> InvalidFileError:
        file = self._stored[tensor].file
        return InvalidFileError(
            f"{file}: tensor {show(tensor)}: shape: expected {expected}, got {actual}", param=tensor
        )

    def _info(self, name: str, expected: tuple[int, ...]) -> TensorInfo:
        """Return type and shape of a parameter; InvalidFileError names the stored tensor that does not fit."""
        pieces, num_rows = self._sources[name], 0
        first = self._stored[pieces[0].tensor]
        dtype = "f32" if any(piece.is_computed for piece in pieces) else "bf16" if pieces[0].scales else first.dtype
        for piece in pieces:
            info, shape = self._stored[piece.tensor], self._shape(piece)
            own_dtype = "f32" if piece.is_computed else "bf16" if piece.scales else info.dtype
            if own_dtype != dtype:
                raise InvalidFileError(
                    f"{info.file}: tensor {show(piece.tensor)}: dtype: expected {dtype.upper()}, as the other parts of "
                    f"{show(name)} have, got {own_dtype.upper()}",
                    param=piece.tensor,
                )
            piece_rows = sum(stop - start for start, stop in piece.rows) if piece.rows else shape[0]
            if piece.rows_transposed and len(shape) == 2:
                num_columns = sum(stop - start for start, stop in piece.columns) or shape[1]
                piece_rows, shape = num_columns, (num_columns, piece_rows)
            if piece.projection is not None:
                heads, num_columns = piece.projection.num_heads, self._stored[piece.projection.weight].shape[0]
                piece_rows *= heads
                shape = (piece_rows, num_columns // heads)
            num_rows += piece_rows
            if shape[1:] != expected[1:]:
                raise self._wrong_size(piece.tensor, f"{list(expected)} for {show(name)}", list(info.shape))
        if num_rows != expected[0]:
            raise self._wrong_size(
                pieces[0].tensor, f"{expected[0]} rows for {show(name)}", list(self._stored[pieces[0].tensor].shape)
            )
        num_bytes = TensorEntry(name, dtype.upper(), expected).num_bytes
        return replace(first, dtype=dtype, shape=expected, num_bytes=num_bytes)


def _row_bytes(info: TensorInfo, index: int | None) -> int:
    shape = info.shape if index is None else info.shape[:2]
    return info.num_bytes // max(int(np.prod(shape[: 1 if index is None else 2])), 1)


def _without_prefix(sources: Sources, names: Iterable[str], prefix: str) -> dict[str, Source | tuple[Source, ...]]:
    """Return the table of all parameters for a folder whose tensor names lack ``prefix``."""
    result: dict[str, Source | tuple[Source, ...]] = {}
    for name in names:
        own = sources.get(name, Source(name))
        pieces = own if isinstance(own, tuple) else (own,)
        result[name] = tuple(
            replace(
                piece,
                tensor=piece.tensor.removeprefix(prefix),
                add_row=piece.add_row.removeprefix(prefix),
                projection=piece.projection and piece.projection.without_prefix(prefix),
            )
            for piece in pieces
        )
    return result
