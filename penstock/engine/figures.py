"""What an engine has done and holds, as one plain object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EngineFigures"]


@dataclass(frozen=True)
class EngineFigures:
    """Counts at one moment; those of tokens, steps and ends since the engine began.

    Pages are those of the page group that holds most.  ``num_named_pages`` could be shared by a later request.
    ``num_cached_tokens`` of the ``num_prompt_tokens`` were shared instead of computed.  ``num_finished`` is by
    reason: "length", "stop", "abort", "error".
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

    @property
    def page_use(self) -> float:
        """The share of pages that requests hold, 0 to 1."""
        return self.num_held_pages / self.num_pages if self.num_pages else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were shared instead of computed, 0 to 1."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
