"""Reads the bytes of an ONNX file, and its external data, into ``OnnxNetwork``.

The files are from strangers: sizes are compared with the bytes that are there before anything is allocated, paths stay
inside the folder of the file, and no code runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.extras import install_command
from penstock.graph.general.draft import Draft
from penstock.graph.onnx.model import (
    MAX_DEPTH,
    MAX_NODES,
    Function,
    OnnxGraph,
    OnnxNetwork,
    OnnxNode,
    OnnxPort,
    Reference,
)

__all__ = ["OnnxSource", "element_name", "load", "node_of", "onnx_package"]

_MAX_PROTO_BYTES: Final = (1 << 31) - 1
_MAX_RANK: Final = 32
_BITS: Final = {4: 16, 5: 16, 10: 16, 16: 16, 1: 32, 6: 32, 12: 32, 7: 64, 11: 64, 13: 64, 14: 64, 15: 128, 2: 8, 3: 8,
                9: 8, 17: 8, 18: 8, 19: 8, 20: 8, 24: 8, 21: 4, 22: 4, 23: 4, 25: 2, 26: 2}  # fmt: skip
_MAX_PROPERTIES: Final = 1024
_MAX_PROPERTY_BYTES: Final = 16 << 20  # of all; a bundle has at most 64 MiB of metadata
_MAX_KEY_BYTES: Final = 512
_MAX_TEXT_BYTES: Final = 1 << 20
_FIELDS: Final = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def onnx_package() -> Any:
    """Import the onnx package.  Raises UnsupportedError with what to install."""
    try:
        import onnx  # imported here: an optional package
        from onnx import numpy_helper  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"Reading an ONNX file requires the onnx package, which is not installed. Run `{install_command('onnx')}`.",
            code="missing_package",
        ) from error
    return onnx


def element_name(element: int) -> str:
    """Return the name of an element type of ONNX, "FLOAT16"."""
    names = onnx_package().TensorProto.DataType
    return str(names.Name(element)) if element in names.values() else f"type {element}"


def load(source: str | os.PathLike[str] | bytes) -> OnnxNetwork:
    """Return the model of a file or of bytes.  Raises InvalidFileError, FileAccessError or UnsupportedError."""
    onnx = onnx_package()
    if isinstance(source, bytes):
        path, data = None, source
    else:
        path = Path(source)
        data = _read(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf has several classes
        raise InvalidFileError(f"{path or 'model'}: expected an ONNX file, got bytes that are none: {error}") from error
    if not model.HasField("graph") or not model.opset_import:
        raise InvalidFileError(f"{path or 'model'}: expected an ONNX file with a graph and the versions of its ops")
    return _Loader(path).model(model)


def node_of(proto: Any) -> OnnxNode:
    """Return a node of a function body that the onnx package made."""
    return _Loader(None).node(proto, 0)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_PROTO_BYTES:
            raise InvalidFileError(
                f"{path}: expected at most 2 GiB, got {size} bytes; larger weights are external data"
            )
        return path.read_bytes()
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}") from error


class _Loader:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._count = 0

    def model(self, proto: Any) -> OnnxNetwork:
        opsets = _opsets(proto.opset_import)
        functions = {(item.domain, item.name): self._function(item) for item in proto.functions}
        graph = self._graph(proto.graph, 0)
        names = [node.name for node in graph.nodes]
        for at, node in enumerate(graph.nodes):
            node.name = names[at] or f"{node.op}_{at}"
        return OnnxNetwork(graph, opsets, functions, _properties(proto.metadata_props))

    def _graph(self, proto: Any, depth: int) -> OnnxGraph:
        if depth > MAX_DEPTH:
            raise InvalidFileError(f"graph {proto.name}: expected at most {MAX_DEPTH} graphs inside each other")
        graph = OnnxGraph(proto.name, [self.node(item, depth) for item in proto.node])
        for tensor in proto.initializer:
            graph.constants[tensor.name] = partial(self._array, tensor)
        if proto.sparse_initializer:
            raise UnsupportedError(f"graph {proto.name}: sparse initializers are not supported")
        graph.inputs = [_port(item) for item in proto.input if item.name not in graph.constants]
        graph.outputs = [_port(item) for item in proto.output]
        return graph

    def _function(self, proto: Any) -> Function:
        defaults = {item.name: self._attr(item, 1) for item in proto.attribute_proto}
        nodes = [self.node(item, 1) for item in proto.node]
        return Function(list(proto.input), list(proto.output), nodes, defaults, _opsets(proto.opset_import))

    def node(self, proto: Any, depth: int) -> OnnxNode:
        self._count += 1
        if self._count > MAX_NODES:
            raise InvalidFileError(f"graph: expected at most {MAX_NODES} nodes", param="graph")
        attrs = {item.name: self._attr(item, depth) for item in proto.attribute}
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        inputs, outputs = list(proto.input), list(proto.output)
        # protobuf gives a string that is no UTF-8 as bytes
        if not all(isinstance(text, str) for text in (proto.op_type, domain, proto.name, *inputs, *outputs)):
            raise InvalidFileError(f"node {proto.name!r} ({proto.op_type!r}): expected names in UTF-8", param="node")
        return OnnxNode(proto.op_type, domain, proto.name, inputs, outputs, attrs, proto)

    def _attr(self, proto: Any, depth: int) -> Any:
        if proto.ref_attr_name:
            return Reference(proto.ref_attr_name)
        kinds = type(proto)
        kind = proto.type
        if kind == kinds.FLOAT:
            return float(proto.f)
        if kind == kinds.INT:
            return int(proto.i)
        if kind == kinds.STRING:
            return proto.s.decode("utf-8", "replace")
        if kind == kinds.TENSOR:
            return self._array(proto.t)
        if kind == kinds.GRAPH:
            return self._graph(proto.g, depth + 1)
        if kind == kinds.FLOATS:
            return [float(item) for item in proto.floats]
        if kind == kinds.INTS:
            return [int(item) for item in proto.ints]
        if kind == kinds.STRINGS:
            return [item.decode("utf-8", "replace") for item in proto.strings]
        return None  # sparse tensors, types and lists of graphs, which no op that is read here has

    def _array(self, proto: Any) -> NDArray[Any]:
        shape = tuple(int(n) for n in proto.dims)
        where = f"tensor {proto.name or '(constant)'}"
        if len(shape) > _MAX_RANK or any(n < 0 for n in shape):
            raise InvalidFileError(f"{where}: expected sizes of 0 or more, got {list(shape)[:_MAX_RANK]}")
        if proto.data_type not in _BITS:
            raise UnsupportedError(f"{where}: element type {element_name(proto.data_type)} is not supported")
        count = math.prod(shape)
        size = (count * _BITS[proto.data_type] + 7) // 8
        if proto.data_location == type(proto).EXTERNAL:
            raw = self._external(proto, size, where)
            return self._viewed(proto, raw, shape, where)
        stored = len(proto.raw_data) if proto.HasField("raw_data") else None
        if stored is not None and stored != size:
            raise InvalidFileError(f"{where}: expected {size} bytes for the shape {list(shape)}, got {stored}")
        if stored is None and count > 2 * max(len(getattr(proto, field)) for field in _FIELDS):
            raise InvalidFileError(f"{where}: expected {count} elements for the shape {list(shape)}, got fewer")
        return self._converted(proto, shape, where)

    def _converted(self, proto: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
        from onnx import numpy_helper  # imported here: an optional package

        try:
            return np.asarray(numpy_helper.to_array(proto)).reshape(shape)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise InvalidFileError(f"{where}: {error}") from error

    def _viewed(self, proto: Any, raw: NDArray[Any], shape: tuple[int, ...], where: str) -> NDArray[Any]:
        plain = {1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8",
                 12: "<u4", 13: "<u8"}  # fmt: skip
        if proto.data_type in plain:
            return raw.view(plain[proto.data_type]).reshape(shape)
        copy = type(proto)(dims=shape, data_type=proto.data_type, raw_data=raw.tobytes())
        return self._converted(copy, shape, where)

    def _external(self, proto: Any, size: int, where: str) -> NDArray[Any]:
        facts = {item.key: item.value for item in proto.external_data}
        location = facts.get("location", "")
        if self._path is None:
            raise InvalidFileError(f"{where}: its data is in the file {location!r}; give the path of the model")
        path = self._inside(location, where)
        try:
            offset, length = int(facts.get("offset", "0")), int(facts.get("length", str(size)))
        except ValueError as error:
            raise InvalidFileError(f"{where}: expected numbers as offset and length of its data") from error
        try:
            there = path.stat().st_size
            if length != size or offset < 0 or offset + size > there:
                raise InvalidFileError(
                    f"{where}: expected {size} bytes at {offset} of {location}, got {length} in a file of {there} bytes"
                )
            if size == 0:
                return np.empty(0, np.uint8)
            return np.memmap(path, np.uint8, "r", offset, (size,))
        except OSError as error:
            raise FileAccessError(f"{path}: {error.strerror or error}") from error

    def _inside(self, location: str, where: str) -> Path:
        """Return the path of external data, which stays in the folder of the model, or of the file it links to."""
        if self._path is None or not location or "\0" in location or Path(location).is_absolute():
            raise InvalidFileError(f"{where}: expected a relative path of its data, got {location!r}")
        path = self._path.parent / location
        real = path.resolve()
        folders = {self._path.parent.resolve(), self._path.resolve().parent}
        if ".." in Path(location).parts or not any(real.is_relative_to(folder) for folder in folders):
            raise InvalidFileError(f"{where}: expected data in the folder of the model, got {location!r}")
        return path


def _properties(items: Any) -> dict[str, str]:
    """Return the texts that a file carries for programs, such as its labels; without those that no bundle can have."""
    pairs = [(str(item.key), str(item.value)) for item in items]
    fitting = {
        key: value
        for key, value in pairs
        if key.isprintable() and 0 < len(key.encode()) <= _MAX_KEY_BYTES
        if len(value.encode()) <= _MAX_TEXT_BYTES and not {"\0", "\x7f"} & set(value)
    }
    kept: dict[str, str] = {}
    left = _MAX_PROPERTY_BYTES
    for key, value in list(fitting.items())[:_MAX_PROPERTIES]:
        left -= len(key.encode()) + len(value.encode())
        if left < 0:
            break
        kept[key] = value
    return kept


def _opsets(items: Any) -> dict[str, int]:
    return {"" if item.domain == "ai.onnx" else item.domain: int(item.version) for item in items}


def _port(proto: Any) -> OnnxPort:
    kind = proto.type.WhichOneof("value") or ""
    if kind != "tensor_type":
        return OnnxPort(proto.name, kind.removesuffix("_type"), 0, None)
    tensor = proto.type.tensor_type
    if not tensor.HasField("shape"):
        return OnnxPort(proto.name, "tensor", tensor.elem_type, None)
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        field = dim.WhichOneof("value")
        known = dim.dim_value if field == "dim_value" and dim.dim_value >= 0 else None
        dims.append(int(known) if known is not None else dim.dim_param or None)
    return OnnxPort(proto.name, "tensor", tensor.elem_type, tuple(dims))


# The file as a source: ONNX Runtime where it is installed and takes the file, or onnx's reference evaluator.

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
        self._outputs = draft.source_outputs()
        self._sizes, self._custom = dict(sizes), dict(custom)
        self.name = "onnx's reference evaluator"
        self.examples: Sequence[NDArray[Any]] | None = None
        self.tolerance = 1e-4

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs of the file."""
        values = self.values(arrays, self._outputs)
        return [values[name] for name in self._outputs]

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
        by_name = dict(zip(self._inputs, arrays, strict=True))
        initial = {item.name for item in proto.graph.initializer}
        feeds = {}
        for port in proto.graph.input:
            if port.name in initial:
                continue
            dtype = onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
            value = by_name[port.name] if port.name in by_name else np.array(self._sizes[port.name])
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

        values = {item.name: onnx_package().helper.get_attribute_value(item) for item in self.onnx_node.attribute}
        plain = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
        return custom_op_arrays(custom, arrays, plain)

    return type(key[1], (OpRun,), {"op_domain": key[0], "_run": _run})
