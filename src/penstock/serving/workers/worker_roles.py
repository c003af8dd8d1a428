"""Prefill and decode apart: workers that compute prompts, and workers that go on with the answers.

Disaggregation as in "DistServe" (Y. Zhong et al., 2024): a long prompt then delays no answer of another request.  A
request begins in a worker for prefill; after its first token the pages of its prompt are copied to a worker for decode,
which goes on.  A worker without a role does both.  If no worker of a role is ready and has room, those of the other do
its work.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.config import check_choice, check_integer
from penstock.logs import tell
from penstock.runtime.program import PAGE_TOKENS
from penstock.serving.workers.moving.copy_pages import MIN_PAGES

if TYPE_CHECKING:
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = [
    "DECODE",
    "NO_ROLES",
    "PREFILL",
    "WorkerRoles",
    "check_role",
    "of_role",
    "role_for",
    "takes_over",
    "warn_of_roles",
]

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


NO_ROLES: Final = WorkerRoles()


def check_role(value: str) -> str:
    """Return the role that a worker asks for, "" for none.  Raises InvalidArgumentError."""
    check_choice("role", value, ("", PREFILL, DECODE))
    return value


def role_for(num_tokens: int, *, has_begun: bool) -> str:
    """Return the role whose workers a request goes to.

    A short prompt runs where its answer does, because copying its pages takes longer than computing them.
    """
    return DECODE if has_begun or num_tokens < MIN_PAGES * PAGE_TOKENS else PREFILL


def of_role(connections: Sequence[WorkerConnection], role: str) -> Sequence[WorkerConnection]:
    """Return the workers of a role and those without one; those that have room if none of them has."""
    suited = [one for one in connections if one.role in ("", role)]
    if any(one.has_room for one in suited):
        return suited
    return [one for one in connections if one.has_room] or suited or connections


def takes_over(source: WorkerConnection, other: WorkerConnection) -> bool:
    """Return True if a worker goes on with what ``source``, for prefill, has begun.

    Their state ids are equal.  Without a copy of its pages the prompt would be computed twice.
    """
    is_suited = source.role == PREFILL and other.role != PREFILL and source.copies_pages and other.copies_pages
    return is_suited and other.is_fresh and other.has_place


def warn_of_roles(name: str, roles: WorkerRoles, connections: Sequence[WorkerConnection]) -> None:
    """Say that roles have no effect if pages of the workers cannot be copied."""
    if roles.num_workers and not all(one.copies_pages for one in connections):
        text = (
            f"{name}: its pages cannot be copied, so answers stay in the workers for prefill where they began: that "
            "needs a prefix cache, graph mode, one rank, and prompts that can be divided"
        )
        tell("roles_without_copies", text, logging.WARNING, model=name)
