"""Prefill and decode apart in the simulator: which replicas have which role, and the copies of pages between them.

As in the service, a request begins in a replica for prefill and goes on there until copies of its prompt's pages are in
a replica for decode; then it goes on in that one, which computes the rest of the text that is no full page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cluster.replica import NS
from penstock.cluster.roles import DECODE, PREFILL, WorkerRoles, role_for
from penstock.config import check_number
from penstock.runtime.program import PAGE_TOKENS

if TYPE_CHECKING:
    from penstock.cluster.replica import Arrived, Replica

__all__ = ["CopyCosts", "Handover", "Handovers"]


@dataclass(frozen=True)
class CopyCosts:
    """The seconds of copying pages from one worker to another: of each copy, and of each page of 32 tokens."""

    copy_s: float = 0.005
    page_s: float = 0.001

    def __post_init__(self) -> None:
        """Check both."""
        check_number("copy_s", self.copy_s, 1e6, may_be_zero=True)
        check_number("page_s", self.page_s, 1e6, may_be_zero=True)


@dataclass(frozen=True)
class Handover:
    """A copy that is under way: the pages with these keys go from one replica to that at ``target``."""

    arrived: Arrived
    source: Replica
    target: int
    receiver: Replica
    keys: list[bytes]


class Handovers:
    """The roles of replicas, and what was handed over.  The first places are those for prefill."""

    def __init__(self, roles: WorkerRoles, costs: CopyCosts) -> None:
        self._roles, self._costs = roles, costs
        self.num_done = self.num_pages = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        """Tokens of prompts that a second replica counted."""

    def suited(self, prompt_len: int, places: Sequence[int], *, has_begun: bool = False) -> Sequence[int]:
        """Return the places that a request may go to: those of its role, or all if none of them is up."""
        role = role_for(prompt_len, has_begun=has_begun)
        return [place for place in places if self._roles.role_of(place) == role] or places

    def note_first(self, arrived: Arrived) -> None:
        """Leave out what a second replica counts of a request that it goes on with."""
        if arrived.request.num_resumed:
            self.num_prompt_tokens += len(arrived.request.prompt_ids)
            self.num_cached_tokens += arrived.request.num_cached

    def targets(self, arrived: Arrived, places: Sequence[int], has_place: Callable[[int], bool]) -> list[int]:
        """Return the places that may go on with a request which has its first token."""
        if self._roles.role_of(arrived.place) != PREFILL:
            return []
        return [place for place in places if self._roles.role_of(place) == DECODE and has_place(place)]

    def begin(
        self, arrived: Arrived, source: Replica, target: int, receiver: Replica, num_known: int
    ) -> tuple[Handover, int]:
        """Return a copy of the full pages of a prompt, and its time in nanoseconds.

        ``num_known``: leading pages that the replica at ``target`` has.
        """
        keys = arrived.request.page_keys[: len(arrived.request.prompt_ids) // PAGE_TOKENS]
        num_missing = max(0, len(keys) - num_known)
        self.num_pages += num_missing
        seconds = self._costs.copy_s + num_missing * self._costs.page_s
        return Handover(arrived, source, target, receiver, keys), round(seconds * NS)
