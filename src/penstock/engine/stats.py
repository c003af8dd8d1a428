"""The counters and gauges of an engine, as one plain object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["STEP_TOKENS", "EngineStats"]

STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The bounds of the histogram of tokens per step, the same as vLLM's."""


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment.  Those of tokens, steps and ends are totals since the engine began.

    The numbers of pages are those of the page group that holds most.  ``num_named_pages`` could be shared by a later
    request; without the prefix cache they are pages of prompts with several answers, which no other prompt shares.
    ``num_cached_tokens`` of the ``num_prompt_tokens`` were shared and not computed. ``num_finished`` is by reason:
    "length", "stop", "abort", "error". ``num_step_tokens`` are the tokens that steps computed.  ``num_steps_by`` counts
    steps by their number of tokens: the key is the smallest of STEP_TOKENS that is not below it, as a string, or ""
    above all of them.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_held_pages: int
    num_named_pages: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_finished: Mapping[str, int]
    num_step_tokens: int
    num_steps_by: Mapping[str, int]

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return what was counted since an earlier moment of the same engine.  Gauges keep their present values."""
        counters = (
            "num_steps", "num_preemptions", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens",
            "num_step_tokens",
        )  # fmt: skip
        counts = {name: getattr(self, name) - getattr(earlier, name) for name in counters}
        return replace(
            self,
            **counts,
            num_finished=_since(self.num_finished, earlier.num_finished),
            num_steps_by=_since(self.num_steps_by, earlier.num_steps_by),
        )

    @property
    def page_use(self) -> float:
        """The share of pages that requests hold, 0 to 1."""
        return self.num_held_pages / self.num_pages if self.num_pages else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were shared and not computed, 0 to 1."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def _since(now: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    counts = {name: count - earlier.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in counts.items() if count}
