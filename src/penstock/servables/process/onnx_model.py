"""A model in ONNX's format, run by ONNX Runtime in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.servables.api.plan import read_model
from penstock.servables.process import stages_pb2 as pb
from penstock.servables.process.columns import read_column
from penstock.servables.process.failures import MisfitResultError, plain
from penstock.servables.process.programs import as_spec, column_data, texts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.specs import Spec

__all__ = ["OnnxModel"]

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


class OnnxModel:
    """Opened, compared with what is declared, and warm; InvalidFileError says what differs."""

    def __init__(self, start: pb.Start) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UnsupportedError("models in ONNX's format need ONNX Runtime: pip install 'penstock[onnx]'") from None
        self._plan = read_model(start.model)
        path = Path(start.folder) / self._plan.path
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._plan.threads, 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors share no class
            raise InvalidFileError(f"{path}: ONNX Runtime does not open it: {str(error)[:500]}") from None
        self._sizes: set[int] = set()
        self._check(path, "input", self._session.get_inputs(), self._plan.inputs)
        self._check(path, "output", self._session.get_outputs(), self._plan.outputs, may_leave=True)
        rules = self._plan.rules
        for size in self._sizes:
            if rules.padded_sizes != (size,):
                told = f"it takes batches of {size} alone: say batch_size={size}, padded_sizes=({size},)"
                raise InvalidFileError(f"{path}: {told}")
        self._names = [*self._plan.outputs]
        self._warm(path)

    def _check(
        self, path: Path, kind: str, found: Any, declared: Mapping[str, Spec], *, may_leave: bool = False
    ) -> None:
        """Names, datatypes and sizes are those that are declared."""
        own = {one.name: one for one in found}
        missing = [name for name in declared if name not in own]
        left = [] if may_leave else [name for name in own if name not in declared]
        if missing or left:
            raise InvalidFileError(f"{path}: its {kind}s are {', '.join(own)}, not {', '.join(declared)}")
        for name, spec in declared.items():
            one = own[name]
            datatype = _TYPES.get(one.type)
            if datatype != spec.datatype:
                raise InvalidFileError(f"{path}: {kind} {name} is {datatype or one.type}, not {spec.datatype}")
            sizes = [size if isinstance(size, int) and size > 0 else -1 for size in one.shape]
            if len(sizes) != 1 + len(spec.shape) or any(
                -1 not in (a, b) and a != b for a, b in zip(sizes[1:], spec.shape, strict=True)
            ):
                raise InvalidFileError(f"{path}: {kind} {name} has the shape {one.shape}, batch first, not {spec}")
            if kind == "input" and sizes[0] != -1:
                self._sizes.add(sizes[0])

    def _warm(self, path: Path) -> None:
        """One batch of zeros of each size that it will get most."""
        rules = self._plan.rules
        for size in rules.padded_sizes or (1, rules.max_size):
            feeds = {
                name: np.full((size, *np.abs(spec.shape)), "" if spec.is_bytes else 0, spec.dtype)
                for name, spec in self._plan.inputs.items()
            }
            try:
                self._results(feeds, size)
            except Exception as error:
                raise InvalidFileError(f"{path}: a batch of {size} zeros fails: {str(error)[:500]}") from None

    def _results(self, feeds: dict[str, NDArray[Any]], size: int) -> list[NDArray[Any]]:
        given = self._session.run(self._names, feeds)
        specs = self._plan.outputs.items()
        return [as_spec(one, spec, size, name) for one, (name, spec) in zip(given, specs, strict=True)]

    def run(self, batch: pb.Batch, mark: Callable[[int, int], None]) -> pb.Result:
        """A batch's outputs, or why not."""
        result, counts = pb.Result(), tuple(batch.counts)
        num_rows, size = sum(counts), batch.size
        mark(0, -1)
        feeds = {}
        for (name, spec), column in zip(self._plan.inputs.items(), batch.inputs, strict=True):
            arrays = read_column(spec, column, counts)
            whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if size > num_rows:
                whole = np.concatenate([whole, np.repeat(whole[-1:], size - num_rows, 0)])
            feeds[name] = texts_of(whole) if spec.datatype == "TEXT" else whole
        try:
            found = self._results(feeds, size)
        except MisfitResultError as error:
            result.failures.add(part=-1, instance=-1, stage=self._plan.path, kind="result", text=plain(str(error), 500))
            return result
        except Exception as error:
            text, trace = type(error).__name__, plain(str(error), 4000)
            result.failures.add(part=-1, instance=-1, stage=self._plan.path, kind="exception", text=text, trace=trace)
            return result
        for array, spec in zip(found, self._plan.outputs.values(), strict=True):
            column = result.outputs.add(data=column_data([array[:num_rows]], spec))
            if not spec.is_fixed:
                column.sizes.extend([*array.shape[1:]] * len(counts))
        return result
