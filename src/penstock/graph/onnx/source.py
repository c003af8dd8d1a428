"""An ONNX file as a source: ONNX Runtime where it is installed and takes the file, or onnx's reference evaluator."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.graph.general.draft import Draft
from penstock.graph.onnx.load import onnx_package

__all__ = ["OnnxSource"]

_TOLERANCES: Final = {10: 1e-2, 16: 5e-2}
_FOLDER: Final = "session.model_external_initializers_file_folder_path"


class OnnxSource:
    """Runs the file itself.

    ``sizes``: those that the file was read with, which give inputs of rank 0 their values.  ``custom``: the custom op
    of each operator of another domain.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes, draft: Draft, sizes: Mapping[str, Any],
        custom: Mapping[tuple[str, str], str],
    ) -> None:  # fmt: skip
        self._source = source if isinstance(source, bytes) else Path(source)
        self._inputs = [tensor.name for tensor in draft.inputs]
        self._outputs = list(draft.output_names)
        self._sizes, self._custom = dict(sizes), dict(custom)
        self.name = "onnx's reference evaluator"
        self.examples = None
        self.tolerance = 1e-4

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs of the file."""
        found = self.values(arrays, self._outputs)
        return [found[name] for name in self._outputs]

    def values(self, arrays: Sequence[NDArray[Any]], keys: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return values of the file's graph by their names."""
        onnx = onnx_package()
        proto = self._load(onnx)
        names = [name for name in dict.fromkeys(keys) if name not in self._inputs]
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
        feeds = self._feeds(onnx, proto, arrays)
        results = self._in_onnx_runtime(proto, names, feeds)
        if results is None:
            results = self._in_evaluator(onnx, proto, names, feeds)
        return {**feeds, **dict(zip(names, results, strict=True))}

    def _load(self, onnx: Any) -> Any:
        proto = onnx.ModelProto()
        data = self._source if isinstance(self._source, bytes) else self._source.read_bytes()
        proto.ParseFromString(data)
        floats = {item.data_type for item in proto.graph.initializer}
        floats.update(item.type.tensor_type.elem_type for item in proto.graph.input)
        self.tolerance = max([1e-4, *(_TOLERANCES.get(element, 0.0) for element in floats)])
        return proto

    def _feeds(self, onnx: Any, proto: Any, arrays: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        given = dict(zip(self._inputs, arrays, strict=True))
        initial = {item.name for item in proto.graph.initializer}
        feeds = {}
        for port in proto.graph.input:
            if port.name in initial:
                continue
            dtype = onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
            value = given[port.name] if port.name in given else np.array(self._sizes[port.name])
            feeds[port.name] = value.view(dtype) if dtype.name == "bfloat16" else value.astype(dtype)
        return feeds

    def _in_onnx_runtime(self, proto: Any, names: list[str], feeds: dict[str, NDArray[Any]]) -> Any:
        """Return None where ONNX Runtime is not installed, or does not run the file."""
        try:
            import onnxruntime  # imported here: an optional package
        except ModuleNotFoundError:
            return None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if isinstance(self._source, Path):
            options.add_session_config_entry(_FOLDER, str(self._source.parent.resolve()))
        try:
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            results = session.run(names, feeds)
        except Exception:  # its own classes; the evaluator takes more files, and says what is wrong with inputs
            return None
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        return results

    def _in_evaluator(self, onnx: Any, proto: Any, names: list[str], feeds: dict[str, NDArray[Any]]) -> Any:
        from onnx.external_data_helper import load_external_data_for_model
        from onnx.reference import ReferenceEvaluator

        if isinstance(self._source, Path):
            load_external_data_for_model(proto, str(self._source.parent))
        self.name = f"the reference evaluator of onnx {onnx.__version__}"
        return ReferenceEvaluator(proto, new_ops=[_evaluated(*item) for item in self._custom.items()]).run(names, feeds)


def _evaluated(key: tuple[str, str], custom: str) -> Any:
    """Return the class that computes an operator of another domain by the PyTorch function of a custom op."""
    from onnx.reference.op_run import OpRun

    def _run(self: Any, *arrays: Any, **attrs: Any) -> Any:
        from penstock.ops.custom import custom_op_arrays  # imported here: it requires PyTorch

        given = {item.name: onnx_package().helper.get_attribute_value(item) for item in self.onnx_node.attribute}
        plain = {name: value.decode() if isinstance(value, bytes) else value for name, value in given.items()}
        return custom_op_arrays(custom, arrays, plain)

    return type(key[1], (OpRun,), {"op_domain": key[0], "_run": _run})
