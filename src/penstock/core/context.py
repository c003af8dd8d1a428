"""A context: an instruction level and a pool of threads, which also pack weights."""

from __future__ import annotations

import ctypes
import math
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from penstock import env
from penstock.core.comm import RankComm
from penstock.core.layouts import BLOCKS, T16_I4G32
from penstock.core.library import ContextOptions, check, library, sized
from penstock.core.weights import DTYPE_BYTES, Data, QuantizedRows, data_address, groups_shape, layout_bytes
from penstock.errors import InvalidArgumentError

__all__ = ["MAX_THREADS", "Context", "Handle", "address_of"]

MAX_THREADS: Final = 1024
"""The core's limit on the threads of a context."""


class _Native:
    """A native object, destroyed with the last reference to it."""

    def __init__(self, address: int, destroy: str) -> None:
        self.address = address
        self._destroy = getattr(library(), destroy)

    def __del__(self) -> None:
        self._destroy(self.address)


class Handle:
    """A native object until ``close``.  Views of its memory keep it alive, so that no view is left dangling."""

    _destroy = ""
    _native: _Native | None = None

    def __init__(self, address: int) -> None:
        self._native = _Native(address, self._destroy)

    @property
    def handle(self) -> int:
        """The address for the C ABI; InvalidArgumentError after ``close``."""
        if self._native is None:
            raise InvalidArgumentError(f"{type(self).__name__.removeprefix('Native')} is closed", code="closed")
        return self._native.address

    def close(self) -> None:
        """Free the memory, or leave that to the last view that is still held.  A second call does nothing."""
        self._native = None

    def _view(self, address: int, num_bytes: int) -> memoryview:
        """Return a view of bytes inside the native object, which keeps the object alive."""
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        memory._native = self._native  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Context(Handle):
    """An instruction level and a pool of threads.

    ``num_threads``: 0 (the default) uses as many as the affinity mask and the cgroup allow.  ``cpu_level``: None (the
    default) uses ``PENSTOCK_CPU``, or else the best level that this machine runs.  ``comm``: connects its programs with
    those of other ranks.  ``links``: connects all ranks of a pipeline, whose stages have ``stage_ranks`` ranks each;
    ``comm`` then connects those of one stage.
    """

    _destroy = "ps_context_destroy"

    def __init__(
        self,
        num_threads: int = 0,
        cpu_level: str | None = None,
        comm: RankComm | None = None,
        links: RankComm | None = None,
        stage_ranks: int = 1,
    ) -> None:
        level = cpu_level if cpu_level is not None else env.cpu_level()
        options = sized(
            ContextOptions,
            num_threads=num_threads,
            cpu_level=level.encode() if level else None,
            comm=None if comm is None else comm.address,
            links=None if links is None else links.address,
            stage_ranks=stage_ranks,
        )
        self._comms = comm, links  # outlive the context
        out = ctypes.c_void_p()
        check(library().ps_context_create(ctypes.byref(options), ctypes.byref(out)))
        super().__init__(address_of(out))

    def agree(self, text: str) -> None:
        """Compare version, instruction level and ``text`` with all other ranks, which call this too.

        Raises InvalidArgumentError, which names what differs, and UnavailableError if the group was ended.
        """
        check(library().ps_context_agree(self.handle, text.encode()))

    @property
    def num_threads(self) -> int:
        """The number of threads, including the caller's."""
        return int(library().ps_context_num_threads(self.handle))

    @property
    def cpu_level(self) -> str:
        """The name of the instruction level."""
        return str(library().ps_context_cpu_level(self.handle).decode())

    def pack(
        self,
        layout: int,
        rows: int,
        cols: int,
        row_start: int,
        num_rows: int,
        src_dtype: int,
        src: Data,
        dst: Data,
    ) -> None:
        """Pack ``num_rows`` source rows into rows ``row_start``... of a weight.

        ``layout`` is a ``ps_layout``, ``src_dtype`` a ``ps_dtype``; the weight has ``rows`` x ``cols``, and its memory
        ``dst`` must be zeroed before the first call.
        """
        source = data_address(src, num_rows * cols * DTYPE_BYTES.get(src_dtype, 0), "src")
        target = data_address(dst, layout_bytes(layout, rows, cols), "dst", written=True)
        check(library().ps_pack(self.handle, layout, rows, cols, row_start, num_rows, src_dtype, source, target))

    def pack_quantized(
        self,
        layout: int,
        rows: int,
        cols: int,
        row_start: int,
        num_rows: int,
        values: QuantizedRows,
        dst: Data,
    ) -> None:
        """Pack ``num_rows`` rows that are already quantized; other arguments as ``pack`` has them."""
        shape = groups_shape(layout, num_rows, cols)
        if (shape is None) != (values.groups is None):
            expected, actual = ("none", "an array") if shape is None else ("steps and offsets", "none")
            raise InvalidArgumentError(f"groups: expected {expected}, got {actual}", param="groups")
        q = data_address(values.q, num_rows * cols, "q")
        scales = data_address(values.scales, 4 * num_rows, "scales")
        groups = None if values.groups is None else data_address(values.groups, math.prod(shape or ()), "groups")
        target = data_address(dst, layout_bytes(layout, rows, cols), "dst", written=True)
        at = (layout, rows, cols, row_start, num_rows)
        check(library().ps_pack_quantized(self.handle, *at, q, scales, groups, target))

    def pack_weighted(
        self,
        src: npt.NDArray[np.float32],
        dst: Data,
        *,
        column_weights: npt.NDArray[np.float32] | None = None,
        scales: npt.NDArray[np.float32] | None = None,
        even_offsets: bool = False,
    ) -> None:
        """Pack a whole 4-bit weight [rows, cols] from float32, with a weight for the error of each column.

        ``column_weights`` [cols]: what the squared error of each column counts; None: all the same.  ``scales`` [rows]:
        of the rows, None: the largest magnitude becomes 127.  ``even_offsets``: offsets are even numbers from -126 to
        0.  ``dst`` is zeroed memory of the layout T16_I4G32.
        """
        rows, cols = src.shape
        source = data_address(src, rows * cols * 4, "src")
        target = data_address(dst, layout_bytes(T16_I4G32, rows, cols), "dst", written=True)
        weights = None if column_weights is None else data_address(column_weights, 4 * cols, "column_weights")
        row_scales = None if scales is None else data_address(scales, 4 * rows, "scales")
        at = (rows, cols, 0, rows)
        check(library().ps_pack_weighted(self.handle, *at, source, weights, row_scales, int(even_offsets), target))

    def pack_blocks(
        self, layout: int, rows: int, cols: int, row_start: int, num_rows: int, src: npt.NDArray[np.uint8], dst: Data
    ) -> None:
        """Pack ``num_rows`` rows of the blocks of a GGUF file, as they lie there; other arguments as ``pack`` has them.

        ``src`` uint8 [num_rows, bytes of a row].  Raises InvalidArgumentError for a scale that is not finite.
        """
        if cols % BLOCKS[layout].block_len:
            raise InvalidArgumentError(
                f"cols: expected whole blocks of {BLOCKS[layout].block_len}, got {cols}", param="cols"
            )
        row_bytes = cols // BLOCKS[layout].block_len * BLOCKS[layout].block_bytes
        source = data_address(src, num_rows * row_bytes, "src")
        target = data_address(dst, layout_bytes(layout, rows, cols), "dst", written=True)
        check(library().ps_pack_blocks(self.handle, layout, rows, cols, row_start, num_rows, source, target))

    def unpack_quantized(
        self, layout: int, rows: int, cols: int, row_start: int, num_rows: int, src: Data
    ) -> QuantizedRows:
        """Return rows as ``pack_quantized`` took them: its exact inverse."""
        source = data_address(src, layout_bytes(layout, rows, cols), "src")
        num = max(num_rows, 0)
        shape = groups_shape(layout, num, cols)
        groups = None if shape is None else np.zeros(shape, np.int8)
        values = QuantizedRows(np.zeros((num, cols), np.int8), np.zeros(num, np.float32), groups)
        addresses = [None if array is None else array.ctypes.data for array in values]
        at = (layout, rows, cols, row_start, num_rows)
        check(library().ps_unpack_quantized(self.handle, *at, source, *addresses))
        return values

    def unpack(
        self, layout: int, rows: int, cols: int, row_start: int, num_rows: int, src: Data
    ) -> npt.NDArray[np.float32]:
        """Return the values that a kernel computes with, float32 [num_rows, cols]."""
        source = data_address(src, layout_bytes(layout, rows, cols), "src")
        values = np.zeros((max(num_rows, 0), cols), np.float32)
        status = library().ps_unpack(self.handle, layout, rows, cols, row_start, num_rows, source, values.ctypes.data)
        check(status)
        return values


def address_of(out: ctypes.c_void_p) -> int:
    """Return the address that a call wrote."""
    if out.value is None:
        raise InvalidArgumentError("the core returned no object")
    return out.value
