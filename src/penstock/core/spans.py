"""Profiling of a step: the spans of a program's last run, and what each node of the graph reads and writes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.core.library import NodeInfoStruct, check, library, sized

if TYPE_CHECKING:
    from penstock.core.native import CoreProgram, Model
    from penstock.core.predict import NetworkProgram

__all__ = ["SPAN", "SYMBOLS", "NodeInfo", "Size", "last_spans", "node_infos", "set_profiling"]

SPAN = np.dtype(
    [
        ("node", np.int32),
        ("phase", np.int32),
        ("thread", np.int32),
        ("reserved", np.int32),
        ("arrive_ns", np.int64),
        ("begin_ns", np.int64),
        ("end_ns", np.int64),
    ]
)
"""``ps_span``: one phase of a node on one thread; node -1 is the whole step.  The thread waited for the others from
``arrive_ns`` to ``begin_ns``."""

SYMBOLS = ("T", "B", "P", "R")
"""The sizes of a step: tokens, requests, width of the page tables, rows of logits."""


@dataclass(frozen=True)
class Size:
    """``factor * size + offset``; ``symbol`` is one of SYMBOLS, or None for the constant ``offset``."""

    symbol: str | None
    factor: int
    offset: int

    def of(self, **sizes: int) -> int:
        """Return the value in a step with these sizes, given by symbol."""
        return self.offset if self.symbol is None else self.factor * sizes[self.symbol] + self.offset


@dataclass(frozen=True)
class NodeInfo:
    """A node of the graph.

    ``output`` and ``shape`` describe its first output ("" and () without one).  ``weight_bytes`` is what one step reads
    of its weights; of an embedding table that is one row.  ``rows``, ``cols`` and ``layout`` (a ``ps_layout``) describe
    its first weight, 0 without one; ``num_kv_heads``, ``head_dim`` and ``window`` describe its state.  ``scheme`` is
    set for a linear, else "".  A node with ``wanted_only`` runs over only the tokens whose logits are wanted, in a step
    where these are at most half of all tokens.
    """

    op: str
    name: str
    output: str
    shape: tuple[Size, ...]
    scheme: str
    weight_bytes: int
    rows: int
    cols: int
    layout: int
    num_kv_heads: int
    head_dim: int
    window: int
    wanted_only: bool


def node_infos(model: Model) -> list[NodeInfo]:
    """Return every node in the order of execution.  The ``node`` of a span is an index into this list."""
    return [_node_info(model, index) for index in range(model.info.num_nodes)]


def _node_info(model: Model, index: int) -> NodeInfo:
    out = sized(NodeInfoStruct)
    check(library().ps_model_node(model.handle, index, ctypes.byref(out)))
    shape = tuple(
        Size(None if dim.symbol < 0 else SYMBOLS[dim.symbol], dim.factor, dim.offset)
        for dim in out.output_dims[: out.output_rank]
    )
    return NodeInfo(
        op=out.op.decode(),
        name=out.name.decode(),
        output=out.output.decode(),
        shape=shape,
        scheme=out.scheme.decode(),
        weight_bytes=out.weight_bytes,
        rows=out.rows,
        cols=out.cols,
        layout=out.layout,
        num_kv_heads=out.num_kv_heads,
        head_dim=out.head_dim,
        window=out.window,
        wanted_only=bool(out.kept),
    )


def set_profiling(program: CoreProgram | NetworkProgram, on: bool) -> None:
    """Turn the recording of spans in later runs on or off.  Raises OutOfMemoryError when there is no room for them."""
    check(library().ps_program_profile(program.handle, int(on)))


def last_spans(program: CoreProgram | NetworkProgram) -> npt.NDArray[np.void]:
    """Return a copy of the last run's spans, dtype SPAN: the whole step first, then thread by thread in order of time.

    The result is empty when no run has recorded spans.
    """
    data, count = ctypes.c_void_p(), ctypes.c_int64()
    check(library().ps_program_profile_spans(program.handle, ctypes.byref(data), ctypes.byref(count)))
    if data.value is None or count.value == 0:
        return np.zeros(0, SPAN)
    return np.frombuffer(ctypes.string_at(data.value, count.value * SPAN.itemsize), SPAN)
