"""Drive a program step by step without an engine: every request has its own pages, every position its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

import numpy as np
import pytest

from penstock.core.native import ALL_THREADS, Context, CoreProgram, Model, ProgramOptions, StepBatch, cpu_levels
from penstock.graph.ir import KvLayout
from penstock.ops.table import LINEAR_SCHEMES
from tests.support.marks import mostly_exhaustive

PAGE_TOKENS = 32
LEVELS = [name for name, runnable in cpu_levels() if runnable]  # best first

_QUICK = (("f32", KvLayout.F32), ("bf16", KvLayout.BF16), ("w4a8", KvLayout.INT8), ("w8a8", KvLayout.INT4))
_IN_TURN = (KvLayout.F32, KvLayout.BF16, KvLayout.INT8) * len(LINEAR_SCHEMES)
_LONG = [*zip(LINEAR_SCHEMES, _IN_TURN, strict=False), *(("w8a8", kv) for kv in KvLayout)]

_FORMATS = mostly_exhaustive(product(LINEAR_SCHEMES, KvLayout), _QUICK, [row for row in _LONG if row not in _QUICK])

each_format = pytest.mark.parametrize(
    ("scheme", "kv"),
    _FORMATS,
    ids=lambda value: value if isinstance(value, str) else f"kv_{value.name.lower()}",
)
"""Every scheme with every type of keys and values; the long tests have each scheme with one type."""


def each_format_and_level(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with every format at every level: each time all quick formats at the best one, and one at the others.

    The generic level computes one value at a time, which takes ten times as long.
    """
    rows = [pytest.param(*row.values, LEVELS[0], marks=row.marks) for row in _FORMATS]
    for level in LEVELS[1:]:
        for row in _FORMATS:
            is_long = row.values in _QUICK and row.values != _QUICK[-1]
            rows.append(pytest.param(*row.values, level, marks=pytest.mark.long if is_long else row.marks))
    names = [f"{row.values[2]}-{row.values[0]}-kv_{row.values[1].name.lower()}" for row in rows]
    return pytest.mark.parametrize(("scheme", "kv", "level"), rows, ids=names)(test)


class Runs(Protocol):
    """What a program must do to be driven here."""

    def run(self, batch: StepBatch) -> None: ...
    def logits(self) -> np.ndarray: ...


@dataclass
class Stream:
    """One request: its tokens, how many have been computed, its pages."""

    token_ids: list[int]
    pages: list[int]
    num_computed: int = 0
    rows: list[np.ndarray] = field(default_factory=list)

    def logits(self) -> np.ndarray:
        return np.concatenate(self.rows)


def open_program(
    model: Model, context: Context, num_tokens: int, *, num_requests: int = 8, kv: KvLayout = KvLayout.F32
) -> CoreProgram:
    """A program for ``num_tokens`` tokens in all, any of them in one step, each with a row of logits."""
    options = ProgramOptions(
        max_tokens=num_tokens,
        max_requests=num_requests,
        max_rows=num_tokens,
        num_pages=num_tokens // PAGE_TOKENS + 2 * num_requests,
        kv_layout=kv,
        flags=ALL_THREADS,  # the tiny steps of a tiny model would be one thread's
    )
    return CoreProgram(model, context, options)


def make_streams(prompts: Sequence[Sequence[int]], seed: int = 0) -> list[Stream]:
    """Streams whose pages lie scattered over the pool."""
    needed = [-(-len(p) // PAGE_TOKENS) for p in prompts]
    pages = np.random.default_rng(seed).permutation(sum(needed)).tolist()
    streams = []
    for prompt, count in zip(prompts, needed, strict=True):
        streams.append(Stream(list(prompt), pages[:count]))
        del pages[:count]
    return streams


def run_step(program: Runs, work: Sequence[tuple[Stream, int]], groups: int = 1) -> None:
    """One step: ``count`` further tokens of each stream; keeps a row of logits for every token."""
    width = max(len(stream.pages) for stream, _ in work)
    tables = np.full((groups, len(work), width), -1, np.int32)
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for index, (stream, count) in enumerate(work):
        tables[:, index, : len(stream.pages)] = stream.pages
        span = range(stream.num_computed, stream.num_computed + count)
        ids += [stream.token_ids[p] for p in span]
        positions += span
        starts.append(len(ids))
        stream.num_computed += count
    as_array = lambda values: np.asarray(values, np.int32)  # noqa: E731
    program.run(StepBatch(as_array(ids), as_array(positions), as_array(starts), tables, as_array(range(len(ids)))))
    logits = program.logits()
    for index, (stream, _) in enumerate(work):
        stream.rows.append(np.array(logits[starts[index] : starts[index + 1]]))


def run_alone(
    program: Runs, prompt: Sequence[int], chunk: int | None = None, seed: int = 0, groups: int = 1
) -> np.ndarray:
    """Logits [len, vocab] of a prompt by itself, whole or in chunks, with ``groups`` groups of pages."""
    stream = make_streams([prompt], seed)[0]
    while (left := len(prompt) - stream.num_computed) > 0:
        run_step(program, [(stream, min(left, chunk or left))], groups)
    return stream.logits()


def run_together(
    program: Runs, prompts: Sequence[Sequence[int]], chunks: Iterable[int], groups: int = 1
) -> list[np.ndarray]:
    """Logits of prompts that advance in one batch; request i takes chunks of its own size, so that prefill and
    decode mix and requests leave at different steps."""
    streams = make_streams(prompts, seed=1)
    sizes = list(chunks)
    while any(s.num_computed < len(s.token_ids) for s in streams):
        work = [
            (s, min(size, len(s.token_ids) - s.num_computed))
            for s, size in zip(streams, sizes, strict=True)
            if s.num_computed < len(s.token_ids)
        ]
        run_step(program, work, groups)
    return [s.logits() for s in streams]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal as bytes: minus zero differs from zero, and a NaN from another."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
