"""Prefill and decode apart: workers that compute prompts, and workers that go on with the answers.

Disaggregation as in "DistServe" (Y. Zhong et al., 2024): a long prompt then delays no answer of another request.  A
request begins in a worker for prefill; after its first token the pages of its prompt are copied to a worker for decode,
which goes on.  A worker without a role does both.  If no worker of a role is ready and has room, those of the other do
its work.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.cluster.roles import DECODE, PREFILL, WorkerRoles, role_for
from penstock.config import check_choice
from penstock.logs import tell

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

NO_ROLES: Final = WorkerRoles()


def check_role(value: str) -> str:
    """Return the role that a worker asks for, "" for none.  Raises InvalidArgumentError."""
    check_choice("role", value, ("", PREFILL, DECODE))
    return value


def of_role(connections: Sequence[WorkerConnection], role: str) -> Sequence[WorkerConnection]:
    """Return the workers of a role and those without one; those that have room if none of them has."""
    suited = [connection for connection in connections if connection.role in ("", role)]
    if any(connection.has_room for connection in suited):
        return suited
    return [connection for connection in connections if connection.has_room] or suited or connections


def takes_over(source: WorkerConnection, other: WorkerConnection) -> bool:
    """Return True if a worker goes on with what ``source``, for prefill, has begun.

    Their state ids are equal.  Without a copy of its pages the prompt would be computed twice.
    """
    is_suited = source.role == PREFILL and other.role != PREFILL and source.copies_pages and other.copies_pages
    return is_suited and other.is_fresh and other.has_place


def warn_of_roles(name: str, roles: WorkerRoles, connections: Sequence[WorkerConnection]) -> None:
    """Say that roles have no effect if pages of the workers cannot be copied."""
    if roles.num_workers and not all(connection.copies_pages for connection in connections):
        text = (
            f"{name}: its pages cannot be copied, so answers stay in the workers for prefill where they began: that "
            "needs graph mode, and prompts that can be divided"
        )
        tell("roles_without_copies", text, logging.WARNING, model=name)
