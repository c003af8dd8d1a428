"""The interfaces of batches, queues, processes and machines that a process pool needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from penstock.processes.supervision import Death
    from penstock.servables.process import worker_messages_pb2 as pb

__all__ = ["PoolBatch", "PoolMachine", "PoolProcess", "PoolQueue"]


class PoolBatch(Protocol):
    """A batch that a process of a pool runs."""

    @property
    def began(self) -> float:
        """The time when it was sent, in seconds of the monotonic clock."""

    @property
    def num_parts(self) -> int:
        """The number of parts of requests in it."""

    @property
    def stage_names(self) -> Sequence[str]:
        """The names of the stages or the model that run it."""

    @property
    def is_abandoned(self) -> bool:
        """Return True if all of its requests have ended."""

    def message(self) -> pb.ToStage:
        """Return the message for the process, and record the time in ``began``."""

    def complete(self, result: pb.Result) -> None:
        """Pass the result to the requests.  Raises ValueError if the result does not fit the batch."""

    def fail(self, error: Exception) -> None:
        """End its requests with an error."""

    def process_lost(self, position: tuple[int, int], is_hung: bool, why: str) -> None:
        """Rerun the batch by request, or end its only request: its process died or hung at ``position``."""

    def process_killed(self, why: str) -> None:
        """Rerun the batch by request, or end its only request with UnavailableError if several processes were killed
        with it: a signal from outside ended its process."""

    def machine_lost(self, why: str) -> None:
        """Rerun the batch, or end its requests with UnavailableError if several machines were lost with it."""


class PoolQueue(Protocol):
    """A queue whose batches a pool runs."""

    @property
    def num_waiting(self) -> int:
        """The number of instances that wait."""

    def take(self, now: float) -> Sequence[PoolBatch]:
        """Return batches that are due at ``now``; empty if none is due."""

    def wake_at(self) -> float:
        """Return when the next batch is due."""

    def refuse_all(self, error: Exception) -> None:
        """End everything that waits with an error."""


class PoolProcess(Protocol):
    """A process of a pool, on this machine or another one.

    ``pid``: its id, 0 on another machine.  ``label`` names it in the log.  ``is_joined``: it runs on another machine.
    ``manifest``: the manifest of the servable in JSON; empty for a process that runs a model.
    ``on_result`` is called with the result of each batch, ``on_end`` as soon as the process is known to have ended.
    """

    pid: int
    label: str
    manifest: str
    is_joined: bool
    is_hung: bool
    on_result: Callable[[pb.Result], None]
    on_end: Callable[[], None]

    @property
    def has_begun(self) -> bool:
        """Return True if the process has started to read the batch that it was sent last."""

    def position(self) -> tuple[int, int]:
        """Return the stage of the unit that it runs or ran last, and the instance of the batch, -1 for all."""

    def send_batch(self, message: pb.ToStage) -> bool:
        """Send a batch; the result of the previous one must have arrived.  False if the process is gone."""

    def kill(self) -> None:
        """Kill the process at once."""

    async def wait_ended(self) -> Death:
        """Wait until the process has ended, and return how; the cause is "lost" if its machine is gone."""

    async def stop(self) -> None:
        """End the process."""


class PoolMachine(Protocol):
    """Another machine that runs processes of pools.

    ``num_processes``: how many of each pool.  ``leaving``: set when it is about to leave, or has left.
    """

    name: str
    num_processes: int
    leaving: asyncio.Event

    async def start(self, start: pb.Start, load_s: float) -> PoolProcess:
        """Start a process and wait until it is ready; raise InvalidFileError or UnavailableError."""
