"""Capture a built-in network without PyTorch: its forward runs once on tensors that tell their operations.

The graph equals that of ``graph.capture``, which has the rules.  Networks of users go through that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.graph.builder import Capture, GraphBuilder, constant_attr
from penstock.graph.ir import Dim, DType, Node, Operand
from penstock.nn import Batch, PagedLayer
from penstock.nn.base import nn
from penstock.ops.schema import Argument, parse_arguments
from penstock.ops.shapes import OUTPUT_DTYPES, infer_shapes
from penstock.ops.table import find_op
from penstock.symbolic.tensor import SymbolicSize, TracedTensor, active_trace, untraceable

__all__ = ["trace_network"]

_DTYPES: Final = {"float32": DType.F32, "int32": DType.I32}


def trace_network(network: nn.Module, *, network_name: str, context_len: int, vocab_size: int) -> Capture:
    """Capture ``network``, which is built of ``penstock.nn``; the arguments are those of ``graph.capture.capture``.

    Raises UnsupportedError, with the module, for an operation that the trace lacks.
    """
    builder = GraphBuilder(network, network_name, context_len, vocab_size)
    trace = _Trace(builder)
    token = active_trace.set(trace)
    try:
        output = trace.call_module(network, (trace.batch(),), {})
    finally:
        active_trace.reset(token)
    trace.finish(output)
    return builder.capture()


class _Trace:
    """Writes the nodes and values of a network that runs into a graph."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._nodes = builder.graph.nodes
        self._paths = {module: path for path, module in builder.network.named_modules()}
        self._stack: list[str] = []
        self._sizes = {Dim("B", 1, 1): SymbolicSize("S"), **{Dim(name, 1): SymbolicSize(name) for name in "TBPR"}}
        self._dims = {size: dim for dim, size in self._sizes.items()}
        self._used: set[str] = set()
        builder.remember_names()
        # PyTorch has a parameter that is shared at its last name, and every parameter before the buffers.
        self._targets: dict[int, str] = {}
        for name, parameter in builder.network.named_parameters(remove_duplicate=False):
            self._targets.pop(id(parameter), None)
            self._targets[id(parameter)] = name
        self._states: dict[int, Operand] = {}
        for name, tensor in builder.network.named_buffers():
            path, _, leaf = name.rpartition(".")
            module = builder.network.get_submodule(path)
            if isinstance(module, PagedLayer) and leaf == "state":
                self._states[id(tensor)] = builder.add_state(path, module)
            else:
                self._targets[id(tensor)] = name

    def batch(self) -> Batch:
        """Add the inputs, and return them as what a network is called with."""
        shapes = self._builder.input_shapes()
        for name, shape in shapes._asdict().items():
            self._builder.add_input(name, shape)
        tensors: list[Any] = [self._tensor(name) for name in self._builder.graph.inputs]
        return Batch(*tensors)

    def finish(self, output: object) -> None:
        """Add the weights that nodes read, in the order of their modules, and the output."""
        for target in self._targets.values():
            if target in self._used:
                self._builder.add_weight(target)
        own = output if isinstance(output, TracedTensor) and output.written_by is self else None
        self._builder.set_output(None if own is None else Operand("value", own.name))

    def module_path(self) -> str:
        """Return the path of the module that runs."""
        return self._stack[-1] if self._stack else ""

    def call_module(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's ``forward``, inside which calls belong to the module."""
        if module not in self._paths:
            raise untraceable(f"a call of {type(module).__name__}", "modules that belong to the network")
        self._stack.append(self._paths[module])
        try:
            return module.forward(*args, **kwargs)
        finally:
            self._stack.pop()

    def add_view(self, source: TracedTensor, shape: tuple[Any, ...], offset: int) -> TracedTensor:
        """Return the rows of ``source`` from element ``offset`` on, in another shape."""
        dims = self._shape(shape)
        return self._tensor(self._builder.new_view(self.module_path(), source.name, dims, offset))

    def call_op(self, name: str, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
        """Record a call of an op of the table and return its outputs."""
        arguments = parse_arguments(find_op(name).schema)
        tensors = [argument for argument in arguments if not argument.is_attr]
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | attrs
        extra = values.keys() - {argument.name for argument in arguments}
        if extra or len(args) > len(tensors):
            raise untraceable(f"{name} with {sorted(extra) or len(args)} arguments", "the arguments of its schema")
        inputs = [self._operand(name, argument, values.get(argument.name)) for argument in tensors]
        constants = {a.name: self._constant(name, a, values.get(a.name)) for a in arguments if a.is_attr}
        shapes = {argument.name: _shape_of(values.get(argument.name)) for argument in tensors}
        results = infer_shapes(name, shapes, {key: value for key, value in values.items() if key in constants})
        path, kinds = self.module_path(), OUTPUT_DTYPES.get(name, ("float32", "float32"))
        outputs = []
        for index, (shape, kind) in enumerate(zip(results, kinds, strict=False)):
            suffix = f".{index}" if len(results) > 1 else ""
            outputs.append(self._builder.new_value(f"{path}:{name}{suffix}", _DTYPES[kind], self._shape(shape)))
        self._nodes.append(Node(name, path, inputs, outputs, constants))
        made = tuple(self._tensor(output) for output in outputs)
        return None if not made else made[0] if len(made) == 1 else made

    def _operand(self, op: str, argument: Argument, value: Any) -> Operand:
        operand = Operand("none")
        if isinstance(value, TracedTensor):
            if value.written_by is not self:
                raise untraceable(f"{op} with a tensor of another trace as {argument.name}", "tensors of this step")
            operand = Operand("value", value.name)
        elif id(value) in self._states:
            operand = self._states[id(value)]
        elif id(value) in self._targets:
            target = self._targets[id(value)]
            self._used.add(target)
            operand = Operand("weight", self._builder.weight_name(target, value))
        elif value is not None:
            raise untraceable(f"{op} with {type(value).__name__} as {argument.name}", f"a {argument.kind} as it is")
        expected = {"tensor": "value", "weight": "weight", "state": "state"}[argument.kind]
        if (operand.kind == "none" and not argument.optional) or operand.kind not in ("none", expected):
            raise untraceable(f"{op} with a {operand.kind} as {argument.name}", f"a {expected}")
        return operand

    @staticmethod
    def _constant(op: str, argument: Argument, value: Any) -> int | float | str:
        constant = constant_attr(argument, value)
        if constant is None:
            raise untraceable(f"{op} with {value!r:.80} as {argument.name}", f"a constant {argument.kind}")
        return constant

    def _shape(self, sizes: Sequence[Any]) -> tuple[Dim, ...]:
        return tuple(self._dims[size] if isinstance(size, SymbolicSize) else Dim(None, 0, int(size)) for size in sizes)

    def _tensor(self, name: str) -> TracedTensor:
        value = self._builder.graph.values[name]
        shape = tuple(dim.offset if dim.symbol is None else self._sizes[dim] for dim in value.shape)
        return TracedTensor(self, name, shape, "float32" if value.dtype == DType.F32 else "int32")


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)
