"""Ops that have no reader of their own: the body that the standard gives one, and custom ops for other domains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.general.custom import add_custom_call, check_tensor, custom_op_named
from penstock.graph.general.draft import Draft, Shape, Tensor
from penstock.graph.general.sizes import SizeLike, as_text, evaluate, symbols_of
from penstock.graph.ir import DType
from penstock.graph.onnx.load import node_of, onnx_package
from penstock.graph.onnx.model import Function, OnnxNode
from penstock.ops.schema import parse_arguments
from penstock.ops.table import Op

__all__ = ["EXPANDED", "add_custom_node", "custom_op_of", "standard_body"]

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


# Custom ops.

_CUSTOM_TYPES: Final = {DType.F32: "float32", DType.I32: "int32"}


def custom_op_of(node: OnnxNode, names: Mapping[str, str]) -> Op:
    """Return the custom op for a node.  Raises UnsupportedError with what to declare if there is none."""
    full = f"{node.domain}::{node.op}"
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.op).lower()
    owner = re.sub(r"\W", "_", node.domain).lower()
    wanted = names.get(full) or f"{owner}::{snake}"
    op = custom_op_named(wanted)
    if op is None:
        raise UnsupportedError(
            f"this domain is not ONNX's, and there is no custom op {wanted}; declare it with penstock.custom_op (in "
            f'the file of --custom-ops), or name another in read_network(custom_ops={{"{full}": ...}})'
        )
    return op


def add_custom_node(draft: Draft, node: OnnxNode, op: Op, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Add the call: inputs are the tensors of the schema in order, and attributes have its names."""
    arguments = parse_arguments(op.schema)
    wanted = [argument for argument in arguments if not argument.is_attr]
    if len(tensors) > len(wanted):
        raise UnsupportedError(f"{op.name}: expected at most {len(wanted)} inputs, got {len(tensors)}")
    inputs = [*tensors, *[None] * (len(wanted) - len(tensors))]
    values: dict[str, Any] = {argument.name: tensor for argument, tensor in zip(wanted, inputs, strict=True)}
    for argument, tensor in zip(wanted, inputs, strict=True):
        if tensor is not None:
            check_tensor(tensor, f"{node.name}: {op.name}: {argument.name}", argument.kind)
    attrs = {key: node.attrs[key] for key in node.attrs}
    order = [argument.name for argument in arguments if argument.is_attr]
    types = _custom_types(op, inputs, {key: attrs[key] for key in order if key in attrs})
    return add_custom_call(draft, op, {**values, **attrs}, types, node.name)


def _custom_types(op: Op, inputs: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> list[tuple[DType, Shape]]:
    """Return the types of the outputs: each size is a number, or a size of an input in all that are tried."""
    from penstock.ops.custom import custom_op_types  # imported here: it requires PyTorch

    sizes = [size for tensor in inputs if tensor is not None for size in tensor.shape]
    types_by_sizes = []
    for names in _assignments(sizes):
        specs = [None if tensor is None else _spec(tensor, names) for tensor in inputs]
        try:
            types = custom_op_types(op.name, specs, attrs)
        except Exception as error:  # of the user's function
            raise UnsupportedError(f"{op.name}: its PyTorch function refuses these inputs: {error}") from error
        if types is None:
            raise UnsupportedError(
                f"{op.name} is in a library, but its shapes are not known; declare it with penstock.custom_op"
            )
        types_by_sizes.append((names, types))
    result = []
    for at, (shape, dtype) in enumerate(types_by_sizes[0][1]):
        axes = [[types[at][0][axis] for _, types in types_by_sizes] for axis in range(len(shape))]
        trials = [names for names, _ in types_by_sizes]
        dims = tuple(_size_of(numbers, trials, sizes, op.name) for numbers in axes)
        result.append((next((own for own, name in _CUSTOM_TYPES.items() if name == dtype), DType.BOOL), dims))
    return result


def _assignments(sizes: Sequence[SizeLike]) -> Iterator[dict[str, int]]:
    """Yield sizes to try, in which no two free sizes look alike or look fixed: one at a time is raised."""
    symbols = sorted({item for size in sizes for item in symbols_of(size)}, key=lambda item: item.name)
    least = {item.name: item.min for item in symbols}
    most = {item.name: min(item.max, item.min + 10 + 7 * step) for step, item in enumerate(symbols)}
    yield from (least, most)
    for item in symbols:
        yield {**least, item.name: most[item.name]}


def _number(size: SizeLike, names: Mapping[str, int]) -> int:
    return evaluate(as_text(size), names)


def _spec(tensor: Tensor, names: Mapping[str, int]) -> tuple[tuple[int, ...], str]:
    shape = tuple(_number(size, names) for size in tensor.shape)
    return shape, _CUSTOM_TYPES.get(tensor.dtype, tensor.dtype.name.lower())


def _size_of(
    numbers: Sequence[int], trials: Sequence[Mapping[str, int]], sizes: Sequence[SizeLike], name: str
) -> SizeLike:
    if len(set(numbers)) == 1:
        return numbers[0]
    for size in sizes:
        if all(_number(size, names) == number for names, number in zip(trials, numbers, strict=True)):
            return size
    raise UnsupportedError(
        f"{name}: expected results with sizes of its inputs, got {list(numbers)} for {[dict(t) for t in trials]}; "
        "fix the sizes"
    )
