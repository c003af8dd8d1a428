"""The parts of every capture: inputs, weights, states, values and the output of a graph.  Imports no PyTorch itself.

A weight that several modules share appears once, under its first name; ``properties["tied:<other name>"]`` holds
that first name.  ``properties["output_head"]`` is the module path of the output head.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import Dim, DType, Graph, Layout, Operand, Part, State, Symbol, Value, Weight
from penstock.nn import Batch, LMHead, PagedLayer, assign_page_groups
from penstock.nn.base import Tensor, nn
from penstock.nn.weight import MatrixLayer
from penstock.ops.schema import Argument

__all__ = ["MAX_SIZES", "Capture", "GraphBuilder", "constant_attr"]

MAX_SIZES: Final = {"T": 1 << 20, "B": 1 << 16, "P": 1 << 20, "R": 1 << 20}


class Capture(NamedTuple):
    """A graph with logical weights, and the values of the weights that the network computes itself."""

    graph: Graph
    constants: dict[str, NDArray[np.float32]]


class GraphBuilder:
    """The graph of a network, its constants, and the names that it has so far."""

    def __init__(self, network: nn.Module, name: str, context_len: int, vocab_size: int) -> None:
        for path, module in network.named_modules():
            if getattr(module, "adapter", None) is not None:
                raise UnsupportedError(
                    f"{path}.adapter: expected None, because a captured graph would contain the adapter",
                    param="adapter",
                )
        self.network = network
        self.graph = Graph(network=name, scheme="f32", vocab_size=vocab_size, context_len=context_len)
        self.graph.symbols = [Symbol(symbol, 1, maximum) for symbol, maximum in MAX_SIZES.items()]
        self.graph.page_groups = [group.window for group in assign_page_groups(network)] or [0]
        self.constants: dict[str, NDArray[np.float32]] = {}
        self.first_names: dict[int, str] = {}

    def capture(self) -> Capture:
        """Return the finished graph."""
        heads = [name for name, module in self.network.named_modules() if isinstance(module, LMHead)]
        if len(heads) == 1:
            self.graph.properties["output_head"] = heads[0]
        return Capture(self.graph, self.constants)

    def input_shapes(self) -> Batch:
        """Return the shape of each input."""
        token, request = Dim("T", 1), Dim("B", 1)
        tables = (Dim(None, 0, len(self.graph.page_groups)), request, Dim("P", 1))
        return Batch((token,), (token,), (Dim("B", 1, 1),), tables, (Dim("R", 1),))  # type: ignore[arg-type]

    def add_input(self, name: str, shape: tuple[Dim, ...]) -> None:
        """Add an input of a step."""
        self.graph.values[name] = Value(name, DType.I32, shape)
        self.graph.inputs.append(name)

    def remember_names(self) -> None:
        """Record the names of tied parameters: they are one weight under the first name."""
        for name, parameter in self.network.named_parameters(remove_duplicate=False):
            first = self.first_names.setdefault(id(parameter), name)
            if first != name:
                self.graph.properties[f"tied:{name}"] = first

    def weight_name(self, target: str, tensor: Tensor) -> str:
        """Return the name of the weight that the parameter or constant ``target`` is."""
        return self.first_names.get(id(tensor), target)

    def add_state(self, path: str, module: PagedLayer) -> Operand:
        """Add the pages of a layer."""
        sizes = (module.num_kv_heads, module.head_dim, module.group)
        self.graph.states.setdefault(path, State(path, *sizes, module.recurrent, module.latent_dim))
        return Operand("state", path)

    def add_weight(self, target: str) -> None:
        """Add the parameter or the constant ``target``, which a node reads, unless the graph has it."""
        path, _, leaf = target.rpartition(".")
        module = self.network.get_submodule(path)
        tensor: Tensor = getattr(module, leaf)
        name = self.weight_name(target, tensor)
        if name in self.graph.weights:
            return
        if tensor.ndim not in (1, 2):
            raise UnsupportedError(
                f"capture: weight {name}: expected a vector or a matrix, got {list(tensor.shape)}", param=name
            )
        rows, cols = (1, tensor.shape[0]) if tensor.ndim == 1 else (tensor.shape[0], tensor.shape[1])
        parts: tuple[Part, ...] = (Part(name, 0, rows),)
        if isinstance(module, MatrixLayer) and leaf == "weight" and name == target:
            parts = tuple(Part(*part) for part in module.weight_parts(path))
        self.graph.weights[name] = Weight(name, rows, cols, Layout.ROWS_F32, parts)
        if not isinstance(tensor, nn.Parameter):
            if tensor.is_meta:
                raise UnsupportedError(f"capture: buffer {name}: expected real values, got a meta tensor", param=name)
            self.constants[name] = self.constant_values(tensor)

    def constant_values(self, tensor: Tensor) -> NDArray[np.float32]:
        """Return the values of a buffer."""
        return np.asarray(tensor.numpy(), np.float32)

    def new_value(
        self, base_name: str, dtype: DType, shape: tuple[Dim, ...], base: str | None = None, offset: int = 0
    ) -> str:
        """Add a value under a name that no other has, and return the name."""
        name, count = base_name, 1
        while name in self.graph.values:
            count += 1
            name = f"{base_name}#{count}"
        self.graph.values[name] = Value(name, dtype, shape, base, offset)
        return name

    def new_view(self, path: str, source: str, shape: tuple[Dim, ...], offset: int) -> str:
        """Add a view of ``source``, from element ``offset`` of each row on, and return its name."""
        value = self.graph.values[source]
        base, start = (value.base, value.offset) if value.base is not None else (value.name, 0)
        return self.new_value(f"{path}:view", value.dtype, shape, base, start + offset)

    def set_output(self, operand: object) -> None:
        """Check that a value is what a network returns, and make it the output."""
        if not isinstance(operand, Operand) or operand.kind != "value":
            raise UnsupportedError(
                "capture: output: expected logits computed by an op, got a weight or a constant", param="output"
            )
        value = self.graph.values[operand.name]
        expected = (Dim("R", 1), Dim(None, 0, self.graph.vocab_size))
        if value.shape != expected or value.dtype != DType.F32:
            raise InvalidArgumentError(
                f"capture: output: expected float32 logits [R, {self.graph.vocab_size}], got {value.dtype.name} "
                f"{[dim.symbol or dim.offset for dim in value.shape]}; select rows with batch.output_rows",
                param="output",
            )
        self.graph.output = operand.name


def constant_attr(argument: Argument, value: object) -> int | float | str | None:
    """Return the value of an attribute as the graph has it; None if it is not of the argument's kind."""
    if argument.kind in ("int", "bool") and isinstance(value, int):
        return int(value)
    if argument.kind == "float" and isinstance(value, int | float):
        return float(value)
    return value if argument.kind == "str" and isinstance(value, str) else None
