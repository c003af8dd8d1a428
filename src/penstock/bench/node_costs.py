"""The bytes that a node must move and the operations that it must compute in a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.layouts import PAGE_TOKENS
from penstock.graph.ir import DType, Graph, Node, State, Value, Weight
from penstock.ops.table import BLOCK_SCHEMES

__all__ = [
    "Cost", "StepSize", "kind_keys", "kind_labels", "kv_token_bytes", "node_costs", "peak_of", "recurrent_page_bytes",
]  # fmt: skip

_BYTES = {DType.F32: 4, DType.F16: 2, DType.BF16: 2, DType.I8: 1, DType.I32: 4, DType.U8: 1, DType.I64: 8}
_PER_ELEMENT = {
    "rms_norm": 4,
    "add_rms_norm": 5,
    "layer_norm": 6,
    "rope": 3,
    "silu_mul": 5,
    "clamped_swiglu": 9,
    "gelu": 8,
    "add": 1,
    "mul": 1,
    "relu_squared": 2,
    "scale": 1,
    "softcap": 16,
    "sigmoid_mul": 4,
    "scale_channels": 1,
    "match_rms": 5,
    "gaussian_topk": 6,
    "relu": 1,
    "clamp": 2,
    "elu": 5,
}
"""Nominal operations per element of the first output; an exponential counts as one.  These ops are memory-bound."""

_LINEARS = ("linear", "head_linear", "expert_linear")
_ATTENTIONS = (
    *("attention", "context_attention", "sink_attention", "latent_attention", "relative_attention"),
    "disentangled_attention",
)


@dataclass(frozen=True)
class StepSize:
    """The size of a step: earlier tokens (``starts``) and new tokens (``lens``) per request; ``width`` pages per table.

    ``num_rows`` is the number of rows of logits: the last token of each of the last ``num_rows`` requests.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]
    width: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """The new tokens of all requests."""
        return sum(self.lens)

    @property
    def for_wanted_rows(self) -> StepSize:
        """The step of nodes that run only for rows of logits, if these are at most half of the tokens."""
        if 2 * self.num_rows > self.num_tokens:
            return self
        first = len(self.lens) - self.num_rows
        starts = tuple(start + length - 1 for start, length in zip(self.starts[first:], self.lens[first:], strict=True))
        return StepSize(starts, (1,) * self.num_rows, self.width, self.num_rows)

    def sizes(self) -> dict[str, int]:
        """Return the sizes by the symbols of a graph."""
        return {"T": self.num_tokens, "B": len(self.lens), "P": self.width, "R": self.num_rows}


@dataclass
class Cost:
    """Bytes to move (weights, keys and values, activations, once each) and operations (a multiply-add is two)."""

    num_bytes: float = 0.0
    num_ops: float = 0.0

    def add(self, other: Cost) -> None:
        """Add another cost to this one."""
        self.num_bytes += other.num_bytes
        self.num_ops += other.num_ops


def peak_of(node: Node, kv_layout: str, cpu_level: str) -> str:
    """Return the type whose arithmetic peak bounds a node: int8 for integer weights, otherwise bf16 or f32.

    Attention multiplies pairs of bf16.  It uses f32 for f32 pages and on the level ``amx``, whose tile registers add in
    an order that would change the bits of attention.
    """
    if node.op in _ATTENTIONS:
        return "f32" if kv_layout == "f32" or cpu_level == "amx" else "bf16"
    scheme = str(node.attrs.get("scheme", ""))
    return "int8" if scheme.startswith("w") or scheme in BLOCK_SCHEMES else "bf16" if scheme == "bf16" else "f32"


def _elements(value: Value, sizes: dict[str, int]) -> int:
    product = 1
    for dim in value.shape:
        product *= dim.offset if dim.symbol is None else dim.factor * sizes[dim.symbol] + dim.offset
    return product


def _keys(step: StepSize, window: int, causal: bool) -> tuple[int, int]:
    """Return the number of (token, key) pairs, and the positions that must be read at least once."""
    num_attended = read = 0
    for start, length in zip(step.starts, step.lens, strict=True):
        end = start + length
        for position in range(start, end):
            last = position if causal else end - 1
            first = 0
            if window:
                first, last = max(position - window + 1, 0), min(position + window - 1, last)
            num_attended += last - first + 1
        read += min(end, window + length - 1) if window else end
    return num_attended, read


def node_costs(graph: Graph, step: StepSize, kv_token_bytes: float, wanted_only: Sequence[bool]) -> list[Cost]:
    """Return the cost of each node in a step.

    ``kv_token_bytes``: the bytes of a page in all states, divided by its tokens.  ``wanted_only``: per node, True if it
    runs only for rows of logits.
    """
    width = sum(_row_width(state) for state in graph.states.values() if not state.recurrent)
    per_element = (kv_token_bytes - recurrent_page_bytes(graph) / PAGE_TOKENS) / width if width else 0.0
    steps = {False: step, True: step.for_wanted_rows}
    return [_node_cost(graph, node, steps[k], per_element) for node, k in zip(graph.nodes, wanted_only, strict=True)]


