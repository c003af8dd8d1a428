"""The sampling parameters of a step's rows as arrays.  The native core samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import Biases, Penalties, Sampled, Sampling
from penstock.engine.logprobs import check_row, row_logprobs
from penstock.engine.request import Request
from penstock.engine.row_state import ROW_DTYPE, RowState
from penstock.engine.scheduler import Chunk
from penstock.errors import PenstockError
from penstock.sampling_fields import NATIVE_FIELDS

if TYPE_CHECKING:
    from penstock.text.grammar.matcher import GrammarMatcher

__all__ = ["SamplingRows", "accept_row", "lacks_mask", "mask_errors", "masks_to_make", "row_arrays"]


def _state(request: Request, vocab_size: int) -> RowState:
    if request.row is None:
        request.row = RowState(request.sampling, vocab_size, request.max_tokens)
    return request.row


_COLUMNS: Final[dict[str, float]] = {
    row.name: row.off for row in NATIVE_FIELDS if not row.is_penalty and not row.resolved_name
}
"""The arrays of Sampling with one number per row, and the value that switches each off."""
_OPTIONAL: Final = {field.name for field in fields(Sampling) if field.default is None}
_PENALTIES: Final[dict[str, float]] = {
    row.name.removesuffix("_penalty"): row.off for row in NATIVE_FIELDS if row.is_penalty
}
"""The arrays of Penalties with one number per row, and the value that switches each off."""


class SamplingRows:
    """Creates the arrays of each step's rows.  A step with the same requests as the last one reuses its arrays."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._states: list[RowState] = []  # states, not requests, which may end
        self._sampling: Sampling | None = None

    def of(self, requests: Sequence[Request]) -> Sampling:
        """Return the arrays with one row for each request that samples; they are valid until the next call.

        The random number of a token is a function of (seed, position) only.  Each answer has its own seed, and the
        counter's other word stays 0.
        """
        sampling = self._sampling
        states = [_state(request, self._vocab_size) for request in requests]
        if sampling is not None and len(states) == len(self._states) and all(map(is_, states, self._states)):
            sampling.counter[:, 1] = [r.num_tokens for r in requests]
            return sampling
        sampling, special = _arrays(requests, states, self._vocab_size)
        self._states, self._sampling = states, None if special else sampling
        return sampling


def row_arrays(sampling: Sampling, chunks: Sequence[Chunk]) -> Sampling:
    """Return a row for every row that the chunks need, in their order.

    The last row of a chunk that samples draws the next token with the parameters in ``sampling``.  The others score the
    token that follows in the prompt.
    """
    num_rows = sum(chunk.num_rows for chunk in chunks)
    if num_rows == len(sampling.temperature):
        return sampling
    target = np.full(num_rows, -1, np.int32)
    listed = np.full(num_rows, -1, np.int32)
    is_sampled = np.zeros(num_rows, bool)
    row = 0
    for chunk in chunks:
        row += chunk.num_rows
        scored = chunk.num_rows - chunk.samples
        if scored and chunk.request.prompt_rows is not None:
            first = row - chunk.num_rows
            stop = chunk.start + chunk.num_tokens + (not chunk.samples)
            target[first : first + scored] = chunk.request.tokens(stop - scored, stop)
            listed[first : first + scored] = chunk.request.prompt_rows.num_logprobs
        is_sampled[row - 1 : row] |= chunk.samples
    return _among_scored(sampling, is_sampled, target, listed)


def _among_scored(
    sampling: Sampling, is_sampled: NDArray[np.bool_], target: NDArray[np.int32], listed: NDArray[np.int32]
) -> Sampling:
    """Spread the rows of ``sampling`` to where ``is_sampled`` is set.

    The other rows score ``target`` and list ``listed`` of the likeliest tokens.
    """
    num_rows = len(is_sampled)

    def spread(values: NDArray[Any], off: float) -> NDArray[Any]:
        wide = np.full((num_rows, *values.shape[1:]), off, values.dtype)
        wide[is_sampled] = values
        return wide

    def starts(narrow: NDArray[np.int32]) -> NDArray[np.int32]:
        return _starts(spread(np.diff(narrow), 0).tolist())

    s, p, b = sampling, sampling.penalties, sampling.biases
    num_logprobs = listed if s.num_logprobs is None else np.where(is_sampled, spread(s.num_logprobs, -1), listed)
    arrays: dict[str, Any] = {name: getattr(s, name) for name in _COLUMNS}
    spreads: dict[str, Any] = {
        name: None if array is None else spread(array, _COLUMNS[name]) for name, array in arrays.items()
    }
    return Sampling(
        **spreads,
        num_logprobs=num_logprobs.astype(np.int32),
        counter=spread(s.counter, 0),
        mask=None if s.mask is None else spread(s.mask, 0xFFFFFFFF),
        penalties=None
        if p is None
        else Penalties(
            **{name: spread(getattr(p, name), off) for name, off in _PENALTIES.items()},
            starts=starts(p.starts),
            prompt_lens=spread(p.prompt_lens, 0),
            history=p.history,
        ),
        biases=None if b is None else Biases(starts(b.starts), b.ids, b.values),
        target=target,
        per_row=True,
    )


