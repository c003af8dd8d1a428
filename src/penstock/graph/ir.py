"""The graph, which capture creates, passes rewrite, the bundle stores and the native core executes.

Values are in static single assignment; nodes are in execution order.  Weights and states are declared beside the
values, so that a pass can find what a node reads and writes, and the origin of a parameter.  This module does not
import tensors or PyTorch.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.core import layouts
from penstock.core.layouts import KV_NUMBERS

__all__ = ["GENERAL_NETWORK", "LANGUAGE_MODEL", "AttrValue", "DType", "Dim", "Graph", "KvLayout", "Layout", "Node",
           "Operand", "Part", "Segment", "State", "Symbol", "Value", "Weight"]  # fmt: skip

AttrValue = int | float | str


class DType(IntEnum):
    """Element types, with the numbers of ``ps_dtype``."""

    F32 = layouts.F32
    F16 = layouts.F16
    BF16 = layouts.BF16
    I8 = layouts.I8
    I32 = layouts.I32
    U8 = layouts.U8
    I64 = layouts.I64
    BOOL = layouts.BOOL


class Layout(IntEnum):
    """The memory layouts of weights, with the numbers of ``ps_layout``."""

    ROWS_F32 = layouts.ROWS_F32
    ROWS_F16 = layouts.ROWS_F16
    ROWS_BF16 = layouts.ROWS_BF16
    ROWS_I32 = layouts.ROWS_I32
    ROWS_I64 = layouts.ROWS_I64
    ROWS_I8 = layouts.ROWS_I8
    ROWS_U8 = layouts.ROWS_U8
    ROWS_BOOL = layouts.ROWS_BOOL
    T16_F32 = layouts.T16_F32
    T16_F16 = layouts.T16_F16
    T16_BF16 = layouts.T16_BF16
    T16_I8 = layouts.T16_I8
    T16_I4G32 = layouts.T16_I4G32
    T16_Q8_0 = layouts.T16_Q8_0
    T16_Q4_0 = layouts.T16_Q4_0
    T16_Q4_K = layouts.T16_Q4_K
    T16_Q5_K = layouts.T16_Q5_K
    T16_Q6_K = layouts.T16_Q6_K
    T16_MXFP4 = layouts.T16_MXFP4
    T16_UINT4 = layouts.T16_UINT4
    T16_Q4_1 = layouts.T16_Q4_1
    T16_Q5_0 = layouts.T16_Q5_0
    T16_Q5_1 = layouts.T16_Q5_1
    T16_IQ4_NL = layouts.T16_IQ4_NL
    T16_IQ4_XS = layouts.T16_IQ4_XS
    T16_Q2_K = layouts.T16_Q2_K
    T16_Q3_K = layouts.T16_Q3_K
    T16_NVFP4 = layouts.T16_NVFP4
    T16_TQ2_0 = layouts.T16_TQ2_0
    T16_TQ1_0 = layouts.T16_TQ1_0
    T16_Q2_0 = layouts.T16_Q2_0
    T16_Q1_0 = layouts.T16_Q1_0


class KvLayout(IntEnum):
    """The formats of keys and values in a page, with the numbers of ``ps_kv_layout``."""

    F32 = KV_NUMBERS["f32"]
    BF16 = KV_NUMBERS["bf16"]
    INT8 = KV_NUMBERS["int8"]
    INT4 = KV_NUMBERS["int4"]


LANGUAGE_MODEL, GENERAL_NETWORK = 0, 1
"""The kinds of a graph."""


@dataclass(frozen=True)
class Symbol:
    """A size that each step determines: T tokens, B requests, P page-table width, R output rows.

    A general network declares sizes of its own, such as ``H``.  Each is a multiple of ``multiple``.  ``example`` is a
    size that the network takes: a reader checks the graph with it.  0 stands for the smallest one.
    """

    name: str
    min: int
    max: int
    multiple: int = 1
    example: int = 0


@dataclass(frozen=True)
class Dim:
    """A size ``factor * symbol + offset``; with ``symbol`` None the constant ``offset``."""

    symbol: str | None
    factor: int = 0
    offset: int = 0


@dataclass
class Value:
    """A tensor that exists during a step.

    ``base`` is the name of the value that this one is a view of.  A view begins ``offset`` elements into each row of
    its base, and has the base's row stride.

    A general network stores no shapes: ``shape`` is (), and the shape of an input or an output is the list of
    expressions ``sizes``, such as "B,3,32*h"; "" is a scalar.  ``weight`` names a stored constant.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    base: str | None = None
    offset: int = 0
    sizes: str = ""
    weight: str | None = None


@dataclass(frozen=True)
class Part:
    """The rows of a weight that hold one checkpoint tensor."""

    name: str
    row_start: int
    num_rows: int


@dataclass
class Weight:
    """A parameter, ``rows`` x ``cols``; a vector has one row.  ``parts`` keeps the checkpoint's names.

    A constant of a general network is one row of a ``rows_*`` layout, and ``shape`` is its shape.  One without elements
    has one column.
    """

    name: str
    rows: int
    cols: int
    layout: Layout
    parts: tuple[Part, ...]
    segment: str = "weights"
    offset: int = 0
    num_bytes: int = 0
    shape: tuple[int, ...] = ()


@dataclass
class State:
    """The pages of one layer: owned by the runtime, never stored.

    They hold keys and values.  A page of a ``recurrent`` layer holds one state, ``head_dim`` float32 numbers of each
    head, after the last token of the page.  With ``latent_dim`` above 0 pages hold one row per token, whose first
    ``latent_dim`` numbers are the value.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    group: int
    recurrent: bool = False
    latent_dim: int = 0


@dataclass(frozen=True)
class Operand:
    """A reference to an input of a node; ``kind`` is "none", "value", "weight" or "state"."""

    kind: str
    name: str = ""


@dataclass
class Node:
    """A call of an op: inputs in the order of its schema, attributes by name, outputs by value name."""

    op: str
    name: str
    inputs: list[Operand]
    outputs: list[str]
    attrs: dict[str, AttrValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A named range of bytes in the file."""

    name: str
    offset: int
    num_bytes: int
    crc32: int


@dataclass
class Graph:
    """A captured network.  ``inputs`` are value names in the order of ``penstock.nn.Batch``.

    A graph of the kind ``GENERAL_NETWORK`` has any inputs and ``outputs``, up to 64, and no vocabulary, context, states
    or single ``output``.
    """

    network: str
    scheme: str
    vocab_size: int
    context_len: int
    symbols: list[Symbol] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    page_groups: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    output: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    kind: int = LANGUAGE_MODEL
    outputs: list[str] = field(default_factory=list)

    def copy(self) -> Graph:
        """Return a graph whose values, weights, states and nodes are copies, as ``copy.deepcopy`` does, but faster."""
        return dataclasses.replace(
            self,
            symbols=list(self.symbols),
            values={name: copy.copy(value) for name, value in self.values.items()},
            weights={name: copy.copy(weight) for name, weight in self.weights.items()},
            states={name: copy.copy(state) for name, state in self.states.items()},
            page_groups=list(self.page_groups),
            nodes=[
                Node(node.op, node.name, list(node.inputs), list(node.outputs), dict(node.attrs)) for node in self.nodes
            ],
            inputs=list(self.inputs),
            properties=dict(self.properties),
            outputs=list(self.outputs),
        )
