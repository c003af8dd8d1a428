"""The engines of model files in a servable worker: the core for bundles and ONNX files, else ONNX Runtime."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.servables.api.signature import datatype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.networks.predictor import Predictor
    from penstock.servables.api.specs import Spec

__all__ = ["ModelEngine", "ModelPort", "open_engine"]

_TYPES: Final = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "TEXT",
}


@dataclass(frozen=True)
class ModelPort:
    """An input or output of a model file: its datatype, and its sizes as the file writes them."""

    name: str
    datatype: str
    sizes: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes with the batch first; -1 for one that is free."""
        return tuple(int(size) if str(size).isdecimal() and int(size) > 0 else -1 for size in self.sizes)


class ModelEngine(Protocol):
    """The interface of what runs a model file."""

    inputs: list[ModelPort]
    outputs: list[ModelPort]

    def shapes(self, specs: Mapping[str, Spec], size: int) -> dict[str, tuple[int, ...]]:
        """Return shapes of inputs for a batch of ``size`` instances that the warm-up may use."""

    def run(self, feeds: dict[str, NDArray[Any]], names: Sequence[str]) -> list[NDArray[Any]]:
        """Return the outputs ``names`` of a batch."""


def open_engine(path: Path, threads: int) -> ModelEngine:
    """Open a model file.

    The core runs a bundle.  It also runs an ONNX file that Penstock reads; ONNX Runtime, if it is installed, runs
    any other.  Raises InvalidFileError for a file that is damaged, and UnsupportedError for one that nothing here runs.
    """
    from penstock.networks.predictor import open_predictor

    if path.suffix == ".psm":
        try:
            return _Network(open_predictor(path, threads=threads))
        except UnsupportedError as error:
            hint = ". Declare language models with servable.language_model." if error.param == "model" else ""
            raise error.with_message(f"{path}: {error}{hint}") from None
    try:
        return _Network(_compile(path, threads))
    except UnsupportedError as error:
        return _open_with_onnx_runtime(path, threads, error)


def _compile(path: Path, threads: int) -> Predictor:
    from penstock.networks.network import read_network

    try:
        return read_network(path).compile(threads=threads)
    except InvalidFileError as error:
        raise InvalidFileError(f"{path}: {error}") from None


def _open_with_onnx_runtime(path: Path, threads: int, refusal: UnsupportedError) -> ModelEngine:
    try:
        engine = _OnnxRuntime(path, threads)
    except ModuleNotFoundError:
        text = f"{path}: {refusal}\nONNX Runtime would run it if it were installed (pip install onnxruntime)."
        raise UnsupportedError(text, code=refusal.code, param=refusal.param) from None
    reason = " ".join(str(refusal).split())
    sys.stderr.write(f"{path.name}: ONNX Runtime runs it, because Penstock does not: {reason}\n")
    return engine


class _Network:
    """A general network in the core."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.inputs = [ModelPort(port.name, datatype_of(port), port.sizes) for port in predictor.inputs]
        self.outputs = [ModelPort(port.name, datatype_of(port), port.sizes) for port in predictor.outputs]

    def shapes(self, specs: Mapping[str, Spec], size: int) -> dict[str, tuple[int, ...]]:
        """Return the declared sizes; one that is not declared has its example, or its minimum."""
        sizes: dict[str, int] = {}
        known = {value.name for value in self._predictor.sizes}
        for port in self.inputs:
            for name, number in zip(port.sizes, (size, *specs[port.name].shape), strict=True):
                if name in known and number > 0:
                    sizes[name] = number
        return {value.name: self._predictor.shape_of(value, sizes) for value in self._predictor.inputs}

    def run(self, feeds: dict[str, NDArray[Any]], names: Sequence[str]) -> list[NDArray[Any]]:
        """Return the outputs ``names`` of a batch."""
        outputs = self._predictor.predict(feeds)
        return [outputs[name] for name in names]


class _OnnxRuntime:
    """An ONNX file in ONNX Runtime."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common base class
            raise InvalidFileError(f"{path}: ONNX Runtime failed to open it: {str(error)[:500]}") from None
        self.inputs = [_port(node) for node in self._session.get_inputs()]
        self.outputs = [_port(node) for node in self._session.get_outputs()]

    def shapes(self, specs: Mapping[str, Spec], size: int) -> dict[str, tuple[int, ...]]:
        """Return the declared sizes; one that is not declared is 1."""
        return {name: (size, *(int(number) for number in np.abs(spec.shape))) for name, spec in specs.items()}

    def run(self, feeds: dict[str, NDArray[Any]], names: Sequence[str]) -> list[NDArray[Any]]:
        """Return the outputs ``names`` of a batch."""
        outputs: list[NDArray[Any]] = self._session.run([*names], feeds)
        return outputs


def _port(node: Any) -> ModelPort:
    return ModelPort(node.name, _TYPES.get(node.type, node.type), tuple(node.shape))
