"""Runs a graph over the references: what a graph means, in forty lines, for tests of capture and passes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.graph.ir import Graph, Weight
from penstock.nn import Batch
from penstock.ops import reference
from penstock.ops.pages import page_elements
from penstock.ops.schema import parse_arguments
from penstock.ops.table import find_op


class Interpreter:
    """A graph with its weights: ``tensors`` by checkpoint name, logical float32."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor], num_pages: int) -> None:
        self.graph = graph
        self.weights = {name: self._assemble(weight, tensors) for name, weight in graph.weights.items()}
        self.states = {
            name: torch.zeros(
                num_pages,
                state.num_kv_heads * state.head_dim
                if state.recurrent
                else page_elements(torch.float32, state.num_kv_heads, state.head_dim, state.latent_dim),
            )
            for name, state in graph.states.items()
        }

    @staticmethod
    def _assemble(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
        if weight.rows == 1:
            whole = torch.cat([tensors[part.name].float().reshape(-1) for part in weight.parts])
            assert whole.shape == (weight.cols,)
            return whole
        whole = torch.full((weight.rows, weight.cols), torch.nan)
        for part in weight.parts:
            whole[part.row_start : part.row_start + part.num_rows] = tensors[part.name].float()
        return whole

    def run(self, batch: Batch) -> Tensor:
        """Logits of a step."""
        made: dict[str, Tensor] = dict(zip(self.graph.inputs, batch, strict=True))

        def value(name: str) -> Tensor:
            described = self.graph.values[name]
            if described.base is None:
                return made[name]
            base = made[described.base].contiguous()
            inner = [dim.offset for dim in described.shape[1:]]
            row = base.numel() // max(base.shape[0], 1)
            strides = [row]
            for index in range(len(inner)):
                strides.append(int(torch.tensor(inner[index + 1 :]).prod()) if index + 1 < len(inner) else 1)
            return base.as_strided((base.shape[0], *inner), strides, described.offset)

        for node in self.graph.nodes:
            found = {"none": lambda _: None, "value": value}
            found |= {"weight": self.weights.__getitem__, "state": self.states.__getitem__}
            inputs = [found[operand.kind](operand.name) for operand in node.inputs]
            attrs = dict(node.attrs)
            for argument in parse_arguments(find_op(node.op).schema):
                if argument.kind == "bool":
                    attrs[argument.name] = bool(attrs[argument.name])
            results = getattr(reference, node.op)(*inputs, **attrs)
            results = () if results is None else results if isinstance(results, tuple) else (results,)
            for name, result in zip(node.outputs, results, strict=True):
                described = self.graph.values[name]
                assert described.base is None, f"{name} is made by a node and a view"
                assert [d.offset for d in described.shape[1:]] == list(result.shape[1:]), name
                made[name] = result
        return value(self.graph.output)
