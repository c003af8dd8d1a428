"""ServableRepository of a few lines for tests of the gateways, in the service's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.api_errors import FieldError
from penstock.errors import InvalidArgumentError, InvalidFileError, NotFoundError, UnavailableError
from penstock.tensors import (
    DTYPES,
    InferRequest,
    InferResponse,
    MethodStatistics,
    ModelState,
    Running,
    Tensor,
    TensorSpec,
)

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]


class StubMethod:
    """A method that calls a function; it waits for ``gate`` if that is set."""

    max_batch_size = 64
    running = Running({"all": {}}, {"sums: stages": 2}, (4, 8), 0.002, 100)

    def __init__(
        self, name: str, version: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], run: Run
    ) -> None:
        self.name, self.version, self.inputs, self.outputs = name, version, inputs, outputs
        self.versions: list[str] = [version]
        self.statistics = MethodStatistics()
        self.is_ready = True
        self.gate: asyncio.Event | None = None
        self.seen: list[InferRequest] = []
        self.num_cancelled = 0
        self._run = run

    async def infer(self, request: InferRequest) -> InferResponse:
        self.seen.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        missing = {one.name for one in self.inputs} - set(request.inputs)
        if missing and self.inputs:
            raise FieldError(min(missing), f"the input {min(missing)} is missing", "missing")
        outputs = {one.name: one for one in self._run(request.inputs)}
        names = request.outputs or list(outputs)
        for name in names:
            if name not in outputs:
                raise FieldError(name, f"there is no output {name}", "unknown")
        counts, size = self.statistics, max(len(one.array) for one in request.inputs.values())
        counts.num_inferences += size
        counts.num_executions += 1
        counts.num_success += 1
        counts.success_ns += 3000
        counts.compute_ns += 2000
        counts.queue_ns += 1000
        counts.last_inference_ms = 1_700_000_000_000
        ran, took = counts.batch_sizes.get(size, (0, 0))
        counts.batch_sizes[size] = (ran + 1, took + 2000)
        return InferResponse(self.version, [outputs[name] for name in names])


def _sum(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    x, y = (inputs[name].array for name in ("x", "y"))
    return [Tensor("sum", "FP32", x + y), Tensor("difference", "FP32", x - y)]


def _echo(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [Tensor(name, one.datatype, one.array) for name, one in inputs.items()]


def _raise(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    raise ZeroDivisionError("a secret of the operator's code")


def _odd(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    found = np.empty(1, object)
    found[0] = b"\xff\x00"
    return [Tensor("infinite", "FP32", np.array([np.inf], np.float32)), Tensor("bytes", "BYTES", found)]


def _zeros(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [Tensor("zeros", "INT64", np.zeros((len(inputs["n"].array), 4096), np.int64))]


class StubMethods:
    """``sums`` in two versions, the older with a label, and others named after what they do."""

    def __init__(self) -> None:
        two = [TensorSpec(name, "FP32", (-1, 2)) for name in ("x", "y")]
        out = [TensorSpec(name, "FP32", (-1, 2)) for name in ("sum", "difference")]
        any_ = [TensorSpec("x", "FP32", (-1, -1))]
        self.versions = {
            "sums": [StubMethod("sums.both", version, two, out, _sum) for version in ("1", "2")],
            "echo": [StubMethod("echo.it", "1", [], any_, _echo)],
            "broken": [StubMethod("broken.it", "1", [], any_, _raise)],
            "odd": [StubMethod("odd.it", "1", [], any_, _odd)],
            "zeros": [StubMethod("zeros.it", "1", [TensorSpec("n", "INT8", (-1,))], any_, _zeros)],
        }
        for one in self.versions["sums"]:
            one.versions = ["1", "2"]
        self.labels = {("sums", "stable"): "1"}
        self.changes: list[tuple[str, str, Any]] = []
        self.unloaded: set[str] = set()

    def list(self) -> Sequence[StubMethod]:
        return [one for name, found in self.versions.items() for one in found if name not in self.unloaded]

    def find(self, name: str, version: str = "") -> StubMethod | None:
        servable, _, method = name.partition(".")
        found = self.versions.get(servable)
        if found is None:
            return None
        if method and found[0].name != name:
            raise NotFoundError(f"{servable} has no method {method}")
        if servable in self.unloaded:
            raise UnavailableError(f"{servable} is not loaded")
        version = self.labels.get((servable, version), version)
        for one in reversed(found):
            if version in ("", one.version):
                return one
        raise NotFoundError(f"{servable} has no version {version}")

    def index(self) -> Sequence[ModelState]:
        return [
            ModelState(name, one.version, "UNAVAILABLE" if name in self.unloaded else "READY")
            for name, found in self.versions.items()
            for one in found
        ]

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        if name not in self.versions:
            raise NotFoundError(f"there is no servable {name}")
        if name == "broken":
            raise InvalidFileError("broken/servable.py:3: expected a stage")
        if config is not None and set(config) - {"versions", "labels"}:
            raise InvalidArgumentError("config knows versions and labels")
        self.changes.append(("load", name, config))
        self.unloaded.discard(name)

    async def unload(self, name: str) -> None:
        if name not in self.versions:
            raise NotFoundError(f"there is no servable {name}")
        self.changes.append(("unload", name, None))
        self.unloaded.add(name)


EVERY_DATATYPE = {
    name: np.array([b"a\0b", "ü".encode()], object) if name == "BYTES" else np.array([[0, 1], [1, 0]]).astype(kind)
    for name, kind in DTYPES.items()
}
"""Two rows of each datatype."""
