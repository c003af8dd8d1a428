"""Log-probabilities of the tokens of windows under one model or two, row by row: logits are compared and dropped.

Both models compute a window in chunks, and each pair of rows is compared as soon as both have it.  So memory holds the
logits of two chunks, whatever the windows and the vocabulary are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bench.quality.windows import Window
from penstock.calibration.divergence import compare_rows, score_rows
from penstock.engine.options import RequestOptions
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InternalError, InvalidFileError

if TYPE_CHECKING:
    from penstock.core.native import Sampled
    from penstock.engine.engine import Engine
    from penstock.llm.llm import LLM
    from penstock.runtime.program import Program

__all__ = ["ROWS_PER_STEP", "TokenScores", "compare_rows", "score_rows", "score_windows"]

ROWS_PER_STEP: Final = 128
"""Rows of logits of a step, as many as a processor computes at full speed."""
Floats = NDArray[np.float64]
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class TokenScores:
    """The findings of each scored token, in order.

    ``nll``: negative log-probabilities, in nats, one array for each model.  ``divergence``: the divergence of the first
    model's distribution from that of the second, KL(second || first), in nats; ``same_top``: whether both have the same
    likeliest token.  Both are empty for one model.  ``window``: the number of each token's window.
    """

    nll: tuple[Floats, ...]
    divergence: Floats
    same_top: NDArray[np.bool_]
    window: NDArray[np.int64]


class _Chunks:
    """Collects the rows of logits of a prompt from position ``first`` on, and hands them over in parts."""

    num_logprobs = -1
    scores = None

    def __init__(self, first: int, name: str) -> None:
        self._first, self._name = first, name
        self.num_taken = 0
        self._parts: deque[Rows] = deque()

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Copy the wanted rows out of the program's memory; InvalidFileError if one is not finite."""
        skipped = min(max(0, self._first - self.num_taken), len(rows))
        self.num_taken += len(rows)
        if skipped < len(rows):
            part = np.array(program.logits()[rows.start + skipped : rows.stop], np.float32)
            if not np.isfinite(part).all():
                raise not_finite(self._name)
            self._parts.append(part)

    @property
    def num_waiting(self) -> int:
        """The number of rows that can be handed over at once."""
        return len(self._parts[0]) if self._parts else 0

    def pop(self, count: int) -> Rows:
        """Return the next ``count`` rows; at most ``num_waiting``."""
        part = self._parts.popleft()
        if count < len(part):
            self._parts.appendleft(part[count:])
        return part[:count]


def not_finite(name: str) -> InvalidFileError:
    """Return the error of a model, "model" or "against", whose logits are not finite."""
    return InvalidFileError(
        f"{name}: expected finite logits, got NaN or infinity. Its weights are damaged, or a number overflows.",
        param=name,
        code="non_finite_logits",
    )


def score_windows(
    llms: Sequence[tuple[str, LLM]], windows: Sequence[Window], progress: Callable[[int, int], Any] | None = None
) -> TokenScores:
    """Score windows with one model, or with two that are compared.

    ``llms``: names for errors, with the models.  ``progress(done, total)`` counts scored tokens.  Raises
    InvalidFileError with the code ``non_finite_logits``, and the errors of the models.
    """
    total = sum(len(window.ids) - window.first for window in windows)
    arrays = [np.empty(total) for _ in range(3)]
    same, places = np.empty(total, np.bool_), np.empty(total, np.int64)
    done = 0
    for number, window in enumerate(windows):
        targets = np.array(window.ids[window.first :], np.int64)
        runs = [_WindowRun(name, llm, window) for name, llm in llms]
        taken = 0
        while taken < len(targets):
            count = min(run.wait() for run in runs)
            part, at = targets[taken : taken + count], slice(done, done + count)
            rows = [run.chunks.pop(count) for run in runs]
            if len(rows) == 1:
                arrays[0][at] = score_rows(rows[0], part)
            else:
                arrays[0][at], arrays[1][at], arrays[2][at], same[at] = compare_rows(rows[0], rows[1], part)
            places[at] = number
            taken, done = taken + count, done + count
            if progress is not None:
                progress(done, total)
        for run in runs:
            run.finish()
    if len(llms) == 1:
        return TokenScores((arrays[0],), np.empty(0), np.empty(0, np.bool_), places)
    return TokenScores((arrays[0], arrays[1]), arrays[2], same, places)


class _WindowRun:
    """A window in the engine of a model."""

    def __init__(self, name: str, llm: LLM, window: Window) -> None:
        self.chunks = _Chunks(window.first - 1, name)
        self._engine: Engine = llm.engine
        nothing = ResolvedSampling(max_tokens=0)
        self._request: Request = self._engine.submit(
            window.ids[:-1], nothing, prompt_rows=self.chunks, options=RequestOptions()
        )

    def wait(self) -> int:
        """Run steps until there are rows, and return their number."""
        while not self.chunks.num_waiting:
            if self._request.status is RequestStatus.FINISHED:
                raise self._request.error or InternalError("The window ended before its last row.")
            self._engine.step()
        return self.chunks.num_waiting

    def finish(self) -> None:
        """Run the steps that end the request."""
        while self._request.status is not RequestStatus.FINISHED:
            self._engine.step()
