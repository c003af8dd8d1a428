"""The results that a request can collect at each position of its prompt: log-probabilities, or the logits.

A step computes the rows of one chunk of the prompt, and they are collected before the next step overwrites them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import Sampled
from penstock.engine.decoding.rows import log_softmax
from penstock.engine.logprobs import TokenLogprobs, check_row, row_logprobs
from penstock.engine.prompts import check_token_ids
from penstock.errors import InternalError
from penstock.runtime.program import Program
from penstock.validation import refusal

__all__ = ["PlaceScores", "Places", "PromptLogits", "PromptRows", "PromptScores"]


class PromptRows(Protocol):
    """Collects rows of logits, one for each position, from the first position on."""

    @property
    def num_logprobs(self) -> int:
        """The number of likeliest tokens to list for each row; -1 asks for no log-probability."""

    @property
    def scores(self) -> list[TokenLogprobs | None] | None:
        """The log-probabilities that were collected; None if logits are collected instead."""

    @property
    def num_taken(self) -> int:
        """The number of positions that are done."""

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Collect the rows of the next ``len(rows)`` positions

        ``rows`` are their numbers in the step that just ran.
        """


class PromptScores:
    """The log-probability of each token given those before, with the ``num_top`` likeliest; None for the first."""

    def __init__(self, num_top: int) -> None:
        self.num_logprobs = num_top
        self.scores: list[TokenLogprobs | None] = [None]

    @property
    def num_taken(self) -> int:
        """The number of positions that are done.  Position i scores token i + 1, so the last scores nothing."""
        return len(self.scores) - 1

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Collect the log-probabilities.  Raises InternalError if a row's logits are not finite."""
        for row in rows[: prompt_len - len(self.scores)]:
            check_row(sampled, row)
            self.scores.append(row_logprobs(sampled, row, self.num_logprobs))


class PromptLogits:
    """Logits [len, vocab] float32 of a prompt.  Row i scores the token after the first i + 1.

    ``first``: the position of the first row; the rows before it are not collected.
    """

    num_logprobs = -1
    scores = None

    def __init__(self, prompt_len: int, vocab_size: int, first: int = 0) -> None:
        self.array: NDArray[np.float32] = np.empty((prompt_len - first, vocab_size), np.float32)
        self._first = self._num_taken = first

    @property
    def num_taken(self) -> int:
        """The number of positions whose rows are filled or not collected."""
        return self._num_taken

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Copy the rows out of the program's memory."""
        stop = self._num_taken + len(rows)
        self.array[self._num_taken - self._first : stop - self._first] = program.logits()[rows.start : rows.stop]
        self._num_taken = stop


@dataclass(frozen=True)
class Places:
    """Positions of a prompt, in order, and the only tokens that are considered there; none: all."""

    positions: tuple[int, ...]
    token_ids: tuple[int, ...] = ()

    def checked(self, prompt_len: int, vocab_size: int) -> Places:
        """Return the places.  InvalidArgumentError for a position or a token that the prompt or the model lacks."""
        positions = self.positions
        if not positions or list(positions) != sorted(set(positions)) or not 0 <= positions[0] <= positions[-1]:
            raise refusal("positions", "positions in order", list(positions))
        if positions[-1] >= prompt_len:
            raise refusal("positions", f"positions below {prompt_len}", positions[-1])
        if self.token_ids:
            check_token_ids(self.token_ids, vocab_size, vocab_size, 0)
        return self


class PlaceScores:
    """The likeliest tokens of some positions, from the rows of these positions themselves, as a mask is filled.

    ``num_top``: how many are listed, up to the tokens that are considered; probabilities are those among all tokens.
    """

    num_logprobs = -1

    def __init__(self, places: Places, num_top: int) -> None:
        self._positions = places.positions
        self._tokens = np.array(places.token_ids, np.int64) if places.token_ids else None
        self._num_top = max(1, num_top)
        self.scores: list[TokenLogprobs | None] = [None]
        self.num_taken = 0

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Collect the rows of the positions among the next ones.  InternalError if a row's logits are not finite."""
        logits, start = program.logits(), self.num_taken
        self.num_taken += len(rows)
        for position in self._positions:
            if start <= position < self.num_taken:
                self.scores.append(self._listed(logits[rows.start + position - start]))

    def _listed(self, row: NDArray[np.float32]) -> TokenLogprobs:
        if not np.isfinite(row).all():
            raise InternalError("The model's logits are not finite: its weights are damaged.")
        scores = log_softmax(row)
        tokens = np.arange(len(scores)) if self._tokens is None else self._tokens
        own = scores[tokens]
        num_top = min(self._num_top, len(own))
        if num_top < len(own):  # to sort a whole vocabulary takes 40 ms
            least = np.partition(own, len(own) - num_top)[len(own) - num_top]
            kept = np.flatnonzero(own >= least)
            tokens, own = tokens[kept], own[kept]
        best = tokens[np.argsort(-own, kind="stable")[:num_top]]
        top = tuple((int(token), float(scores[token])) for token in best)
        return TokenLogprobs(*top[0], 1, top)
