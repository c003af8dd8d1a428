"""The body that the standard gives an op, for ops that have no reader of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.errors import InvalidFileError
from penstock.graph.general.draft import Tensor
from penstock.graph.ir import DType
from penstock.graph.onnx.load import node_of, onnx_package
from penstock.graph.onnx.model import Function, OnnxNode

__all__ = ["EXPANDED", "standard_body"]

EXPANDED: Final = (
    "AffineGrid", "BlackmanWindow", "CausalConvWithState", "CenterCropPad", "DynamicQuantizeLinear", "FlexAttention",
    "HammingWindow", "HannWindow", "LinearAttention", "MeanVarianceNormalization", "NegativeLogLikelihoodLoss",
    "Shrink", "SoftmaxCrossEntropyLoss", "SwiGLU",
)  # fmt: skip
"""The ops that are read through their bodies."""
_ELEMENTS: Final = {
    DType.F32: 1, DType.U8: 2, DType.I8: 3, DType.I32: 6, DType.I64: 7, DType.BOOL: 9, DType.F16: 10, DType.BF16: 16,
}  # fmt: skip


def standard_body(node: OnnxNode, version: int, inputs: Sequence[Tensor | None]) -> Function | None:
    """Return the body of an op for these inputs; None if it has none."""
    if node.op not in EXPANDED:
        return None
    onnx = onnx_package()
    try:
        schema = onnx.defs.get_schema(node.op, version, "")
        data = _body(schema, node, version, [_type(onnx, tensor) for tensor in inputs])
    except Exception as error:  # the package's own classes, which are not public
        raise InvalidFileError(f"node {node.name} ({node.op}): {error}") from error
    if not data:
        return None
    proto = onnx.FunctionProto()
    proto.ParseFromString(data)
    opsets = {"" if item.domain == "ai.onnx" else item.domain: int(item.version) for item in proto.opset_import}
    nodes = [node_of(item) for item in proto.node]
    defaults = {name: _default(onnx, item) for name, item in schema.attributes.items()}
    return Function(list(proto.input), list(proto.output), nodes, defaults, opsets or {"": version})


def _body(schema: Any, node: OnnxNode, version: int, types: list[bytes]) -> bytes:
    if schema.has_context_dependent_function:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        chosen = max(versions, default=schema.context_dependent_function_opset_versions[0])
        data: bytes = schema.get_context_dependent_function_with_opset_version(chosen, _proto(node), types)
        return data
    versions = [v for v in schema.function_opset_versions if v <= version] or list(schema.function_opset_versions)
    return bytes(schema.get_function_with_opset_version(max(versions))) if versions else b""


def _proto(node: OnnxNode) -> bytes:
    if node.source is None:  # of a body: its attributes have the values of the node around it
        helper = onnx_package().helper
        attrs = {key: value for key, value in node.attrs.items() if isinstance(value, (int, float, str, list))}
        made: bytes = helper.make_node(node.op, node.inputs, node.outputs, **attrs).SerializeToString()
        return made
    data: bytes = node.source.SerializeToString()
    return data


def _type(onnx: Any, tensor: Tensor | None) -> bytes:
    proto = onnx.TypeProto()
    if tensor is not None:
        proto.tensor_type.elem_type = _ELEMENTS[tensor.dtype]
        shape = proto.tensor_type.shape
        for size in tensor.shape:
            dim = shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
    data: bytes = proto.SerializeToString()
    return data


def _default(onnx: Any, attribute: Any) -> Any:
    value = attribute.default_value
    return onnx.helper.get_attribute_value(value) if value.name else None
