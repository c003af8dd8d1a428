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
from penstock.engine.options import RequestOptions
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, Status
from penstock.errors import InternalError, InvalidFileError

if TYPE_CHECKING:
    from penstock.core.native import Sampled
    from penstock.engine.engine import Engine
    from penstock.llm.llm import LLM
    from penstock.runtime.program import Program

__all__ = ["ROWS_PER_STEP", "TokenScores", "compare_rows", "score_rows", "score_windows"]

ROWS_PER_STEP: Final = 128
"""Rows of logits of a step, as many as a processor computes at full speed."""
_BLOCK_VALUES: Final = 1 << 20
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


def score_rows(logits: Rows, targets: NDArray[np.int64]) -> Floats:
    """Return the negative log-probability of a target under each row of logits [n, vocab], computed in float64."""
    result = np.empty(len(logits))
    for begin, rows in _blocks(logits):
        result[begin : begin + len(rows)] = -_log_softmax(rows)[
            np.arange(len(rows)), targets[begin : begin + len(rows)]
        ]
    return result


def compare_rows(
    logits: Rows, reference: Rows, targets: NDArray[np.int64]
) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    """Return of two [n, vocab] arrays of logits both negative log-probabilities, KL(reference || first), same top."""
    nll, reference_nll, divergence = (np.empty(len(logits)) for _ in range(3))
    same = np.asarray(logits.argmax(axis=1) == reference.argmax(axis=1))
    for begin, rows in _blocks(logits):
        part = slice(begin, begin + len(rows))
        own, other = _log_softmax(rows), _log_softmax(reference[part])
        places = np.arange(len(rows)), targets[part]
        nll[part], reference_nll[part] = -own[places], -other[places]
        np.subtract(other, own, out=own)
        divergence[part] = np.einsum("ij,ij->i", np.exp(other, out=other), own)
    return nll, reference_nll, np.maximum(divergence, 0.0), same


def _blocks(logits: Rows) -> list[tuple[int, Rows]]:
    """Return runs of rows, so that arrays in float64 stay small."""
    size = max(1, _BLOCK_VALUES // logits.shape[1])
    return [(begin, logits[begin : begin + size]) for begin in range(0, len(logits), size)]


def _log_softmax(rows: Rows) -> Floats:
    values = rows.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


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
            if self._request.status is Status.FINISHED:
                raise self._request.error or InternalError("The window ended before its last row.")
            self._engine.step()
        return self.chunks.num_waiting

    def finish(self) -> None:
        """Run the steps that end the request."""
        while self._request.status is not Status.FINISHED:
            self._engine.step()
