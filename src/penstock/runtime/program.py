"""What the engine needs of a model that runs: the Program, and the figures that describe it.

Eager mode and the native core (later CUDA) implement the same few methods, so that everything above this
file is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.config import check_integer
from penstock.core.kv import KV_LAYOUTS, PAGE_TOKENS, kv_layout_of, pages_for
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.core.native import Plan, Sampled, Sampling, StepBatch

__all__ = [
    "KV_LAYOUTS",
    "MAX_REQUESTS",
    "PAGE_TOKENS",
    "WEIGHTS",
    "Program",
    "ProgramInfo",
    "ProgramLimits",
    "kv_layout_of",
    "pages_for",
]

MAX_REQUESTS = 1 << 16
"""The most requests that a captured graph takes in one step."""
WEIGHTS = ("mmap", "huge")
"""Where weights lie: in the mapped file, or in a private copy of huge pages."""


@dataclass(frozen=True)
class ProgramLimits:
    """The sizes that a program's memory is planned for.

    ``max_tokens``, ``max_requests`` and ``max_rows`` bound one step; ``num_pages`` counts KV pages per page
    group; ``context_len`` bounds one request (prompt and answer).  Zero for ``max_rows``, ``num_pages`` or
    ``context_len`` leaves the choice to ``open_program``; a program's own limits hold no zero.  A program has
    ``max_requests`` slots, each of which remembers the token last sampled in it.  ``kv_layout`` is one of
    ``KV_LAYOUTS``; a program's own limits name the one that "auto" became.  ``weights`` is one of ``WEIGHTS``: "mmap"
    shares the file's pages with every process that maps them and starts at once; "huge" copies them first.
    """

    max_tokens: int = 512
    max_requests: int = 32
    max_rows: int = 0
    num_pages: int = 0
    context_len: int = 0
    kv_layout: str = "auto"
    weights: str = "mmap"

    def __post_init__(self) -> None:
        """Refuse sizes that no program could have."""
        leasts = {"max_requests": 1, "max_tokens": 1, "max_rows": 0, "num_pages": 0, "context_len": 0}
        for name, least in leasts.items():
            check_integer(name, getattr(self, name), least, MAX_REQUESTS if name == "max_requests" else 2**31 - 1)
        if 0 < self.max_rows < self.max_requests:
            raise InvalidArgumentError(
                f"max_rows must be 0 or at least max_requests ({self.max_requests}), not {self.max_rows}",
                param="max_rows",
            )
        if self.kv_layout not in KV_LAYOUTS:
            layouts = ", ".join(KV_LAYOUTS)
            raise InvalidArgumentError(
                f"kv_layout (--kv-cache) must be one of {layouts}, not {self.kv_layout!r}", param="kv_layout"
            )
        if self.weights not in WEIGHTS:
            raise InvalidArgumentError(
                f"weights must be one of {', '.join(WEIGHTS)}, not {self.weights!r}", param="weights"
            )


@dataclass(frozen=True)
class ProgramInfo:
    """What a program is.  ``page_windows`` has one entry per page group: 0 keeps every position.  ``hidden_size`` is
    the width of its hidden rows, 0 when it has none to give; ``tail`` is "argmax" or "topk" when it ends in token ids
    and has no logits.  ``bidirectional``: attention is not causal, so that a step takes whole requests only, and none
    can be continued."""

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
    plan: Plan | None = None
    hidden_size: int = 0
    tail: str = ""
    bidirectional: bool = False


class Program(Protocol):
    """A model with its memory.  One thread uses it at a time."""

    @property
    def info(self) -> ProgramInfo:
        """What the program is."""

    @property
    def limits(self) -> ProgramLimits:
        """The sizes it was planned for."""

    def run(self, batch: StepBatch) -> None:
        """Compute one step; the logits of ``batch.output_rows`` stay in the program's memory."""

    def logits(self) -> NDArray[np.float32]:
        """The last step's logits, [R, vocab]: a view that the next ``run`` overwrites."""

    def hidden(self) -> NDArray[np.float32]:
        """The last step's rows behind the last norm, [T, hidden_size], of a batch with ``hidden``: a view that the next
        ``run`` overwrites."""

    def sample(self, sampling: Sampling) -> Sampled:
        """Sample every row of the last step."""

    def step(self, batch: StepBatch, sampling: Sampling) -> Sampled:
        """``run`` and ``sample`` in one call.

        Called with the same two objects again, whose arrays may hold other numbers, it may return the same object.
        """

    def close(self) -> None:
        """Give the memory back.  Calling it again does nothing."""
