"""The interface of a placement: it starts the process of a worker, watches it and ends it.

A worker and its ranks are one group: they run on one machine, start together and end together.  The caller decides
about restarts; a placement starts each process once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["PlacedGroup", "Placement", "Resources"]


@dataclass(frozen=True)
class Resources:
    """The resources that a group needs on one machine.

    ``num_ranks`` processes with ``num_cpus`` cores each, and ``memory_bytes`` of memory together (0: not known).
    """

    num_ranks: int = 1
    num_cpus: int = 1
    memory_bytes: int = 0


class PlacedGroup(Protocol):
    """A group that was started.

    ``pid``: the worker's process id on its machine.  ``node``: the address of that machine, "" for this one.
    """

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str: ...

    async def wait(self) -> int | None:
        """Wait until the group has ended and return the worker's exit status, negative for a signal.

        None: its machine is lost, or does not answer after ``kill``.
        """

    def kill(self) -> None:
        """End the group at once.  Does nothing if it has ended."""

    def release(self) -> None:
        """Free what this process holds for a group that has ended."""


class Placement(Protocol):
    """Starts groups.

    ``is_local``: workers run on this machine and join the primary over its unix socket.  Otherwise they join over TLS,
    and the certificates that they trust are part of their configuration.
    """

    @property
    def is_local(self) -> bool: ...

    async def open(self) -> None:
        """Get ready; raises the error of a cluster that cannot be reached."""

    async def start(self, config: str, resources: Resources) -> PlacedGroup:
        """Start a worker with one line of configuration on its standard input.

        Raises OSError if the process cannot be started, and UnavailableError if no machine has the resources.
        """

    async def close(self) -> None:
        """End all groups and leave nothing behind."""
