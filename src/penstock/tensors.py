"""The interface between the gateways and the servables, in the terms of the Open Inference Protocol.

A gateway decodes JSON, binary tensors or a gRPC message into an InferRequest, finds the requested Method in the
service's Methods, and encodes the InferResponse in the requested format.
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
"""The protocol's datatypes and their numpy dtypes.  BF16 is stored as bits; a BYTES element is a ``bytes`` object."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor.  ``array`` has the dtype ``DTYPES[datatype]`` and is read-only."""

    name: str
    datatype: str
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a method: ``shape`` begins with the batch dimension; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A well-formed request.  The method checks its tensors and raises MisfitError with a tensor's name as path.

    ``request_id``: the client's id, or in a call of ``Method.infer`` the id in the log.
    ``outputs``: names of the requested outputs; empty for all.  ``deadline_s``: seconds from now until the request
    expires.  ``priority``: lower goes first.  ``per_instance_errors``: report failed instances in the response
    parameter ``errors`` and answer the others.
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
    """The outputs in the requested order, and the version that computed them."""

    version: str
    outputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class MethodStatistics:
    """Sums since the version was loaded, as in the protocol's statistics extension.  Times are in nanoseconds.

    ``num_inferences`` counts answered instances.  ``num_executions`` counts batches with at least one result, of the
    last stage with a model (or of the last stage, if none has a model).
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
    """For each batch size (failed instances excluded): the number of batches and their total time."""


@dataclass(frozen=True, slots=True)
class Running:
    """The way a method runs, for operators.

    ``policy``: which versions are served, in the format of Triton's model configuration.  ``processes``: the number of
    processes by what they run.  The rest describes the stage that the statistics count: ``batch_sizes`` that start
    without waiting for more instances (empty if it takes one instance at a time), ``max_delay_s`` in seconds, and
    ``max_waiting``, the most instances in its queue.
    """

    policy: Mapping[str, Any]
    processes: Mapping[str, int]
    batch_sizes: Sequence[int] = ()
    max_delay_s: float = 0.0
    max_waiting: int = 0


@dataclass(frozen=True, slots=True)
class ModelState:
    """An entry of the repository index.  ``state``: READY, LOADING, UNLOADING or UNAVAILABLE; ``reason``: its cause."""

    name: str
    version: str
    state: str
    reason: str = ""


class Method(Protocol):
    """One method of one version of a servable."""

    @property
    def name(self) -> str:
        """The name that requests use: SERVABLE.METHOD."""

    @property
    def version(self) -> str:
        """The version's number."""

    @property
    def versions(self) -> Sequence[str]:
        """All versions of the servable that are ready."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The inputs that each request must have."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The outputs that a request can ask for."""

    @property
    def max_batch_size(self) -> int:
        """The maximum number of instances in a request; it may exceed the models' batch size, and is then split."""

    @property
    def running(self) -> Running:
        """The way the method runs."""

    @property
    def statistics(self) -> MethodStatistics:
        """The method's statistics so far."""

    @property
    def is_ready(self) -> bool:
        """True if a new request would be accepted."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run the method and return its outputs; cancelling the caller cancels the request.

        Raises MisfitError (a tensor does not match its spec), RefusalError, QueueFullError, DeadlineError,
        UnavailableError.
        """


class Methods(Protocol):
    """All servables of the service."""

    def list(self) -> Sequence[Method]:
        """Return each method of each ready version."""

    def find(self, name: str, version: str = "") -> Method | None:
        """Return the method for a model name (SERVABLE or SERVABLE.METHOD) and a version, a label or "".

        Returns None if no servable has the name.  Raises NotFoundError if the servable has no such version or method,
        UnavailableError if that is not ready.
        """

    def index(self) -> Sequence[ModelState]:
        """Return each version of each servable, ready or not."""

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a servable of the folder, or scan its folder again.

        New versions are loaded, verified, warmed and switched to, and others drained, according to its policy.  Raises
        NotFoundError, InvalidFileError, or InvalidArgumentError for ``config`` (versions, labels).  After an error the
        running versions stay in service.
        """

    async def unload(self, name: str) -> None:
        """Stop taking requests, let running ones finish, and end the servable's processes.  Raises NotFoundError."""
