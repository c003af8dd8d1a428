"""The divergence of a model from the original over sequences of tokens: logits of the original are kept in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock.core.layouts import KV_NUMBERS
from penstock.core.native import Context, CoreProgram, Model, ProgramOptions, StepBatch
from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.runtime.program import kv_layout_of, pages_for

__all__ = ["LogitsProgram", "MeanDivergence", "compare_rows", "measure_divergence", "score_rows", "write_reference"]

_ROWS_PER_STEP: Final = 128
"""Rows of logits of a step, as many as a processor computes at full speed."""
_BLOCK_VALUES: Final = 1 << 20
Floats = NDArray[np.float64]
Rows = NDArray[np.float32]


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


@dataclass(frozen=True)
class MeanDivergence:
    """The mean of KL(original || model) per token, in nats, and its standard error over sequences.

    ``same_top``: the share of tokens after which both have the same likeliest token.
    """

    mean: float
    error: float
    same_top: float


class LogitsProgram:
    """A bundle that computes the logits of sequences, one after another.  A context manager.

    ``max_len``: the number of tokens of the longest sequence.  Raises UnsupportedError for a model without logits of
    each token.
    """

    def __init__(self, bundle: Path, max_len: int, threads: int = 0) -> None:
        self._bundle, self._len, self._threads = bundle, max_len, threads

    def __enter__(self) -> Self:
        """Open the bundle with memory for one sequence."""
        self._model = Model.open(self._bundle)
        try:
            info = self._model.info
            if info.tail or info.bidirectional or info.prefix_token >= 0 or info.kind:
                raise UnsupportedError(
                    f"model: expected one that generates text, whose divergence can be measured, got {info.network}",
                    param="model",
                    code="unsupported_model",
                )
            self.vocab_size = info.vocab_size
            self._num_groups = info.num_page_groups
            self._context = Context(self._threads)
            options = ProgramOptions(
                max_tokens=_ROWS_PER_STEP,
                max_requests=1,
                max_rows=_ROWS_PER_STEP,
                num_pages=pages_for(self._len),
                kv_layout=KV_NUMBERS[kv_layout_of("auto", info.scheme)],
            )
            self._program = CoreProgram(self._model, self._context, options)
        except BaseException:
            self._model.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close()
        self._context.close()
        self._model.close()

    def logits(self, ids: Sequence[int]) -> Iterator[Rows]:
        """Yield the logits of a sequence in runs of rows [n, vocab], each valid until the next.

        Raises InvalidFileError (``non_finite_logits``) for NaN and infinity.
        """
        pages = np.arange(pages_for(self._len), dtype=np.int32)
        table = np.ascontiguousarray(np.broadcast_to(pages, (self._num_groups, 1, len(pages))))
        for start in range(0, len(ids), _ROWS_PER_STEP):
            part = ids[start : start + _ROWS_PER_STEP]
            self._program.run(
                StepBatch(
                    token_ids=np.array(part, np.int32),
                    positions=np.arange(start, start + len(part), dtype=np.int32),
                    request_starts=np.array([0, len(part)], np.int32),
                    page_tables=table,
                    output_rows=np.arange(len(part), dtype=np.int32),
                )
            )
            rows = self._program.logits()
            if not np.isfinite(rows).all():
                raise InvalidFileError(
                    "model: expected finite logits, got NaN or infinity. Its weights are damaged, or a number "
                    "overflows.",
                    param="model",
                    code="non_finite_logits",
                )
            yield rows


def write_reference(program: LogitsProgram, sequences: Sequence[Sequence[int]], path: Path) -> None:
    """Write the logits of all tokens as float32 [tokens, vocab]; the file appears complete or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as stream:
            for ids in sequences:
                for rows in program.logits(ids):
                    stream.write(np.ascontiguousarray(rows, np.float32).data)
        partial.replace(path)
    except OSError as error:
        raise FileAccessError(f"{partial}: {error.strerror}") from None


def measure_divergence(
    program: LogitsProgram, sequences: Sequence[Sequence[int]], reference: Path, on_sequence: Any = None
) -> MeanDivergence:
    """Return the divergence from logits that ``write_reference`` wrote for the same sequences."""
    lengths = [len(ids) for ids in sequences]
    known = np.memmap(reference, np.float32, "r", shape=(sum(lengths), program.vocab_size))
    sums, num_same, at = [], 0, 0
    for ids in sequences:
        total = 0.0
        for rows in program.logits(ids):
            _, _, divergence, same = compare_rows(rows, known[at : at + len(rows)], np.zeros(len(rows), np.int64))
            total, num_same, at = total + float(divergence.sum()), num_same + int(same.sum()), at + len(rows)
        sums.append(total)
        if on_sequence is not None:
            on_sequence(len(ids))
    count = sum(lengths)
    mean = math.fsum(sums) / count
    residuals = (total - mean * length for total, length in zip(sums, lengths, strict=True))
    return MeanDivergence(mean, math.sqrt(math.fsum(value * value for value in residuals)) / count, num_same / count)
