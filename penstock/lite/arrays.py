"""The arrays of a step: what goes to the core, checked before it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgumentError
from penstock.lite.library import BatchStruct, SamplingStruct, sized

__all__ = ["Sampling", "StepBatch", "batch_struct", "sampling_struct"]


@dataclass(frozen=True)
class StepBatch:
    """One step: T tokens of B requests, flat.  Arrays are C-contiguous int32.

    ``token_ids`` [T] (-1-s: the token last sampled in slot s), ``positions`` [T] ascending by one within a request,
    ``request_starts`` [B+1], ``page_tables`` [page groups, B, width] (-1: freed or unused), ``output_rows`` [R].
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    request_starts: npt.NDArray[np.int32]
    page_tables: npt.NDArray[np.int32]
    output_rows: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Sampling:
    """How to sample R rows of logits.  Arrays are C-contiguous.

    ``temperature`` f32 [R], 0 is greedy; ``top_k`` i32 [R], 0 is off; ``top_p`` f32 [R], 1 is off; ``seed`` u64 [R];
    ``counter`` i64 [R, 2]: sample index, position of the token to be sampled; ``slot`` i32 [R] or None, where to
    remember the token, -1 nowhere; ``mask`` u32 [R, ceil(vocab / 32)] or None, a set bit allows its token.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    counter: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int32] | None = None
    mask: npt.NDArray[np.uint32] | None = None


def _pointer(array: Any, dtype: Any, shape: tuple[int, ...], name: str) -> int:
    """The address of an array of exactly this type and shape."""
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"{name}: expected a numpy array, found {type(array).__name__}")
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        wanted = f"C-contiguous {np.dtype(dtype).name} {list(shape)}"
        found = f"{array.dtype.name} {list(array.shape)}"
        contiguous = "" if array.flags.c_contiguous else ", not C-contiguous"
        raise InvalidArgumentError(f"{name}: expected {wanted}, found {found}{contiguous}")
    return array.ctypes.data


def _length(array: Any, name: str, ndim: int = 1) -> int:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != ndim:
        raise InvalidArgumentError(f"{name}: expected a numpy array of {ndim} dimensions, found {array!r:.60}")
    return int(shape[-1] if ndim > 1 else shape[0])


def batch_struct(batch: StepBatch, num_page_groups: int) -> BatchStruct:
    """The struct of a batch; the arrays must outlive it."""
    num_tokens, num_rows = _length(batch.token_ids, "token_ids"), _length(batch.output_rows, "output_rows")
    num_requests = _length(batch.request_starts, "request_starts") - 1
    width = _length(batch.page_tables, "page_tables", 3)
    i32 = np.int32
    struct: BatchStruct = sized(
        BatchStruct,
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_rows=num_rows,
        page_table_width=width,
        token_ids=_pointer(batch.token_ids, i32, (num_tokens,), "token_ids"),
        positions=_pointer(batch.positions, i32, (num_tokens,), "positions"),
        request_starts=_pointer(batch.request_starts, i32, (num_requests + 1,), "request_starts"),
        page_tables=_pointer(batch.page_tables, i32, (num_page_groups, num_requests, width), "page_tables"),
        output_rows=_pointer(batch.output_rows, i32, (num_rows,), "output_rows"),
    )
    return struct


def sampling_struct(sampling: Sampling, vocab_size: int) -> tuple[SamplingStruct, int]:
    """The struct and the number of rows; the arrays must outlive it."""
    rows = _length(sampling.temperature, "temperature")
    slot, mask = sampling.slot, sampling.mask
    struct: SamplingStruct = sized(
        SamplingStruct,
        num_rows=rows,
        temperature=_pointer(sampling.temperature, np.float32, (rows,), "temperature"),
        top_k=_pointer(sampling.top_k, np.int32, (rows,), "top_k"),
        top_p=_pointer(sampling.top_p, np.float32, (rows,), "top_p"),
        seed=_pointer(sampling.seed, np.uint64, (rows,), "seed"),
        counter=_pointer(sampling.counter, np.int64, (rows, 2), "counter"),
        slot=None if slot is None else _pointer(slot, np.int32, (rows,), "slot"),
        mask=None if mask is None else _pointer(mask, np.uint32, (rows, (vocab_size + 31) // 32), "mask"),
    )
    return struct, rows
