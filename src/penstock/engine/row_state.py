"""The sampling state of a request from step to step: its parameters as bytes, its history, its forbidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.params import ResolvedSampling
from penstock.sampling_fields import NATIVE_FIELDS

__all__ = ["ROW_DTYPE", "RowState"]

ROW_DTYPE: Final = np.dtype([("special", "i4"), *((row.row_name, row.dtype) for row in NATIVE_FIELDS)])
"""The numbers of a row, by the names of ResolvedSampling; ``special`` marks a row that needs more than its numbers."""


class RowState:
    """The sampling state of one request.

    ``numbers`` is a record of ROW_DTYPE as bytes.  ``mask`` has a set bit for each allowed token.  ``penalizes`` tells
    whether any penalty is on.
    """

    def __init__(self, sampling: ResolvedSampling, vocab_size: int) -> None:
        s = sampling
        self.penalizes = any(getattr(s, row.name) != row.off for row in NATIVE_FIELDS if row.is_penalty)
        self.mask = None if s.allowed_token_ids is None else _mask(s.allowed_token_ids, vocab_size)
        self._sampling = s
        self._single = [(word[0], -np.inf) for word in s.bad_words if len(word) == 1]
        self._sequences = [word for word in s.bad_words if len(word) > 1]
        self._vocab_size = vocab_size
        edits = self.penalizes or bool(s.bad_words or s.logit_bias or s.min_tokens)
        special = edits or self.mask is not None or s.grammar is not None or s.thoughts is not None
        row = tuple(special if name == "special" else getattr(s, name) for name in ROW_DTYPE.names or ())
        self.numbers = np.array(row, ROW_DTYPE).tobytes()
        self._history = np.zeros(0, np.int32)
        self._len = 0

    def history(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the tokens of prompt and answer so far [len], of which only the new ones are copied."""
        prompt_len, start = len(prompt_ids), self._len
        total = prompt_len + len(output_ids)
        if total > len(self._history):
            grown = np.zeros(max(256, 2 * total), np.int32)
            grown[:start] = self._history[:start]
            self._history = grown
        if start < prompt_len:
            self._history[start:prompt_len] = prompt_ids[start:]
            start = prompt_len
        self._history[start:total] = output_ids[start - prompt_len :]
        self._len = total
        return self._history[:total]

    def biases(self, output_ids: Sequence[int]) -> list[tuple[int, float]]:
        """Return pairs of a token and what this step adds to its logit; minus infinity forbids the token."""
        s = self._sampling
        pairs = [*self._single, *s.logit_bias]
        if len(output_ids) < s.min_tokens:
            pairs += [(token, -np.inf) for token in s.end_ids if token < self._vocab_size]
        for word in self._sequences:
            head = word[:-1]
            if tuple(output_ids[-len(head) :]) == head:
                pairs.append((word[-1], -np.inf))
        return pairs


def _mask(allowed: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
