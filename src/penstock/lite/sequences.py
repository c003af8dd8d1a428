"""Sequences of tokens over one program: arrays in, rows out; keys and values are kept between calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.core.layouts import KV_NUMBERS, kv_layout_of, pages_by_group, pages_for
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.affinity import BoundContext
from penstock.lite.settings import ModelConfig

__all__ = ["OutputSpec", "Sequences", "output_specs", "program_options"]


class OutputSpec(NamedTuple):
    """An output of a model: each row has ``width`` elements."""

    name: str
    dtype: npt.DTypeLike
    width: int


def output_specs(info: native.ModelInfo) -> list[OutputSpec]:
    """Return the outputs of a bundle: logits; or token ids if it ends in them, and for topk also their logits."""
    if not info.tail:
        return [OutputSpec("logits", np.float32, info.vocab_size)]
    ids = OutputSpec("token_ids", np.int32, info.tail_k)
    return [ids] if info.tail == "argmax" else [ids, OutputSpec("logits", np.float32, info.tail_k)]


def program_options(info: native.ModelInfo, config: ModelConfig, batch_size: int) -> native.ProgramOptions:
    """Return the limits of a program for ``batch_size`` sequences.

    Raises InvalidArgumentError for a context longer than the model's.
    """
    if config.context_len > info.context_len:
        raise InvalidArgumentError(
            f"context_len: expected at most {info.context_len}, the model's limit, got {config.context_len}",
            param="context_len",
        )
    context_len = config.context_len or info.context_len
    max_tokens = min(config.max_tokens, context_len * batch_size)
    num_requests = min(batch_size, max_tokens)
    # Sized for a step of one sequence.
    own_pages = pages_by_group(info.page_windows, pages_for(context_len), 1, max_tokens, info.context_ranks)
    return native.ProgramOptions(
        max_tokens=max_tokens,
        max_requests=num_requests,
        max_rows=max_tokens if config.logits == "all" else num_requests,
        num_pages=pages_for(context_len) * batch_size,
        kv_layout=KV_NUMBERS[kv_layout_of(config.kv_cache, info.scheme)],
        group_pages=tuple(count * batch_size for count in own_pages),
    )


class _Chunk(NamedTuple):
    """``length`` tokens of a sequence, from token ``begin`` of this call on."""

    row: int
    begin: int
    length: int


class Sequences:
    """A program for up to ``batch_size`` sequences, each of which has its own pages for a whole context.

    A step computes at most ``config.max_tokens`` tokens, on which the results do not depend.  A network whose attention
    is not causal takes each sequence whole, in one call and one step, and cannot continue one.
    """

    def __init__(self, model: native.Model, context: BoundContext, config: ModelConfig, batch_size: int) -> None:
        info = model.info
        if info.prefix_token >= 0:
            raise UnsupportedError(
                f"model_path: expected a network that is one decoder or one encoder, got {info.network}, which has a "
                "prefix; use penstock.LLM",
                param="model_path",
            )
        self.options = program_options(info, config, batch_size)
        self.context_len = config.context_len or info.context_len
        self.batch_size = batch_size
        self.specs = output_specs(info)
        self._all_rows = config.logits == "all"
        self._whole = info.bidirectional
        self._context = context
        self._max_tokens = self.options.max_tokens
        self._program = native.CoreProgram(model, context.native, self.options)
        self._lens = np.zeros(batch_size, np.int64)

    def close(self) -> None:
        """Free the memory."""
        self._program.close()

    def shape_of(self, spec: OutputSpec, batch_size: int, seq_len: int) -> list[int]:
        """Return the shape of an output: [B, width], or [B, T, width] when all rows are wanted."""
        return [batch_size, *([seq_len] if self._all_rows else []), spec.width]

    def forward(
        self, token_ids: npt.NDArray[np.int32], num_tokens: npt.NDArray[np.int32], reset: npt.NDArray[np.int32]
    ) -> list[npt.NDArray[Any]]:
        """Append ``num_tokens`` [B] of ``token_ids`` [B, T] to each sequence and return the outputs.

        ``reset`` [B] 1 starts a new sequence.  Rows without a token are zeros.  A call that fails changes no sequence.
        """
        counts = num_tokens.astype(np.int64)
        before = np.where(reset == 1, 0, self._lens[: len(counts)])
        over = np.flatnonzero(before + counts > self.context_len)
        if over.size:
            row = int(over[0])
            raise InvalidArgumentError(
                f"num_tokens: expected at most {self.context_len - before[row]} for sequence {row}, which has "
                f"{before[row]} tokens of a context of {self.context_len}, got {counts[row]}",
                param="num_tokens",
            )
        if self._whole:
            self._check_whole(before, counts)
        shape = token_ids.shape
        outputs = [np.zeros(self.shape_of(spec, *shape), spec.dtype) for spec in self.specs]
        with self._context.bound():
            for chunks in _steps(counts.tolist(), self._max_tokens, self._whole):
                self._program.run(self._batch(chunks, token_ids, before, counts))
                self._take(chunks, counts, outputs)
        self._lens[: len(counts)] = before + counts
        return outputs

    def _check_whole(self, before: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        """Raise InvalidArgumentError for a sequence that would not run whole in one step."""
        why = "the network's attention is not causal, so a sequence must run whole in one step"
        for row in np.flatnonzero((before > 0) & (counts > 0)):
            raise InvalidArgumentError(
                f"reset: expected 1 for sequence {row}, which has {before[row]} tokens: {why}", param="reset"
            )
        for row in np.flatnonzero(counts > self._max_tokens):
            raise InvalidArgumentError(
                f"num_tokens: expected at most {self._max_tokens} (the config's max_tokens), got {counts[row]} for "
                f"sequence {row}: {why}",
                param="num_tokens",
            )

    def _batch(
        self,
        chunks: list[_Chunk],
        token_ids: npt.NDArray[np.int32],
        before: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
    ) -> native.StepBatch:
        lens = [chunk.length for chunk in chunks]
        starts = np.cumsum([0, *lens], dtype=np.int32)
        positions = [np.arange(c.length) + before[c.row] + c.begin for c in chunks]
        if self._all_rows:
            rows = np.arange(starts[-1], dtype=np.int32)
        else:
            rows = np.array([starts[i + 1] - 1 for i, c in enumerate(chunks) if _is_last(c, counts)], np.int32)
        width = pages_for(int(max(before[c.row] + c.begin + c.length for c in chunks)))
        # A group with fewer pages than the context reuses those that the window has left.
        own_pages = np.array(self.options.group_pages)[:, None, None] // self.batch_size
        tables = np.array([c.row for c in chunks])[:, None] * own_pages + np.arange(width) % own_pages
        return native.StepBatch(
            token_ids=np.concatenate([token_ids[c.row, c.begin : c.begin + c.length] for c in chunks]),
            positions=np.concatenate(positions).astype(np.int32),
            request_starts=starts,
            page_tables=tables.astype(np.int32),
            output_rows=rows,
            all_ranks=True,
        )

    def _take(self, chunks: list[_Chunk], counts: npt.NDArray[np.int64], outputs: list[npt.NDArray[Any]]) -> None:
        """Copy the rows of the step to their places in ``outputs``."""
        results = self._rows()
        at = 0
        for chunk in chunks:
            if self._all_rows:
                for output, rows in zip(outputs, results, strict=True):
                    output[chunk.row, chunk.begin : chunk.begin + chunk.length] = rows[at : at + chunk.length]
                at += chunk.length
            elif _is_last(chunk, counts):
                for output, rows in zip(outputs, results, strict=True):
                    output[chunk.row] = rows[at]
                at += 1

    def _rows(self) -> list[npt.NDArray[Any]]:
        if self.specs[0].name == "logits":
            return [self._program.logits()]
        ids, values = self._program.tail()
        return [ids] if values is None else [ids, values]


def _is_last(chunk: _Chunk, counts: npt.NDArray[np.int64]) -> bool:
    return chunk.begin + chunk.length == int(counts[chunk.row])


def _steps(counts: list[int], max_tokens: int, whole: bool) -> list[list[_Chunk]]:
    """Return steps of up to ``max_tokens`` tokens.  A sequence may continue in the next step, unless ``whole``."""
    steps: list[list[_Chunk]] = []
    room = 0
    for row, count in enumerate(counts):
        begin = 0
        while begin < count:
            if room == 0 or (whole and count > room):
                steps.append([])
                room = max_tokens
            taken = min(room, count - begin)
            steps[-1].append(_Chunk(row, begin, taken))
            begin, room = begin + taken, room - taken
    return steps
