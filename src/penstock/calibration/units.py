"""The units of mixed precision: weights of a graph that have one scheme together."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.layouts import BLOCKS
from penstock.core.native import layout_bytes
from penstock.errors import InternalError
from penstock.graph.ir import Graph, Node, Part, Weight
from penstock.quant.scheme import find_scheme

__all__ = ["HEAD", "WeightUnit", "find_units", "has_experts"]

HEAD: Final = "head"
_LINEARS: Final = ("linear", "expert_linear", "head_linear")


@dataclass(frozen=True)
class WeightUnit:
    """Weights that have one scheme together.

    ``layer``: the number of the layer as text, or "head" for weights outside of layers.  ``kind``: the names of the
    modules, "q_proj|k_proj|v_proj".  ``tensors``: their names in the checkpoint.  ``num_bytes``: the size of the packed
    weights by scheme.
    """

    layer: str
    kind: str
    tensors: tuple[str, ...]
    num_bytes: Mapping[str, int]

    @property
    def name(self) -> str:
        """The name in tables and results."""
        return self.kind if self.layer == HEAD else f"{self.layer} {self.kind}"


def find_units(
    graph: Graph, schemes: Sequence[str], quantized: Collection[str], split: bool = False
) -> list[WeightUnit]:
    """Return the units of a graph in the order of its nodes.

    ``quantized``: the tensors that are stored as integers; weights with others, such as routers, belong to no unit.
    ``split``: tensors that are fused, such as q, k and v, are units of their own; the experts of a layer are not.
    """
    units: dict[str, WeightUnit] = {}
    for node in graph.nodes:
        if node.op not in _LINEARS:
            continue
        weight = graph.weights[node.inputs[1].name]
        for name, parts in _pieces(node, weight, split):
            tensors = tuple(part.name for part in parts)
            if all(tensor in quantized for tensor in tensors):
                rows = sum(part.num_rows for part in parts)
                sizes = _sizes(schemes, rows, weight.cols)
                units.setdefault(name, WeightUnit(*_place(tensors), tensors, sizes))
    listed = list(units.values())
    if len({unit.name for unit in listed}) < len(listed):
        raise InternalError("units: two weights of a layer have the same name")
    return listed


def _sizes(schemes: Sequence[str], rows: int, cols: int) -> dict[str, int]:
    """Return the bytes of a packed matrix by scheme, without those whose blocks its rows are no multiple of."""
    layouts = {scheme: find_scheme(scheme).layout for scheme in schemes}
    return {
        scheme: layout_bytes(layout, rows, cols)
        for scheme, layout in layouts.items()
        if layout not in BLOCKS or cols % BLOCKS[layout].block_len == 0
    }


def has_experts(graph: Graph) -> bool:
    """Return True for a mixture of experts, which reads only some of its weights for a token."""
    return any(node.op == "expert_linear" for node in graph.nodes)


def _pieces(node: Node, weight: Weight, split: bool) -> list[tuple[str, list[Part]]]:
    parts = list(weight.parts)
    is_fused = "|" in node.name and len(node.name.split("|")) == len(parts)
    if split and is_fused:
        return [(part.name, [part]) for part in parts]
    return [(weight.name, parts)]


def _place(tensors: Sequence[str]) -> tuple[str, str]:
    """Return the layer and the kind of tensors; the numbers of experts are left out."""
    found = re.search(r"\.(\d+)\.", tensors[0])
    if found is None:
        return HEAD, tensors[0].removesuffix(".weight").rpartition(".")[2]
    rest = [re.sub(r"\.\d+\.", ".", name[found.end() :]).removesuffix(".weight") for name in tensors]
    kinds = [name.rpartition(".")[2] for name in dict.fromkeys(rest)]
    words = {word for name in rest for word in name.split(".")}
    prefix = next((f"{word}." for word in ("shared_experts", "shared_expert", "experts") if word in words), "")
    return found[1], prefix + "|".join(dict.fromkeys(kinds))
