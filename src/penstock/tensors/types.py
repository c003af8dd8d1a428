"""The seam between the doors and what answers inference requests over tensors: the Open Inference Protocol's terms.

Doors make an InferRequest of JSON, of binary tensors or of a gRPC message, find the Method that it asks for in the
Methods of the service, and write its InferResponse in the form that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

__all__ = [
    "DTYPES", "InferRequest", "InferResponse", "Method", "MethodStatistics", "Methods", "ModelState", "Running",
    "Tensor", "TensorSpec",
]  # fmt: skip

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype("O"),
}
"""The protocol's datatypes and numpy's.  BF16 is held as its bits; an element of BYTES is a ``bytes`` object."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor with its name.  ``array`` has the dtype that DTYPES gives ``datatype``, and may not be written to."""

    name: str
    datatype: str
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a method takes or gives: ``shape`` begins with the batch dimension; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request whose form is in order; whether its tensors fit the method is the method's to check (MisfitError with
    the tensor's name as path).

    ``request_id``: the client's own, and where a method is asked the one that the log knows.
    ``outputs``: the names that are asked for, all when empty.  ``deadline_s``: seconds that it may take from now.
    ``priority``: lower goes first.  ``per_instance_errors``: instances that fail are told in the answer's parameter
    ``errors``, and the others are answered.
    """

    request_id: str
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = float("inf")
    priority: int = 0
    per_instance_errors: bool = False


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The outputs, in the order that they were asked for, and which version they are of."""

    version: str
    outputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class MethodStatistics:
    """Sums since the version was loaded, as the protocol's statistics extension has them: times in nanoseconds.

    ``num_inferences`` counts instances that were answered, ``num_executions`` batches of which something came, of the
    last stage with a model (of any, without).
    """

    num_inferences: int = 0
    num_executions: int = 0
    last_inference_ms: int = 0
    num_success: int = 0
    success_ns: int = 0
    num_fail: int = 0
    fail_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    num_rejected: int = 0
    num_cancelled: int = 0
    batch_sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each size of a batch (without what failed), how many ran and how long they took."""


@dataclass(frozen=True, slots=True)
class Running:
    """How a method is run, for operators.

    ``policy``: which versions are served, as Triton's configuration has it.  ``processes``: how many run it, by what
    they run.  Of the step that the statistics count: ``batch_sizes`` that go without waiting for more (none where it
    takes one instance at a time), ``max_delay_s``, and ``max_waiting`` instances in its queue.
    """

    policy: Mapping[str, Any]
    processes: Mapping[str, int]
    batch_sizes: Sequence[int] = ()
    max_delay_s: float = 0.0
    max_waiting: int = 0


@dataclass(frozen=True, slots=True)
class ModelState:
    """A line of the repository's index.  ``state``: READY, LOADING, UNLOADING or UNAVAILABLE, ``reason`` for people."""

    name: str
    version: str
    state: str
    reason: str = ""


class Method(Protocol):
    """One method of one version of a servable."""

    @property
    def name(self) -> str:
        """As requests have it: SERVABLE.METHOD."""

    @property
    def version(self) -> str:
        """The number of its version."""

    @property
    def versions(self) -> Sequence[str]:
        """All versions of the servable that are ready."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What every request has to have."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """What it can be asked for."""

    @property
    def max_batch_size(self) -> int:
        """Instances of a request at most; larger batches than the models' are split."""

    @property
    def running(self) -> Running:
        """How it is run."""

    @property
    def statistics(self) -> MethodStatistics:
        """What it did so far."""

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now would be taken."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer; cancelling the caller cancels the request.

        MisfitError (a tensor that does not fit), RefusalError, QueueFullError, DeadlineError, UnavailableError.
        """


class Methods(Protocol):
    """All servables of the service."""

    def list(self) -> Sequence[Method]:
        """Every method of every version that is ready."""

    def find(self, name: str, version: str = "") -> Method | None:
        """The method for a model's name (SERVABLE or SERVABLE.METHOD) and a version, a label or "".

        None when no servable has the name.  NotFoundError for a version or method that it does not have,
        UnavailableError for one that is not ready.
        """

    def index(self) -> Sequence[ModelState]:
        """Every version of every servable, ready or not."""

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a servable of the folder, or look at its folder again: new versions are loaded, verified, warmed and
        switched to, others drained, as its policy has it.  NotFoundError, InvalidFileError, InvalidArgumentError for
        ``config`` (versions, labels); on an error what ran goes on.
        """

    async def unload(self, name: str) -> None:
        """Take no more requests, let those that run end, end its processes; NotFoundError."""
