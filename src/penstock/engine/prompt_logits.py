"""The results that a request can collect at each position of its prompt: log-probabilities, or the logits.

A step computes the rows of one chunk of the prompt, and they are collected before the next step overwrites them.
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