def recurrent_page_bytes(graph: Graph) -> int:
    """Return the bytes of one page of every recurrent state."""
    return sum(4 * state.num_kv_heads * state.head_dim for state in graph.states.values() if state.recurrent)


def kv_token_bytes(graph: Graph, kv_page_bytes: int) -> int:
    """Return the bytes of keys and values of one token; ``kv_page_bytes``: of one KV page, summed over all states."""
    return (kv_page_bytes - recurrent_page_bytes(graph)) // PAGE_TOKENS


def _row_width(state: State) -> float:
    """Return half the numbers that a state stores for a token: keys and values, or one row."""
    return state.num_kv_heads * state.head_dim / (2 if state.latent_dim else 1)


def _node_cost(graph: Graph, node: Node, step: StepSize, kv_element_bytes: float) -> Cost:
    sizes, cost = step.sizes(), Cost()
    if not sizes["T"]:
        return cost
    values = [graph.values[o.name] for o in node.inputs if o.kind == "value"]
    outputs = [graph.values[name] for name in node.outputs]
    inputs = (
        [*outputs, *values[1:]] if node.op == "gather_rows" else values
    )  # it reads as many rows of the first input as it writes
    cost.num_bytes = float(sum(_elements(v, sizes) * _BYTES[v.dtype] for v in [*inputs, *outputs]))
    first = next((operand for operand in node.inputs if operand.kind == "weight"), None)
    for operand in node.inputs:
        if operand.kind == "weight":
            weight = graph.weights[operand.name]
            cost.num_bytes += weight.num_bytes * _share_read(node, weight, outputs[0], sizes)
            if node.op in _LINEARS and operand is first:  # the other one is a bias
                # 16-bit activations take two int8 products per weight.
                planes = 2 if str(node.attrs["scheme"]).endswith("a16") else 1
                rows = _elements(outputs[0], sizes) / _columns(outputs[0])
                if node.op == "expert_linear":  # each slot of a token multiplies the rows of one expert
                    rows *= _slots(outputs[0]) / int(node.attrs["num_experts"])
                cost.num_ops += 2 * planes * weight.rows * weight.cols * rows
        elif operand.kind == "state":
            state = graph.states[operand.name]
            if state.recurrent:  # read and written once for each request
                cost.num_bytes += 8 * len(step.lens) * state.num_kv_heads * state.head_dim
                name = "state_dim" if node.op == "ssm_scan" else "head_dim"
                cost.num_ops += 6 * _elements(outputs[0], sizes) * int(node.attrs.get(name, 0))
                continue
            token_bytes = kv_element_bytes * _row_width(state)
            if node.op in _ATTENTIONS:
                num_ranks = int(node.attrs.get("world", 1))
                num_attended, read = _keys(step, int(node.attrs["window"]), bool(node.attrs["causal"]))
                cost.num_bytes += read * token_bytes // num_ranks
                columns = 2 * _columns(outputs[0])
                if state.latent_dim:  # and the rotary part of the keys
                    columns += _columns(values[-1])
                cost.num_ops += 2 * num_attended * columns // num_ranks
            else:
                cost.num_bytes += step.num_tokens * token_bytes
    if outputs:
        cost.num_ops += _PER_ELEMENT.get(node.op, 0) * _elements(outputs[0], sizes)
    return cost


def _share_read(node: Node, weight: Weight, output: Value, sizes: dict[str, int]) -> float:
    """Return the share of a weight's bytes that a step reads.

    Of experts it is the mean share of those that some token chooses, if every choice is as likely as any other.
    """
    if node.op == "embedding":
        return sizes["T"] / weight.rows
    if node.op != "expert_linear":
        return 1.0
    num_tokens = _elements(output, sizes) / _columns(output)
    return float(1 - (1 - _slots(output) / int(node.attrs["num_experts"])) ** num_tokens)


def _slots(output: Value) -> int:
    """Return the number of experts that each token has in the output [T, slots, rows] of expert_linear."""
    return output.shape[1].offset


def _columns(value: Value) -> int:
    product = 1
    for dim in value.shape[1:]:
        product *= dim.offset
    return product


def kind_keys(nodes: Sequence[Node]) -> list[str]:
    """Return the key by which a table groups each node: the op, and for a linear its place in a layer."""
    return [f"linear {re.sub(r'[.][0-9]+(?=[.]|$)', '.*', n.name)}" if n.op == "linear" else n.op for n in nodes]


def kind_labels(keys: Sequence[str]) -> dict[str, str]:
    """Return a short name per kind: "linear model.layers.*.mlp.gate_proj|up_proj" is "linear gate|up", if unique."""

    def short(key: str, parts: int) -> str:
        op, _, path = key.partition(" ")
        last = ".".join(path.split(".")[-parts:]).replace("_proj", "")
        return f"{op} {last}" if path else op

    labels: dict[str, str] = {}
    for key in dict.fromkeys(keys):
        same = [other for other in dict.fromkeys(keys) if short(other, 1) == short(key, 1)]
        labels[key] = short(key, 1) if len(same) == 1 else key
    return labels
