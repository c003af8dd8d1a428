"""Capture a network of table ops as a graph.

``torch.export`` runs the network once on meta tensors whose sizes T (tokens), B (requests), P (page-table width) and
R (output rows) are symbols.  The result contains table ops, additions, multiplications and aliases.  Ops become nodes,
aliases become views (base, offset), parameters become weights under their checkpoint names, and the ``state`` buffers
of attention layers become states.  The op schemas tell which arguments are mutated.  Any other operation is refused
with its name, the module that called it and the alternative.

Built-in networks are traced without PyTorch (``graph.tracer``); this is for those of users, and the tracer's oracle.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from penstock.errors import UnsupportedError
from penstock.graph.builder import MAX_SIZES, Capture, GraphBuilder, constant_attr
from penstock.graph.ir import Dim, DType, Node, Operand
from penstock.graph.views import fold_view, is_alias
from penstock.models.network_script import line_in_stack, script_errors
from penstock.nn import Batch, PagedLayer
from penstock.ops.schema import Argument, parse_arguments
from penstock.ops.table import find_op, is_custom_op

__all__ = ["Capture", "capture"]

_DTYPES: Final = {torch.float32: DType.F32, torch.int32: DType.I32}
_ATEN_OPS: Final = {"aten.add.Tensor": "add", "aten.mul.Tensor": "mul"}
_HINTS: Final = {
    "aten.linear.default": "penstock.nn.Linear",
    "aten.embedding.default": "penstock.nn.Embedding",
    "aten.matmul.default": "penstock.nn.Linear or penstock.nn.Attention",
    "aten.scaled_dot_product_attention.default": "penstock.nn.Attention",
    "aten.layer_norm.default": "penstock.nn.LayerNorm",
    "aten.rms_norm.default": "penstock.nn.RMSNorm",
    "aten.silu.default": "penstock.nn.silu_mul",
    "aten.gelu.default": "penstock.nn.gelu",
    "aten.relu.default": "penstock.nn.relu",
    "aten.sigmoid.default": "penstock.nn.sigmoid_mul or sigmoid_gate",
    "aten.mul.Scalar": "penstock.nn.scale",
    "aten.index.Tensor": "penstock.nn.gather_rows",
    "aten.index_select.default": "penstock.nn.gather_rows",
}
_CUSTOM_OP: Final = "or an op of your own (docs/guides/custom-ops.md)"


def capture(
    network: nn.Module, *, network_name: str, context_len: int, vocab_size: int, script: Path | None = None
) -> Capture:
    """Capture ``network``, a module whose forward takes a ``penstock.nn.Batch`` and returns logits [R, vocab].

    Parameters may be on the meta device; buffers that ops read, such as inv_freq, must have values.  The graph has the
    scheme "f32" and row-major weights; passes change both.  Raises UnsupportedError for an operation that cannot be
    captured, with its name, its module, and its line in ``script``, the file of a user's own network.
    """
    builder = _Builder(network, network_name, context_len, vocab_size, script)
    with script_errors(script):
        exported = _export(network, len(builder.graph.page_groups))
    builder.build(exported)
    return builder.capture()


def _export(network: nn.Module, num_groups: int) -> torch.export.ExportedProgram:
    """Trace the network with non-strict export: sizes are symbols and its Python code runs."""

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="meta")

    dims = {name: torch.export.Dim(name, min=1, max=maximum) for name, maximum in MAX_SIZES.items()}
    starts = torch.export.Dim("S", min=2, max=MAX_SIZES["B"] + 1)  # B + 1; ops look no closer
    batch = Batch(integers(6), integers(6), integers(4), integers(num_groups, 3, 5), integers(2))
    shapes = Batch({0: dims["T"]}, {0: dims["T"]}, {0: starts}, {1: dims["B"], 2: dims["P"]}, {0: dims["R"]})  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            return torch.export.export(network, (batch,), dynamic_shapes=(shapes,), strict=False)
    except (torch._dynamo.exc.UserError, GuardOnDataDependentSymNode) as error:
        raise UnsupportedError(
            "capture: the network fixes a size that differs between steps, or branches on the value of a tensor: "
            + " ".join(str(error).split("\n\n")[0].split())
        ) from error


class _Builder(GraphBuilder):
    """Walks the exported nodes in order and writes the graph."""

    def __init__(self, network: nn.Module, name: str, context_len: int, vocab_size: int, script: Path | None) -> None:
        super().__init__(network, name, context_len, vocab_size)
        self.script = script
        self.operands: dict[fx.Node, Operand | tuple[Operand, ...]] = {}
        self.symbols: dict[str, Dim] = {}

    def build(self, exported: torch.export.ExportedProgram) -> None:
        """Add the inputs, the weights, the nodes and the output to the graph."""
        signature = exported.graph_signature
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        targets.update(signature.inputs_to_lifted_tensor_constants)
        inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
        self._add_inputs([node for node in inputs if node.name not in targets])
        self.remember_names()
        for node in inputs:
            if node.name in targets:
                self._add_parameter(node, targets[node.name])
        for node in exported.graph.nodes:
            if node.op == "call_function":
                self._add_call(node)
            elif node.op == "output":
                self._add_output(node)

    def _add_inputs(self, nodes: list[fx.Node]) -> None:
        for node, (name, shape) in zip(nodes, self.input_shapes()._asdict().items(), strict=True):
            for size, dim in zip(node.meta["val"].shape, shape, strict=True):
                if dim.symbol is not None:
                    self.symbols.setdefault(str(size), dim)
            self.add_input(name, shape)
            self.operands[node] = Operand("value", name)

    def _add_parameter(self, node: fx.Node, target: str) -> None:
        path, _, leaf = target.rpartition(".")
        module = self.network.get_submodule(path)
        if isinstance(module, PagedLayer) and leaf == "state":
            self.operands[node] = self.add_state(path, module)
            return
        self.operands[node] = Operand("weight", self.weight_name(target, getattr(module, leaf)))
        if node.users:
            self.add_weight(target)

    def constant_values(self, tensor: Tensor) -> NDArray[np.float32]:
        """Return the values of a buffer, which a user's network may have in any type, and with a gradient."""
        values: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
        return values

    def _add_call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            source = self.operands[node.args[0]]  # type: ignore[index]
            if isinstance(source, tuple):
                self.operands[node] = source[node.args[1]]  # type: ignore[index]
                return
        if not isinstance(target, torch._ops.OpOverload):
            if not isinstance(node.meta.get("val"), Tensor) and self._is_size(node):
                return  # the size of a view, which the shapes contain
            raise self._refusal(node, "ops of penstock.nn, with sizes and positions as tensors, not Python numbers")
        if target.namespace == "penstock":
            self._add_op(node, target._opname)
        elif is_custom_op(name := f"{target.namespace}::{target._opname}"):
            self._add_op(node, name)
        elif str(target) in _ATEN_OPS:
            self._add_arithmetic(node, _ATEN_OPS[str(target)])
        elif str(target) == "aten.sym_size.int":
            return
        else:
            self._add_view(node, target)

    @staticmethod
    def _is_size(node: fx.Node) -> bool:
        return node.target in (operator.mul, operator.add, operator.sub, operator.floordiv)

    def _add_op(self, node: fx.Node, name: str) -> None:
        arguments = parse_arguments(find_op(name).schema)
        values = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
        inputs, attrs = [], {}
        for argument in arguments:
            value = values.get(argument.name)
            if argument.is_attr:
                attrs[argument.name] = self._constant(node, argument, value)
            else:
                inputs.append(Operand("none") if value is None else self._operand(node, argument.name, value))
        for argument, operand in zip((a for a in arguments if not a.is_attr), inputs, strict=True):
            expected = {"tensor": "value", "weight": "weight", "state": "state"}[argument.kind]
            if operand.kind not in ("none", expected):
                raise self._refusal(node, f"a {expected} as argument {argument.name}, got a {operand.kind}")
        self._emit(node, name, inputs, attrs)

    def _add_arithmetic(self, node: fx.Node, name: str) -> None:
        if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(arg, fx.Node) for arg in node.args):
            raise self._refusal(node, f"two tensors of the same shape, penstock.nn.scale for a number, {_CUSTOM_OP}")
        operands = [self._operand(node, which, arg) for which, arg in zip("ab", node.args, strict=True)]
        shapes = {str(list(node.args[i].meta["val"].shape)) for i in (0, 1)}  # type: ignore[union-attr]
        if any(operand.kind != "value" for operand in operands) or len(shapes) != 1:
            raise self._refusal(node, "two activations of the same shape, without broadcasting")
        self._emit(node, name, operands, {})

    def _emit(self, node: fx.Node, op: str, inputs: list[Operand], attrs: dict[str, Any]) -> None:
        path = _module_path(node)
        results = node.meta["val"]
        tensors = [] if results is None else [results] if isinstance(results, Tensor) else list(results)
        names = []
        for index, tensor in enumerate(tensors):
            suffix = f".{index}" if len(tensors) > 1 else ""
            names.append(self._new_value(f"{path}:{op}{suffix}", tensor))
        self.graph.nodes.append(Node(op, path, inputs, names, attrs))
        outputs = tuple(Operand("value", name) for name in names)
        self.operands[node] = outputs[0] if isinstance(results, Tensor) else outputs

    def _new_value(self, base_name: str, tensor: Tensor) -> str:
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(
                f"capture: {base_name}: expected float32 or int32, got {tensor.dtype}", param=base_name
            )
        return self.new_value(base_name, _DTYPES[tensor.dtype], self._shape(base_name, tensor))

    def _shape(self, name: str, tensor: Tensor) -> tuple[Dim, ...]:
        return tuple(self._dim(name, size) for size in tensor.shape)

    def _dim(self, name: str, size: Any) -> Dim:
        if isinstance(size, int):
            return Dim(None, 0, size)
        if str(size) not in self.symbols:
            raise UnsupportedError(
                f"capture: {name}: expected sizes of T, B, P, R or constants, got {size}", param=name
            )
        return self.symbols[str(size)]

    def _add_view(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.operands:
            raise self._refusal(node, _HINTS.get(str(target), f"an op of penstock.nn, {_CUSTOM_OP}"))
        operand = self.operands[source]
        if not isinstance(operand, Operand) or operand.kind != "value":
            raise self._refusal(node, "views of activations only, not of weights")
        views = fold_view(str(target), source.meta["val"], node.args[1:], node.kwargs, node.meta["val"])
        if views is None:
            default = "a view that keeps rows whole" if is_alias(str(target)) else f"an op of penstock.nn, {_CUSTOM_OP}"
            raise self._refusal(node, _HINTS.get(str(target), default))
        path = _module_path(node)
        names = []
        for view in views:
            if view.offset == 0 and view.tensor.shape == source.meta["val"].shape:
                names.append(operand.name)
            else:
                names.append(self.new_view(path, operand.name, self._shape(path, view.tensor), view.offset))
        outputs = tuple(Operand("value", name) for name in names)
        self.operands[node] = outputs[0] if isinstance(node.meta["val"], Tensor) else outputs

    def _add_output(self, node: fx.Node) -> None:
        results: Any = node.args[0]
        self.set_output(
            self.operands.get(results[0]) if len(results) == 1 and isinstance(results[0], fx.Node) else None
        )

    def _operand(self, node: fx.Node, argument: str, value: Any) -> Operand:
        operand = self.operands.get(value) if isinstance(value, fx.Node) else None
        if not isinstance(operand, Operand):
            raise self._refusal(node, f"a tensor as argument {argument}, got {value!r}")
        return operand

    def _constant(self, node: fx.Node, argument: Argument, value: Any) -> int | float | str:
        constant = constant_attr(argument, value)
        if constant is not None:
            return constant
        raise self._refusal(node, f"a constant {argument.kind} as attribute {argument.name}, got {value!r}")

    def _refusal(self, node: fx.Node, expected: str) -> UnsupportedError:
        line = line_in_stack(node.meta.get("stack_trace") or "", self.script)
        return UnsupportedError(
            f"{line or 'capture'}: {node.target} in module {_module_path(node) or '(root)'} is not supported in graph "
            f"mode; use {expected}"
        )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""
