"""The edits of a row of logits before the draw, in numpy instead of the core: for rows that a caller sees or changes.

The order and the meaning are those of the core (``core/src/sampling/edit.cpp`` and ``row.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.params import ResolvedSampling
from penstock.engine.row_state import RowState

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["edited_row", "filtered_row", "forced_row", "log_softmax"]

_LARGEST: Final = np.finfo(np.float32).max


def edited_row(
    row: NDArray[np.float32],
    state: RowState,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    mask: NDArray[np.uint32] | None = None,
    unbiased: int | None = None,
) -> NDArray[np.float32]:
    """Return a row [vocab] with masks, biases and penalties applied; a forced token has 0, as in transformers.

    ``mask``: that of a grammar.  ``unbiased``: a token whose logit gets no bias.
    """
    forced = state.forced(len(prompt_ids), len(output_ids))
    if forced >= 0:
        edited = np.full_like(row, -np.inf)
        edited[forced] = 0
        return edited
    edited, sampling = row.copy(), state.sampling
    for bits in (state.mask, mask):
        if bits is not None:
            edited[np.unpackbits(bits.view(np.uint8), count=len(row), bitorder="little") == 0] = -np.inf
    for token, bias in state.biases(prompt_ids, output_ids):
        if token == unbiased:
            continue
        edited[token] = min(edited[token] + np.float32(bias), _LARGEST)
    if state.penalizes:
        tokens = np.unique(state.history(prompt_ids, output_ids))
        counts = np.bincount(np.array(output_ids, np.int64), minlength=len(row))[tokens].astype(np.float32)
        values, repetition = edited[tokens], np.float32(sampling.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(sampling.frequency_penalty) * counts
        values -= np.float32(sampling.presence_penalty) * (counts > 0)
        edited[tokens] = np.minimum(values, _LARGEST)
    return edited


def forced_row(row: NDArray[np.float32], token: int | None) -> NDArray[np.float32]:
    """Return a row [vocab] that allows only ``token``, or the row itself if it does not allow the token."""
    if token is None or not np.isfinite(row[token]):
        return row
    forced = np.full_like(row, -np.inf)
    forced[token] = row[token]
    return forced


def filtered_row(row: NDArray[np.float32], sampling: ResolvedSampling) -> NDArray[np.float32]:
    """Return a row [vocab] divided by the temperature, with minus infinity for the tokens that are never drawn."""
    if sampling.temperature == 0 or not np.isfinite(row.max()):
        return row.copy()
    weights = np.exp((row.astype(np.float64) - row.max()) / sampling.temperature)
    weights[weights < sampling.min_p] = 0
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[weights[order] > 0]
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        order = _reaching(order, weights, sampling.top_p)
    if sampling.typical_p < 1:
        shares = weights[order] / weights[order].sum()
        surprise = -np.log(shares)
        distance = np.abs(surprise - (shares * surprise).sum())
        order = _reaching(order[np.lexsort((order, distance))], weights, sampling.typical_p)
    filtered = np.full_like(row, -np.inf)
    filtered[order] = row[order] / np.float32(sampling.temperature)
    return filtered


def _reaching(order: NDArray[np.int64], weights: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """Return the shortest beginning of ``order`` whose weights reach a share of all of them."""
    sums = np.cumsum(weights[order])
    return order[: int(np.searchsorted(sums, share * sums[-1])) + 1]


def log_softmax(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the log-probabilities of a row [vocab] of logits."""
    shifted = row.astype(np.float64) - row.max()
    logs: NDArray[np.float32] = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return logs
