"""The interface between protocols and methods that run inference requests (Open Inference Protocol, version 2).

HTTP and gRPC decode a request to an InferRequest, find its ServedMethod in the Methods of the service, and encode the
InferResponse in the requested form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

__all__ = [
    "DTYPES", "InferRequest", "InferResponse", "MethodStatistics", "Methods", "ModelState", "Running",
    "ServedMethod", "Tensor", "TensorSpec",
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
    """An input or output of a method.  ``shape`` starts with the batch dimension; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A well-formed request.  The method checks whether its tensors fit (FieldError with the name of the tensor).

    ``request_id``: the client's id; for a method, the id in the log.
    ``outputs``: the names of the requested outputs; empty for all.
    ``deadline_s``: the time in seconds, from now, that the request may take.
    ``priority``: a lower number runs first.
    ``per_instance_errors``: failed instances are listed in the response parameter ``errors``; others are answered.
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
    """The outputs in the requested order, and the version that produced them."""

    version: str
    outputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class MethodStatistics:
    """Sums since the version was loaded, as in the protocol's statistics extension.  Times are in nanoseconds.

    ``num_inferences`` counts instances that succeeded.  ``num_executions`` counts batches with a result, of the last
    step with a model, or of the last step if there is none.
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
    """For each batch size (without failed instances), the number of batches and their total time."""


@dataclass(frozen=True, slots=True)
class Running:
    """The running configuration of a method, for operators.

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


class ServedMethod(Protocol):
    """One method of one version of a servable."""

    @property
    def name(self) -> str:
        """The name in requests: SERVABLE.METHOD."""

    @property
    def version(self) -> str:
        """The version's number."""

    @property
    def versions(self) -> Sequence[str]:
        """Return the versions of the servable that are ready."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The inputs that every request must have."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The outputs that a request can ask for."""

    @property
    def max_batch_size(self) -> int:
        """The maximum number of instances in a request.  Requests larger than the models' batches are split."""

    @property
    def running(self) -> Running:
        """Return the settings that the method runs with."""

    @property
    def statistics(self) -> MethodStatistics:
        """The counters of the method since it was loaded."""

    @property
    def is_ready(self) -> bool:
        """Return True if a new request would be accepted."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a request; cancelling the caller cancels it.

        Raises FieldError (a tensor that does not fit), RefusalError, QueueFullError, DeadlineError, UnavailableError.
        """


class Methods(Protocol):
    """The methods of all servables of a service."""

    def list(self) -> Sequence[ServedMethod]:
        """Return every method of every version that is ready."""

    def find(self, name: str, version: str = "") -> ServedMethod | None:
        """Return the method for a model's name (SERVABLE or SERVABLE.METHOD) and a version, a label or "".

        Returns None if no servable has the name.  Raises NotFoundError for an unknown version or method, and
        UnavailableError for one that is not ready.
        """

    def index(self) -> Sequence[ModelState]:
        """Return the state of every version of every servable."""

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a servable, or scan its folder again.

        New versions that its policy selects are loaded, checked, warmed up and switched to; others are drained.  If an
        error occurs, what ran before keeps running.  Raises NotFoundError, InvalidFileError, and InvalidArgumentError
        for ``config`` (versions, labels).
        """

    async def unload(self, name: str) -> None:
        """Refuse new requests, let running ones end, and stop its processes.  Raises NotFoundError."""
