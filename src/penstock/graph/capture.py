"""Capture a network of table ops as a graph.

``torch.export`` runs the network once on meta tensors whose sizes T (tokens), B (requests), P (page-table width) and
R (output rows) are symbols.  The result contains table ops, additions, multiplications and aliases.  Ops become nodes,
aliases become views (base, offset), parameters become weights under their checkpoint names, and the ``state`` buffers
of attention layers become states.  The op schemas tell which arguments are mutated.  Any other operation is refused
with its name, the module that called it and the alternative.

A weight that several modules share appears once, under its first name; ``properties["tied:<other name>"]`` holds
that first name.  ``properties["output_head"]`` is the module path of the output head.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import Dim, DType, Graph, Layout, Node, Operand, Part, State, Symbol, Value, Weight
from penstock.graph.views import fold_view, is_alias
from penstock.models.network_script import line_in_stack, script_errors
from penstock.nn import Batch, LMHead, PagedLayer, assign_page_groups
from penstock.nn.weight import MatrixLayer
from penstock.ops.eager import Argument, parse_arguments
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
    "aten.index.Tensor": "penstock.nn.gather_rows",
    "aten.index_select.default": "penstock.nn.gather_rows",
}
_CUSTOM_OP: Final = "or an op of your own (docs/guides/custom-ops.md)"
_MAX_SIZES: Final = {"T": 1 << 20, "B": 1 << 16, "P": 1 << 20, "R": 1 << 20}


class Capture(NamedTuple):
    """A graph with logical weights, and the values of the weights that the network computes itself."""

    graph: Graph
    constants: dict[str, NDArray[np.float32]]


def capture(
    network: nn.Module, *, network_name: str, context_len: int, vocab_size: int, script: Path | None = None
) -> Capture:
    """Capture ``network``, a module whose forward takes a ``penstock.nn.Batch`` and returns logits [R, vocab].

    Parameters may be on the meta device; buffers that ops read, such as inv_freq, must have values.  The graph has the
    scheme "f32" and row-major weights; passes change both.  Raises UnsupportedError for an operation that cannot be
    captured, with its name, its module, and its line in ``script``, the file of a user's own network.
    """
    for path, module in network.named_modules():
        if getattr(module, "adapter", None) is not None:
            raise UnsupportedError(f"{path}.adapter: expected None, because a captured graph would contain the adapter")
    groups = assign_page_groups(network)
    with script_errors(script):
        exported = _export(network, len(groups) or 1)
    graph = Graph(network=network_name, scheme="f32", vocab_size=vocab_size, context_len=context_len)
    graph.symbols = [Symbol(name, 1, maximum) for name, maximum in _MAX_SIZES.items()]
    graph.page_groups = [group.window for group in groups] or [0]
    builder = _Builder(graph, network, exported, script)
    builder.build()
    heads = [name for name, module in network.named_modules() if isinstance(module, LMHead)]
    if len(heads) == 1:
        graph.properties["output_head"] = heads[0]
    return Capture(graph, builder.constants)


def _export(network: nn.Module, num_groups: int) -> torch.export.ExportedProgram:
    """Trace the network with non-strict export: sizes are symbols and its Python code runs."""

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="meta")

    dims = {name: torch.export.Dim(name, min=1, max=maximum) for name, maximum in _MAX_SIZES.items()}
    starts = torch.export.Dim("S", min=2, max=_MAX_SIZES["B"] + 1)  # B + 1; ops look no closer
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


class _Builder:
    """Walks the exported nodes in order and writes the graph."""

    def __init__(
        self, graph: Graph, network: nn.Module, exported: torch.export.ExportedProgram, script: Path | None
    ) -> None:
        self.graph = graph
        self.network = network
        self.exported = exported
        self.script = script
        self.constants: dict[str, NDArray[np.float32]] = {}
        self.operands: dict[fx.Node, Operand | tuple[Operand, ...]] = {}
        self.first_names: dict[int, str] = {}
        self.symbols: dict[str, Dim] = {}

    def build(self) -> None:
        """Add the inputs, the weights, the nodes and the output to the graph."""
        signature = self.exported.graph_signature
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        targets.update(signature.inputs_to_lifted_tensor_constants)
        inputs = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        users = [node for node in inputs if node.name not in targets]
        self._add_inputs(users)
        self._remember_names()
        for node in inputs:
            if node.name in targets:
                self._add_parameter(node, targets[node.name])
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._add_call(node)
            elif node.op == "output":
                self._add_output(node)

    def _add_inputs(self, nodes: list[fx.Node]) -> None:
        layout = {
            "token_ids": (Dim("T", 1),),
            "positions": (Dim("T", 1),),
            "request_starts": (Dim("B", 1, 1),),
            "page_tables": (Dim(None, 0, len(self.graph.page_groups)), Dim("B", 1), Dim("P", 1)),
            "output_rows": (Dim("R", 1),),
        }
        for node, (name, shape) in zip(nodes, layout.items(), strict=True):
            for size, dim in zip(node.meta["val"].shape, shape, strict=True):
                if dim.symbol is not None:
                    self.symbols.setdefault(str(size), dim)
            self.graph.values[name] = Value(name, DType.I32, shape)
            self.graph.inputs.append(name)
            self.operands[node] = Operand("value", name)

    def _remember_names(self) -> None:
        """Record the names of tied parameters: they are one weight under the first name."""
        for name, parameter in self.network.named_parameters(remove_duplicate=False):
            first = self.first_names.setdefault(id(parameter), name)
            if first != name:
                self.graph.properties[f"tied:{name}"] = first

    def _add_parameter(self, node: fx.Node, target: str) -> None:
        path, _, leaf = target.rpartition(".")
        module = self.network.get_submodule(path)
        if isinstance(module, PagedLayer) and leaf == "state":
            sizes = (module.num_kv_heads, module.head_dim, module.group)
            state = State(path, *sizes, module.recurrent, module.latent_dim)
            self.graph.states.setdefault(path, state)
            self.operands[node] = Operand("state", path)
            return
        tensor: Tensor = getattr(module, leaf)
        name = self.first_names.get(id(tensor), target)
        self.operands[node] = Operand("weight", name)
        if name in self.graph.weights or not node.users:
            return
        if tensor.ndim not in (1, 2):
            raise UnsupportedError(f"capture: weight {name}: expected a vector or a matrix, found {list(tensor.shape)}")
        rows, cols = (1, tensor.shape[0]) if tensor.ndim == 1 else (tensor.shape[0], tensor.shape[1])
        parts: tuple[Part, ...] = (Part(name, 0, rows),)
        if isinstance(module, MatrixLayer) and leaf == "weight" and name == target:
            parts = tuple(Part(*part) for part in module.weight_parts(path))
        self.graph.weights[name] = Weight(name, rows, cols, Layout.ROWS_F32, parts)
        if not isinstance(tensor, nn.Parameter):
            if tensor.is_meta:
                raise UnsupportedError(f"capture: buffer {name}: expected real values, found a meta tensor")
            self.constants[name] = tensor.detach().float().cpu().numpy()

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
                raise self._refusal(node, f"a {expected} as argument {argument.name}, found a {operand.kind}")
        self._emit(node, name, inputs, attrs)

    def _add_arithmetic(self, node: fx.Node, name: str) -> None:
        if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(arg, fx.Node) for arg in node.args):
            raise self._refusal(node, f"two tensors of the same shape, not a number (scale a weight), {_CUSTOM_OP}")
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

    def _new_value(self, base_name: str, tensor: Tensor, base: str | None = None, offset: int = 0) -> str:
        name, count = base_name, 1
        while name in self.graph.values:
            count += 1
            name = f"{base_name}#{count}"
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(f"capture: {base_name}: expected float32 or int32, found {tensor.dtype}")
        shape = tuple(self._dim(name, size) for size in tensor.shape)
        self.graph.values[name] = Value(name, _DTYPES[tensor.dtype], shape, base, offset)
        return name

    def _dim(self, name: str, size: Any) -> Dim:
        if isinstance(size, int):
            return Dim(None, 0, size)
        if str(size) not in self.symbols:
            raise UnsupportedError(f"capture: {name}: expected sizes of T, B, P, R or constants, found {size}")
        return self.symbols[str(size)]

    def _add_view(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.operands:
            raise self._refusal(node, _HINTS.get(str(target), f"an op of penstock.nn, {_CUSTOM_OP}"))
        operand = self.operands[source]
        if not isinstance(operand, Operand) or operand.kind != "value":
            raise self._refusal(node, "views of activations only, not of weights")
        value = self.graph.values[operand.name]
        base, start = (value.base, value.offset) if value.base is not None else (value.name, 0)
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
                names.append(self._new_value(f"{path}:view", view.tensor, base, start + view.offset))
        outputs = tuple(Operand("value", name) for name in names)
        self.operands[node] = outputs[0] if isinstance(node.meta["val"], Tensor) else outputs

    def _add_output(self, node: fx.Node) -> None:
        results: Any = node.args[0]
        operand = self.operands.get(results[0]) if len(results) == 1 and isinstance(results[0], fx.Node) else None
        if not isinstance(operand, Operand) or operand.kind != "value":
            raise UnsupportedError("capture: output: expected logits computed by an op, found a weight or a constant")
        value = self.graph.values[operand.name]
        expected = (Dim("R", 1), Dim(None, 0, self.graph.vocab_size))
        if value.shape != expected or value.dtype != DType.F32:
            raise InvalidArgumentError(
                f"capture: output: expected float32 logits [R, {self.graph.vocab_size}], found {value.dtype.name} "
                f"{[dim.symbol or dim.offset for dim in value.shape]}; select rows with batch.output_rows"
            )
        self.graph.output = operand.name

    def _operand(self, node: fx.Node, argument: str, value: Any) -> Operand:
        operand = self.operands.get(value) if isinstance(value, fx.Node) else None
        if not isinstance(operand, Operand):
            raise self._refusal(node, f"a tensor as argument {argument}, found {value!r}")
        return operand

    def _constant(self, node: fx.Node, argument: Argument, value: Any) -> int | float | str:
        if argument.kind in ("int", "bool") and isinstance(value, int):
            return int(value)
        if argument.kind == "float" and isinstance(value, int | float):
            return float(value)
        if argument.kind == "str" and isinstance(value, str):
            return value
        raise self._refusal(node, f"a constant {argument.kind} as attribute {argument.name}, found {value!r}")

    def _refusal(self, node: fx.Node, expected: str) -> UnsupportedError:
        line = line_in_stack(node.meta.get("stack_trace") or "", self.script)
        return UnsupportedError(
            f"{line or 'capture'}: {node.target} in module {_module_path(node) or '(root)'} is not supported in graph "
            f"mode; use {expected}"
        )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""
