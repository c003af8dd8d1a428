"""The arrays of a step, and the structs that pass them to the core.  Types and shapes are checked here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.library import BatchStruct, SampledStruct, SamplingStruct, sized
from penstock.errors import InvalidArgumentError
from penstock.sampling_fields import NATIVE_FIELDS
from penstock.validation import refusal, wrong_type

__all__ = [
    "ROW_MASKED", "ROW_NOT_FINITE", "ROW_OK", "Biases", "Penalties", "Sampled", "Sampling", "StepBatch", "batch_struct",
    "sampled_struct", "sampling_struct",
]  # fmt: skip

BATCH_HIDDEN, BATCH_LOGITS, BATCH_ALL_RANKS = 1, 2, 4  # PS_BATCH_*


@dataclass(frozen=True)
class StepBatch:
    """One step: T tokens of B requests, flat.  Arrays are C-contiguous int32.

    ``token_ids`` [T]: an id, or -1-s for the token last sampled in slot s.
    ``positions`` [T]: ascending by one within a request.
    ``request_starts`` [B+1]: the first token of each request; the last entry is T.
    ``page_tables`` [page groups, B, width]: page numbers; -1 marks a freed or unused entry.
    ``output_rows`` [R]: the tokens whose logits are wanted.
    ``hidden``: keep the hidden rows of all tokens, so that ``CoreProgram.hidden`` can return them after the step.
    ``logits``: ``CoreProgram.logits`` will be called after ``step``; without it ranks bring together only their best
    tokens where every row is sampled greedily.
    ``all_ranks``: every rank runs this batch and has the logits; without it the other ranks follow rank 0.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    request_starts: npt.NDArray[np.int32]
    page_tables: npt.NDArray[np.int32]
    output_rows: npt.NDArray[np.int32]
    hidden: bool = False
    logits: bool = False
    all_ranks: bool = False


@dataclass(frozen=True)
class Penalties:
    """Penalties on tokens that a request already contains.

    ``repetition`` f32 [R]: divides a positive logit and multiplies a negative one, for each token of the history; 1 is
    off.  ``presence`` and ``frequency`` f32 [R]: subtracted from the logit of each generated token, ``presence`` once
    and ``frequency`` once per occurrence; 0 is off.  ``history`` i32: the tokens of row r are
    ``history[starts[r] : starts[r + 1]]``, of which the first ``prompt_lens[r]`` are the prompt; an entry -1-s is the
    token last sampled in slot s.
    """

    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int32]
    prompt_lens: npt.NDArray[np.int32]
    history: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Biases:
    """Values to add to logits: row r adds ``values[i]`` (f32) to the logit of token ``ids[i]`` (i32) for each i from
    ``starts[r]`` to ``starts[r + 1] - 1``.  Minus infinity forbids a token."""

    starts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of R rows of logits.  Arrays are C-contiguous.

    ``temperature`` f32 [R]: 0 is greedy.
    ``top_k`` i32 [R]: 0 is off.
    ``top_p`` f32 [R]: 1 is off.
    ``seed`` u64 [R].
    ``counter`` i64 [R, 2]: the sample index, and the position of the token to be sampled.
    ``slot`` i32 [R] or None: the slot that remembers the sampled token; -1 remembers it in none.
    ``mask`` u32 [R, ceil(vocab / 32)] or None: a set bit allows its token.
    ``min_p`` f32 [R] or None: 0 is off.
    ``typical_p`` f32 [R] or None: 1 is off.
    ``target`` i32 [R] or None: the token to score instead of sampling one; -1 samples.
    ``num_logprobs`` i32 [R] or None (0): how many of the likeliest tokens to list; -1 computes no log-probability.
    ``per_row``: report a row that fails in its status instead of raising.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    counter: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int32] | None = None
    mask: npt.NDArray[np.uint32] | None = None
    min_p: npt.NDArray[np.float32] | None = None
    typical_p: npt.NDArray[np.float32] | None = None
    penalties: Penalties | None = None
    biases: Biases | None = None
    target: npt.NDArray[np.int32] | None = None
    num_logprobs: npt.NDArray[np.int32] | None = None
    per_row: bool = False


_COLUMNS = {row.row_name: np.dtype(row.dtype) for row in NATIVE_FIELDS if not row.is_penalty}
_PENALTIES = {row.name: np.dtype(row.dtype) for row in NATIVE_FIELDS if row.is_penalty}
_OPTIONAL = {field.name for field in fields(Sampling) if field.default is None}
ROW_OK, ROW_NOT_FINITE, ROW_MASKED = 0, 1, 2