def _arrays(requests: Sequence[Request], states: Sequence[RowState], vocab_size: int) -> tuple[Sampling, bool]:
    """Return the arrays, and whether some depend on more than the request and its position."""
    numbers = np.frombuffer(b"".join([state.numbers for state in states]), ROW_DTYPE)
    counter = np.array([(0, r.num_tokens) for r in requests], np.int64)

    def column(name: str) -> Any:
        values = np.ascontiguousarray(numbers[name])
        return None if name in _OPTIONAL and (values == _COLUMNS[name]).all() else values

    special = bool(numbers["special"].any())
    sampling = Sampling(
        **{name: column(name) for name in _COLUMNS},
        num_logprobs=np.ascontiguousarray(numbers["num_logprobs"]),
        counter=counter.reshape(-1, 2),
        mask=_masks(requests, states, vocab_size) if special else None,
        penalties=_penalties(requests, states, numbers) if special else None,
        biases=_biases(requests, states) if special else None,
        per_row=True,
    )
    return sampling, special


def _starts(lens: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lens], dtype=np.int32)


def _masks(requests: Sequence[Request], states: Sequence[RowState], vocab_size: int) -> NDArray[np.uint32] | None:
    """Return the masks of the allowed tokens and of the grammars; None if every row allows all tokens.

    A token that ends the thoughts is the only one where the rest allows it.
    """
    allowed = [s.allowed(len(r.own_prompt_ids), len(r.output_ids)) for r, s in zip(requests, states, strict=True)]
    pairs = zip(requests, allowed, strict=True)
    if all(r.matcher is None and r.forced_token is None and mask is None for r, mask in pairs):
        return None
    masks = np.full((len(states), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for row, (request, mask) in enumerate(zip(requests, allowed, strict=True)):
        if request.matcher is not None:
            masks[row] = request.matcher.mask
        if mask is not None:
            masks[row] &= mask
        token = request.forced_token if request.sampling.hook is None else None  # else its row has no other token
        if token is not None and masks[row, token >> 5] >> (token & 31) & 1:
            masks[row] = 0
            masks[row, token >> 5] = 1 << (token & 31)
    return masks


def _penalties(requests: Sequence[Request], states: Sequence[RowState], numbers: NDArray[Any]) -> Penalties | None:
    if not any(state.penalizes for state in states):
        return None
    none = np.zeros(0, np.int32)
    rows = [
        s.history(r.own_prompt_ids, r.output_ids) if s.penalizes else none
        for r, s in zip(requests, states, strict=True)
    ]
    lens = [len(r.own_prompt_ids) if s.penalizes else 0 for r, s in zip(requests, states, strict=True)]
    return Penalties(
        **{name: np.ascontiguousarray(numbers[f"{name}_penalty"]) for name in _PENALTIES},
        starts=_starts([len(row) for row in rows]),
        prompt_lens=np.array(lens, np.int32),
        history=np.concatenate(rows),
    )


def _biases(requests: Sequence[Request], states: Sequence[RowState]) -> Biases | None:
    pairs = zip(requests, states, strict=True)
    rows = [[pair for pair in s.biases(r.own_prompt_ids, r.output_ids) if pair[0] != r.forced_token] for r, s in pairs]
    flat = [pair for row in rows for pair in row]
    if not flat:
        return None
    ids, values = zip(*flat, strict=True)
    return Biases(_starts([len(row) for row in rows]), np.array(ids, np.int32), np.array(values, np.float32))


def lacks_mask(request: Request) -> bool:
    """Return True if the mask of a request's grammar is still to be made."""
    return request.matcher is not None and not request.matcher.has_mask


def masks_to_make(requests: Sequence[Request], has_chunks: bool) -> list[tuple[GrammarMatcher, int]]:
    """Return the matchers whose masks are still to be made, and how many tokens each may look ahead.

    A forced token is taken without its row, unless something else needs the row or may forbid the token.  Without
    ``has_chunks`` tokens are computed one by one.
    """
    masks = []
    for request in requests:
        if request.matcher is not None and not request.matcher.has_mask:
            sampling, row = request.sampling, request.row
            takes = has_chunks and sampling.hook is None and sampling.num_logprobs < 0
            takes = takes and row is not None and not row.may_forbid
            masks.append((request.matcher, request.max_tokens - len(request.output_ids) - 1 if takes else 0))
    return masks


def mask_errors(requests: Sequence[Request]) -> list[tuple[Request, PenstockError]]:
    """Make the masks that are not made yet, and return the requests whose grammar failed."""
    failed = []
    for request in requests:
        try:
            if request.matcher is not None:
                _ = request.matcher.mask
        except PenstockError as error:
            failed.append((request, error))
    return failed


def accept_row(request: Request, rows: Sampled, row: int) -> int:
    """Append the token of a row to a request, and the forced ones behind it; raises if the row failed.

    Returns their number.
    """
    check_row(rows, row)
    if request.sampling.num_logprobs >= 0:
        request.logprobs.append(row_logprobs(rows, row, request.sampling.num_logprobs))
    token, hook = int(rows.ids[row]), request.sampling.hook
    if hook is None:
        request.accept(token)
    else:
        hook.accept(request, token)
    return 1 + request.accept_forced()
