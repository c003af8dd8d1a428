"""The sampling state of a request from step to step: its parameters as bytes, its history, its forbidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.decoding.ngrams import SeenNgrams
from penstock.engine.params import ResolvedSampling
from penstock.sampling_fields import NATIVE_FIELDS

__all__ = ["ROW_DTYPE", "RowState"]

ROW_DTYPE: Final = np.dtype([("special", "i4"), *((row.row_name, row.dtype) for row in NATIVE_FIELDS)])
"""The numbers of a row, by the names of ResolvedSampling; ``special`` marks a row that needs more than its numbers."""


class RowState:
    """The sampling state of one request.

    ``numbers`` is a record of ROW_DTYPE as bytes.  ``mask`` has a set bit for each allowed token.  ``penalizes`` tells
    whether any penalty is on.  ``may_forbid``: it may forbid a token.  ``max_tokens``: the length at which the answer
    ends.
    """

    def __init__(self, sampling: ResolvedSampling, vocab_size: int, max_tokens: int) -> None:
        s = sampling
        self.penalizes = any(getattr(s, row.name) != row.off for row in NATIVE_FIELDS if row.is_penalty)
        self.mask = None if s.allowed_token_ids is None else _mask(s.allowed_token_ids, vocab_size)
        self.sampling = s
        words_ids = [word for word in s.bad_words_ids if len(word) > 1 or word[0] not in s.end_ids]  # as transformers
        self._single = [(word[0], -np.inf) for word in (*s.bad_words, *words_ids) if len(word) == 1]
        self._sequences = [word for word in s.bad_words if len(word) > 1]
        self._sequences_of_all = [word for word in words_ids if len(word) > 1]
        self._ngrams = SeenNgrams(s.no_repeat_ngram_size) if s.no_repeat_ngram_size else None
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._forces = s.forced_bos_token_id >= 0 or s.forced_eos_token_id >= 0
        edits = bool(s.bad_words or s.bad_words_ids or s.logit_bias or s.min_tokens)
        self.may_forbid = edits or self._forces or self._ngrams is not None or self.mask is not None
        special = self.penalizes or self.may_forbid or s.grammar is not None or s.thoughts is not None
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

    def forced(self, prompt_len: int, output_len: int) -> int:
        """Return the only token that may come next; -1 if none is forced."""
        s = self.sampling
        if not self._forces:
            return -1
        if s.forced_eos_token_id >= 0 and output_len == self._max_tokens - 1:
            return s.forced_eos_token_id
        return s.forced_bos_token_id if prompt_len + output_len == 1 else -1

    def biases(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[tuple[int, float]]:
        """Return pairs of a token and what this step adds to its logit; minus infinity forbids the token."""
        s = self.sampling
        if self._forces and self.forced(len(prompt_ids), len(output_ids)) >= 0:
            return []
        pairs = [*self._single, *s.logit_bias]
        if len(output_ids) < s.min_tokens:
            pairs += [(token, -np.inf) for token in s.end_ids if token < self._vocab_size]
        for word in self._sequences:
            head = word[:-1]
            if tuple(output_ids[-len(head) :]) == head:
                pairs.append((word[-1], -np.inf))
        if self._sequences_of_all:
            longest = max(map(len, self._sequences_of_all)) - 1
            tail = tuple(output_ids[-longest:])
            if len(tail) < longest:
                tail = (*prompt_ids[len(tail) - longest :], *tail)
            pairs += [(word[-1], -np.inf) for word in self._sequences_of_all if tail[1 - len(word) :] == word[:-1]]
        if self._ngrams is not None:
            pairs += [(token, -np.inf) for token in self._ngrams.forbidden(prompt_ids, output_ids)]
        return pairs

    def allowed(self, prompt_len: int, output_len: int) -> NDArray[np.uint32] | None:
        """Return the mask of the tokens that may come next; None if all may."""
        token = self.forced(prompt_len, output_len)
        return self.mask if token < 0 else _mask((token,), self._vocab_size)


def _mask(allowed: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
