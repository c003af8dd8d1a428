"""Reads an ONNX file into the draft of a general network.

The nodes that the outputs need are read in the order of the file.  Each gets the calls of the op table that compute it;
arithmetic on shapes disappears, because ``Draft`` folds it.  A node that is not supported is noted, and the nodes
behind it are skipped, so that one error names all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.general.draft import NUMPY_TYPES, Draft, Tensor
from penstock.graph.general.selections import bound_selections
from penstock.graph.ir import DType
from penstock.graph.onnx.context import ELEMENT_TYPES, FLOATS_AS_F32, MAX_RANK, Site, Value, as_constant, dtype_name
from penstock.graph.onnx.families import reader_of
from penstock.graph.onnx.functions import EXPANDED, add_custom_node, custom_op_of, standard_body
from penstock.graph.onnx.input_sizes import InputSizes
from penstock.graph.onnx.load import OnnxSource, element_name, load
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

__all__ = ["MAX_OPSET", "MIN_OPSET", "read_onnx"]

MIN_OPSET: Final = 7
MAX_OPSET: Final = 28
_SHOWN: Final = 50


def read_onnx(
    source: str | os.PathLike[str] | bytes, sizes: Mapping[str, Any] | None = None,
    custom_ops: Mapping[str, str] | None = None,
) -> Draft:  # fmt: skip
    """Return the network of an ONNX file.

    ``sizes`` fixes sizes of inputs that the file leaves open, or gives them ranges: ``{"batch": 1, "H": (32, 1024,
    32)}`` is a number, and a range of multiples of 32.  A size without a name in the file is "INPUT/AXIS"; ``{"x": (1,
    3, 224, 224)}`` fixes all sizes of an input.  The number of an input of rank 0 is its value, which is constant then.
    ``custom_ops`` gives operators of other domains, "domain::Name", names of custom ops.

    Raises UnsupportedError with every node that is not supported (code "unsupported_nodes"), and InvalidFileError
    for a file that is damaged.
    """
    name = "model" if isinstance(source, bytes) else Path(source).stem
    walk = _Walk(name, load(source), InputSizes(sizes), custom_ops or {})
    draft = walk.draft()
    draft.source = OnnxSource(source, draft, sizes or {}, walk.custom)
    return draft


@dataclass(frozen=True)
class _Refusal:
    node: OnnxNode
    place: str
    reason: str

    def text(self) -> str:
        op = f"{self.node.domain}::{self.node.op}" if self.node.domain else self.node.op
        return f"{op}, node {self.node.name} of {self.place}: {self.reason}"


class _Scope:
    """The values of a graph by name; None: one that an unsupported node would have computed."""

    def __init__(self, parent: _Scope | None, opsets: dict[str, int], place: str, depth: int) -> None:
        self.parent, self.opsets, self.place, self.depth = parent, opsets, place, depth
        self.values: dict[str, Value | None] = {}

    def find(self, name: str) -> Value | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        raise InvalidFileError(f"{self.place}: no node or input before it computes {name!r}")


class _Walk:
    def __init__(self, name: str, model: OnnxNetwork, sizes: InputSizes, custom_ops: Mapping[str, str]) -> None:
        self._model, self._sizes, self._custom_ops = model, sizes, custom_ops
        self._draft = Draft(name, properties=model.properties)
        self.custom: dict[tuple[str, str], str] = {}  # the custom ops of operators
        self._refusals: list[_Refusal] = []
        self._count = self._folded = 0

    def draft(self) -> Draft:
        graph = self._model.graph
        version = self._model.opsets.get("", 0)
        if version and not MIN_OPSET <= version <= MAX_OPSET:
            raise UnsupportedError(
                f"opset: expected {MIN_OPSET} to {MAX_OPSET}, got {version}; export the network with a newer opset",
                param="opset",
            )
        scope = _Scope(None, self._model.opsets, "the graph", 0)
        for port in graph.inputs:
            scope.values[port.name] = self._input(port)
        self._sizes.expect_used([port.name for port in graph.inputs])
        outputs = self._run(graph, scope)
        if self._refusals:
            raise self._unsupported()
        for port, tensor in zip(graph.outputs, outputs, strict=True):
            self._draft.output(port.name, self._declared(port, tensor))
        bound_selections(self._draft)
        self._draft.prune()
        return self._draft

    def _input(self, port: OnnxPort) -> Tensor:
        if port.kind != "tensor" or port.dims is None:
            what = "a tensor with a shape" if port.kind == "tensor" else f"a tensor, not {port.kind or 'nothing'}"
            raise UnsupportedError(f"input {port.name}: expected {what}", param=port.name)
        if port.element not in ELEMENT_TYPES:
            known = ", ".join(element_name(element) for element in ELEMENT_TYPES)
            raise UnsupportedError(
                f"input {port.name}: expected one of {known}, got {element_name(port.element)}", param=port.name
            )
        if len(port.dims) > MAX_RANK:
            raise UnsupportedError(
                f"input {port.name}: expected at most {MAX_RANK} dimensions, got {len(port.dims)}", param=port.name
            )
        fixed = self._sizes.number(port.name) if not port.dims else None
        if fixed is not None:
            dtype = NUMPY_TYPES.get(ELEMENT_TYPES[port.element], np.dtype(np.float32))
            return as_constant(self._draft, np.array(fixed, dtype), port.name)
        tensor = self._draft.input(port.name, ELEMENT_TYPES[port.element], self._sizes.shape(port.name, port.dims))
        if port.element in FLOATS_AS_F32 and port.element != 1:
            made: Tensor = self._draft.add("cast", tensor, name=port.name, dtype="f32")
            return made
        return tensor

    def _declared(self, port: OnnxPort, tensor: Tensor) -> Tensor:
        """Return an output in the type that the file declares."""
        if port.element == 0 or (port.element not in FLOATS_AS_F32 and tensor.dtype != DType.F32):
            return tensor
        if port.element not in ELEMENT_TYPES:
            raise UnsupportedError(
                f"output {port.name}: {element_name(port.element)} is not supported", param=port.name
            )
        wanted = ELEMENT_TYPES[port.element]
        if wanted == tensor.dtype:
            return tensor
        made: Tensor = self._draft.add("cast", tensor, name=port.name, dtype=dtype_name(wanted))
        return made

    def _unsupported(self) -> UnsupportedError:
        lines = [refusal.text() for refusal in self._refusals[:_SHOWN]]
        if len(self._refusals) > _SHOWN:
            lines.append(f"and {len(self._refusals) - _SHOWN} more")
        count = len(self._refusals)
        return UnsupportedError(
            f"{count} node{' is' if count == 1 else 's are'} not supported:\n  " + "\n  ".join(lines),
            code="unsupported_nodes",
            param="nodes",
        )

    # Graphs.

    def _run(self, graph: OnnxGraph, scope: _Scope) -> list[Tensor]:
        """Read the nodes of a graph; return its outputs, or nothing where one of them is not supported."""
        if scope.depth > MAX_DEPTH:
            raise InvalidFileError(f"{scope.place}: expected at most {MAX_DEPTH} graphs and functions in each other")
        scope.values.update(graph.constants)
        self._nodes(graph.nodes, {port.name for port in graph.outputs}, scope)
        values = [(port.name, scope.find(port.name)) for port in graph.outputs]
        return [self._tensor(name, value) for name, value in values if value is not None]

    def _tensor(self, name: str, value: Value) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return as_constant(self._draft, value() if callable(value) else value, name)

    def _nodes(self, nodes: Sequence[OnnxNode], outputs: set[str], scope: _Scope) -> None:
        wanted = set(outputs)
        live = []
        for node in reversed(nodes):
            if any(name in wanted for name in node.outputs):
                live.append(node)
                wanted.update(node.inputs)
                wanted.update(_captured(node))
        for node in reversed(live):
            self._count += 1
            if self._count > MAX_NODES:
                raise InvalidFileError(f"{scope.place}: expected at most {MAX_NODES} nodes, functions inlined")
            try:
                results = self._node(node, scope)
            except UnsupportedError as error:
                self._refusals.append(_Refusal(node, scope.place, str(error)))
                results = [None] * len(node.outputs)
            for name, result in zip(node.outputs, results, strict=False):
                if name:
                    scope.values[name] = result
                    if scope.depth == 0:
                        self._draft.origin(name, f"node {node.name} ({node.op})", result)

    def _node(self, node: OnnxNode, scope: _Scope) -> Sequence[Value | None]:
        missing: list[Value | None] = [None] * len(node.outputs)
        function = self._model.functions.get((node.domain, node.op))
        reader = reader_of(node.op) if not node.domain else None
        values = [scope.find(name) if name else None for name in node.inputs]
        is_missing = any(name and value is None for name, value in zip(node.inputs, values, strict=True))
        if function is not None:
            return missing if is_missing else self._call(node, function, values, scope)
        if node.domain:
            op = custom_op_of(node, self._custom_ops)
            self.custom[node.domain, node.op] = op.name
            tensors = [None if value is None else self._tensor("constant", value) for value in values]
            return missing if is_missing else add_custom_node(self._draft, node, op, tensors)
        version = scope.opsets.get("", MAX_OPSET)
        if reader is None:
            if is_missing and node.op in EXPANDED:
                return missing
            tensors = [None if value is None else self._tensor("constant", value) for value in values]
            body = None if is_missing else standard_body(node, version, tensors)
            if body is None:
                raise UnsupportedError("this operator is not supported")
            return self._call(node, body, [*tensors], scope)
        if is_missing:
            return missing
        site = Site(node, version, self._draft, values)
        site.run_graph = lambda graph: self._branch(node, graph, scope)
        site.size_names = self._sizes.originals
        return self._read(site, reader)

    def _read(self, site: Site, reader: Any) -> Sequence[Value | None]:
        where = f"node {site.node.name} ({site.node.op})"
        site.folded = self._folded
        try:
            result = reader(site)
        except InvalidArgumentError as error:
            raise InvalidFileError(str(error) if site.node.name in str(error) else f"{where}: {error}") from error
        except PenstockError:
            raise
        except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise InvalidFileError(f"{where}: its inputs and attributes do not fit: {error}") from error
        finally:
            self._folded = site.folded
        return result if isinstance(result, tuple | list) else (result,)

    def _branch(self, node: OnnxNode, graph: OnnxGraph, scope: _Scope) -> list[Tensor]:
        inner = _Scope(scope, scope.opsets, f"{scope.place} in {node.name}", scope.depth + 1)
        return self._run(graph, inner)

    def _call(
        self, node: OnnxNode, function: Function, values: Sequence[Value | None], scope: _Scope
    ) -> Sequence[Value | None]:
        inner = _Scope(None, function.opsets, f"{node.op} in {scope.place}", scope.depth + 1)
        if inner.depth > MAX_DEPTH:
            raise InvalidFileError(f"{scope.place}: expected at most {MAX_DEPTH} functions in each other")
        attrs = {**function.defaults, **node.attrs}
        absent = set()
        for at, name in enumerate(function.inputs):
            value = values[at] if at < len(values) else None
            if value is None:
                absent.add(name)
            else:
                inner.values[name] = value
        nodes = [_bound(item, f"{node.name}/{item.name or item.op}", attrs, absent) for item in function.nodes]
        self._nodes(nodes, set(function.outputs[: len(node.outputs)]), inner)
        return [inner.find(name) for name in function.outputs[: len(node.outputs)]]


def _bound(node: OnnxNode, name: str, attrs: dict[str, Any], absent: set[str]) -> OnnxNode:
    """Return a node of a function with the values of its attributes; absent inputs of the function have no name."""
    bound = {
        key: attrs.get(value.name) if isinstance(value, Reference) else _bound_value(value, name, attrs, absent)
        for key, value in node.attrs.items()
    }
    inputs = ["" if item in absent else item for item in node.inputs]
    return OnnxNode(node.op, node.domain, name, inputs, node.outputs, bound)


def _bound_value(value: Any, name: str, attrs: dict[str, Any], absent: set[str]) -> Any:
    if not isinstance(value, OnnxGraph):
        return value
    nodes = [_bound(item, f"{name}/{item.name or item.op}", attrs, absent) for item in value.nodes]
    return OnnxGraph(value.name, nodes, value.constants, value.inputs, value.outputs)


def _captured(node: OnnxNode) -> set[str]:
    """Return the names that the graphs inside a node read."""
    names: set[str] = set()
    for value in node.attrs.values():
        if isinstance(value, OnnxGraph):
            names.update(port.name for port in value.outputs)
            for inner in value.nodes:
                names.update(inner.inputs)
                names.update(_captured(inner))
    return names
