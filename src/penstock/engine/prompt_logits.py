"""What a request may want of every position of its prompt: how likely its tokens are, or the logits themselves.

A step computes the rows of a chunk of the prompt; here they are taken, while they are there.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import Sampled
from penstock.engine.logprobs import TokenLogprobs, check_row, row_logprobs
from penstock.runtime.program import Program

__all__ = ["PromptLogits", "PromptRows", "PromptScores"]


class PromptRows(Protocol):
    """Takes rows of logits position by position, each once, from the first on."""

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens each row lists; -1 asks for no log-probability."""

    @property
    def scores(self) -> list[TokenLogprobs | None] | None:
        """What became of it as log-probabilities, if that was asked for."""

    @property
    def num_taken(self) -> int:
        """Positions that are done."""

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """The rows of the next ``len(rows)`` positions, as numbered in the step that just ran."""


class PromptScores:
    """The log-probability of each token given those before, with the ``num_top`` likeliest; None for the first."""

    def __init__(self, num_top: int) -> None:
        self.num_logprobs = num_top
        self.scores: list[TokenLogprobs | None] = [None]

    @property
    def num_taken(self) -> int:
        """Position i scores token i + 1, so the last has nothing to score."""
        return len(self.scores) - 1

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Note the scores; InternalError when a row's logits are not finite."""
        for row in rows[: prompt_len - len(self.scores)]:
            check_row(sampled, row)
            self.scores.append(row_logprobs(sampled, row, self.num_logprobs))


class PromptLogits:
    """Logits [len, vocab] float32 of a prompt; row i scores the token after the first i + 1."""

    num_logprobs = -1
    scores = None

    def __init__(self, prompt_len: int, vocab_size: int) -> None:
        self.array: NDArray[np.float32] = np.empty((prompt_len, vocab_size), np.float32)
        self._num_taken = 0

    @property
    def num_taken(self) -> int:
        """Rows that are filled."""
        return self._num_taken

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Copy the rows out of the program's memory."""
        stop = self._num_taken + len(rows)
        self.array[self._num_taken : stop] = program.logits()[rows.start : rows.stop]
        self._num_taken = stop