class Sampled(NamedTuple):
    """The result of sampling R rows.

    ``ids`` [R]: the sampled tokens; -1 in a row that failed.
    ``logprobs`` [R]: log-probabilities under the unprocessed logits; NaN where none was requested.
    ``ranks`` [R]: 1 is the likeliest token.
    ``status`` [R]: ROW_OK, ROW_NOT_FINITE or ROW_MASKED.
    ``top_ids`` and ``top_logprobs`` [R, max of num_logprobs]: likeliest first; -1 and NaN fill the rest of a row that
    requested fewer.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    status: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


def _pointer(array: Any, dtype: Any, shape: tuple[int, ...], name: str) -> int:
    """Return the address of an array; InvalidArgumentError unless it has exactly this type and shape."""
    if not isinstance(array, np.ndarray):
        raise wrong_type(name, "a numpy array", array)
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        expected = f"C-contiguous {np.dtype(dtype).name} {list(shape)}"
        actual = f"{array.dtype.name} {list(array.shape)}"
        contiguous = "" if array.flags.c_contiguous else ", not C-contiguous"
        raise InvalidArgumentError(f"{name}: expected {expected}, got {actual}{contiguous}", param=name)
    return array.ctypes.data


def _length(array: Any, name: str, ndim: int = 1) -> int:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != ndim:
        raise refusal(name, f"a numpy array with {ndim} dimensions", array)
    return int(shape[-1] if ndim > 1 else shape[0])


def batch_struct(batch: StepBatch, num_page_groups: int) -> BatchStruct:
    """Return the struct of a batch.  It points into the arrays, which must outlive it."""
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
        flags=BATCH_HIDDEN * batch.hidden | BATCH_LOGITS * batch.logits | BATCH_ALL_RANKS * batch.all_ranks,
    )
    return struct


def sampling_struct(sampling: Sampling, vocab_size: int) -> tuple[SamplingStruct, int]:
    """Return the struct and the number of rows.  The struct points into the arrays, which must outlive it."""
    rows = _length(sampling.temperature, "temperature")
    i32 = np.int32

    def optional(name: str, dtype: Any, shape: tuple[int, ...] = (rows,)) -> int | None:
        array = getattr(sampling, name)
        return None if array is None and name in _OPTIONAL else _pointer(array, dtype, shape, name)

    struct: SamplingStruct = sized(
        SamplingStruct,
        num_rows=rows,
        **{name: optional(name, dtype) for name, dtype in _COLUMNS.items()},
        counter=_pointer(sampling.counter, np.int64, (rows, 2), "counter"),
        slot=optional("slot", i32),
        mask=optional("mask", np.uint32, (rows, (vocab_size + 31) // 32)),
        target=optional("target", i32),
    )
    if sampling.penalties is not None:
        _add_penalties(struct, sampling.penalties, rows)
    if sampling.biases is not None:
        _add_biases(struct, sampling.biases, rows)
    return struct, rows


def _add_penalties(struct: SamplingStruct, penalties: Penalties, rows: int) -> None:
    i32 = np.int32
    struct.history_starts = _pointer(penalties.starts, i32, (rows + 1,), "history_starts")
    total = _last(penalties.starts)
    struct.history = _pointer(penalties.history, i32, (total,), "history")
    struct.prompt_lens = _pointer(penalties.prompt_lens, i32, (rows,), "prompt_lens")
    for name, dtype in _PENALTIES.items():
        setattr(struct, name, _pointer(getattr(penalties, name.removesuffix("_penalty")), dtype, (rows,), name))


def _add_biases(struct: SamplingStruct, biases: Biases, rows: int) -> None:
    struct.bias_starts = _pointer(biases.starts, np.int32, (rows + 1,), "bias_starts")
    total = _last(biases.starts)
    struct.bias_ids = _pointer(biases.ids, np.int32, (total,), "bias_ids")
    struct.bias = _pointer(biases.values, np.float32, (total,), "bias")


def _last(starts: npt.NDArray[np.int32]) -> int:
    return max(0, int(starts[-1]))  # the core refuses a negative value


def sampled_struct(sampling: Sampling, rows: int) -> tuple[SampledStruct, Sampled]:
    """Return the struct that a call fills, and the arrays that it points to, which must outlive it."""
    num_logprobs = sampling.num_logprobs
    num_top = 0 if num_logprobs is None or not num_logprobs.size else max(0, int(num_logprobs.max()))
    sampled = Sampled(
        ids=np.zeros(rows, np.int32),
        logprobs=np.zeros(rows, np.float32),
        ranks=np.zeros(rows, np.int32),
        status=np.zeros(rows, np.int32),
        top_ids=np.zeros((rows, num_top), np.int32),
        top_logprobs=np.zeros((rows, num_top), np.float32),
    )
    struct: SampledStruct = sized(
        SampledStruct,
        num_top=num_top,
        ids=sampled.ids.ctypes.data,
        logprobs=sampled.logprobs.ctypes.data,
        ranks=sampled.ranks.ctypes.data,
        row_status=sampled.status.ctypes.data if sampling.per_row else None,
        top_ids=sampled.top_ids.ctypes.data,
        top_logprobs=sampled.top_logprobs.ctypes.data,
    )
    return struct, sampled
