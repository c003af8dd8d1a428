"""The Program: the interface between the engine and a model that runs, with its limits and its description.

Eager mode and the native core implement the same few methods, so that everything above them is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.config import check_choice, check_integer
from penstock.core.layouts import (
    KV_LAYOUTS,
    PAGE_TOKENS,
    PARTITION_PAGES,
    kv_layout_of,
    pages_by_group,
    pages_for,
    whole_partitions,
)
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.core.native import MemoryPlan, Sampled, Sampling, StepBatch

__all__ = [
    "KV_LAYOUTS",
    "MAX_REQUESTS",
    "PAGE_TOKENS",
    "PARTITION_PAGES",
    "WEIGHTS",
    "PipelinedProgram",
    "Program",
    "ProgramInfo",
    "ProgramLimits",
    "kv_layout_of",
    "pages_by_group",
    "pages_for",
    "whole_partitions",
]

MAX_REQUESTS = 1 << 16
"""The limit on the requests of one step, which a captured graph has."""
WEIGHTS = ("mmap", "huge")
"""The place of the weights: in the mapped file, or in a private copy in huge pages."""


@dataclass(frozen=True)
class ProgramLimits:
    """The sizes that a program's memory is planned for.

    ``max_tokens``: tokens of one step.
    ``max_requests``: requests of one step.  A program has as many slots, each of which remembers the token last sampled
    in it.
    ``max_rows``: rows of logits of one step (0: chosen when the program is opened).
    ``num_pages``: KV pages of each page group whose layers have no window (0: as many as the requests need, or as
    memory holds), those of all ranks that they are dealt out to.  A group with a window has as many at most
    (``core.layouts.pages_by_group``).
    ``context_len``: tokens of one request, prompt and answer (0: as many as the model allows).
    ``kv_layout``: the type of keys and values, one of ``KV_LAYOUTS``; "auto" is what a
    quantized folder says, else f32 with scheme f32, otherwise bf16.
    ``weights``: "mmap" starts at once and shares the file's pages with every process that maps them; "huge" copies them
    first.

    The limits of an open program have no zero and no "auto".
    """

    max_tokens: int = 512
    max_requests: int = 32
    max_rows: int = 0
    num_pages: int = 0
    context_len: int = 0
    kv_layout: str = "auto"
    weights: str = "mmap"

    def __post_init__(self) -> None:
        """Refuse sizes that no program can have."""
        minimums = {"max_requests": 1, "max_tokens": 1, "max_rows": 0, "num_pages": 0, "context_len": 0}
        for name, low in minimums.items():
            check_integer(name, getattr(self, name), low, MAX_REQUESTS if name == "max_requests" else 2**31 - 1)
        if 0 < self.max_rows < self.max_requests:
            raise InvalidArgumentError(
                f"max_rows: expected 0 or at least max_requests ({self.max_requests}), got {self.max_rows}",
                param="max_rows",
            )
        check_choice("kv_layout", self.kv_layout, KV_LAYOUTS)
        check_choice("weights", self.weights, WEIGHTS)


@dataclass(frozen=True)
class ProgramInfo:
    """The description of a program.

    ``page_windows`` has one entry per page group; 0 keeps every position.  ``group_pages``: the pages of each group;
    empty is the ``num_pages`` of the limits for all.  ``hidden_size`` is the width of its hidden
    rows, 0 when it has none.  ``tail`` is "argmax" or "topk" when the program ends in token ids and has no logits.
    ``bidirectional``: attention is not causal, so a step takes only whole requests, and none can be continued.
    ``prefix_token``: of an encoder-decoder the first token of the decoder, of a network with a prefix mask the first
    one behind the prefix, -1 of others.  The tokens before it run in one step, with it.
    ``num_stages``: of a pipeline; such a program is a PipelinedProgram.  ``num_ranks``: the ranks that have weights;
    ``num_threads`` and the bytes are those of the first of them, ``plan`` is that of rank 0, and ``rank_plans`` are
    those of all, if they are several.  ``context_ranks``: the ranks that the pages of a request are dealt out to.
    ``repeated_kv_bytes``: the bytes of keys and values that several ranks have.
    """

    network: str
    scheme: str
    mode: str
    vocab_size: int
    context_len: int
    page_windows: tuple[int, ...]
    weight_bytes: int
    weight_bytes_per_token: int
    num_threads: int
    cpu_level: str
    plan: MemoryPlan | None = None
    hidden_size: int = 0
    tail: str = ""
    bidirectional: bool = False
    prefix_token: int = -1
    num_stages: int = 1
    num_ranks: int = 1
    rank_plans: tuple[MemoryPlan, ...] = ()
    context_ranks: int = 1
    group_pages: tuple[int, ...] = ()
    repeated_kv_bytes: int = 0

    @property
    def whole_prompts(self) -> bool:
        """True if a prompt runs in one step, because its tokens see later ones."""
        return self.bidirectional or self.prefix_token >= 0

    @property
    def plans(self) -> tuple[MemoryPlan, ...]:
        """The memory plan of each rank; empty in eager mode."""
        return self.rank_plans or (() if self.plan is None else (self.plan,))


class Program(Protocol):
    """A model with its memory.  Only one thread at a time may use it."""

    @property
    def info(self) -> ProgramInfo:
        """The description of the program."""

    @property
    def limits(self) -> ProgramLimits:
        """The sizes that the program was planned for."""

    def run(self, batch: StepBatch) -> None:
        """Compute one step; the logits of ``batch.output_rows`` stay in the program's memory."""

    def logits(self) -> NDArray[np.float32]:
        """Return the last step's logits, [R, vocab]: a view that the next ``run`` overwrites."""

    def hidden(self) -> NDArray[np.float32]:
        """Return the rows after the last norm of the last step, [T, hidden_size]; the batch must have had ``hidden``.

        The result is a view that the next ``run`` overwrites.
        """

    def sample(self, sampling: Sampling) -> Sampled:
        """Sample every row of the last step."""

    def step(self, batch: StepBatch, sampling: Sampling) -> Sampled:
        """Run and sample in one call.

        A call with the same two objects, whose arrays may have other contents, may return the same result object.
        """

    def page_memory(self) -> Sequence[Sequence[NDArray[np.uint8]]]:
        """Return the KV pages of each page group: the bytes of each state of the group, [pages, bytes of a page].

        The results are writable views.  Empty if the pages cannot be reached, as those of several ranks.
        """

    def end_exchanges(self) -> None:
        """Fail the step of another thread if it waits for other ranks.  The program can then only be closed."""

    def close(self) -> None:
        """Free the memory.  A second call does nothing."""


class PipelinedProgram(Program, Protocol):
    """A program of several stages, each of which can compute another step."""

    def launch(self, batch: StepBatch, sampling: Sampling | None) -> None:
        """Start a step.  Its rows are sampled if ``sampling`` is not None.

        There can be as many steps in flight as stages.  The arrays of ``sampling`` must stay as they are until the step
        is collected; those of ``batch`` need not.
        """

    def collect(self) -> Sampled | None:
        """Wait for the oldest step in flight, which is then the last step, and return its sampled rows."""
