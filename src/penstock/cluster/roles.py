"""The roles of workers: those that compute prompts, and those that go on with the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.config import check_integer
from penstock.runtime.program import PAGE_TOKENS

__all__ = ["DECODE", "MIN_PAGES", "PREFILL", "WorkerRoles", "role_for"]

MIN_PAGES: Final = 2
"""A text of fewer pages is computed again."""
PREFILL: Final = "prefill"
DECODE: Final = "decode"


@dataclass(frozen=True)
class WorkerRoles:
    """The number of workers of a model with each role; 0 and 0: none has one."""

    num_prefill: int = 0
    num_decode: int = 0

    def __post_init__(self) -> None:
        """Refuse one role without the other."""
        least = 1 if self.num_prefill or self.num_decode else 0
        check_integer("prefill_workers", self.num_prefill, least, 256)
        check_integer("decode_workers", self.num_decode, least, 256)

    @property
    def num_workers(self) -> int:
        """The workers that have a role."""
        return self.num_prefill + self.num_decode

    def role_of(self, number: int) -> str:
        """Return the role of the worker that starts as this one, from 0; "" without roles."""
        if not self.num_workers:
            return ""
        return PREFILL if number < self.num_prefill else DECODE

    def without(self, role: str) -> WorkerRoles:
        """Return the roles after a worker was drained: at least one worker of each, if there are roles."""
        if not self.num_workers:
            return self
        num_prefill, num_decode = self.num_prefill - (role == PREFILL), self.num_decode - (role == DECODE)
        return WorkerRoles(max(1, num_prefill), max(1, num_decode))


def role_for(num_tokens: int, *, has_begun: bool) -> str:
    """Return the role whose workers a request goes to.

    A short prompt runs where its answer does, because copying its pages takes longer than computing them.
    """
    return DECODE if has_begun or num_tokens < MIN_PAGES * PAGE_TOKENS else PREFILL
