"""Keeps ``nn.LSTM`` and ``nn.GRU`` whole while a module is exported.

PyTorch's own ops fix the length and the batch of the example.  Those here infer shapes without looking at values.
A packed sequence keeps its padded rows and their lengths, so that no size depends on values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from penstock.errors import UnsupportedError

__all__ = ["whole_recurrent_layers"]

_RNN: Final = vars(rnn)  # of which _VF has PyTorch's own functions on packed sequences
_CHANGED: Final = threading.RLock()  # held while PyTorch's layers are those of this module
_LIBRARY: Final = torch.library.Library("penstock_network", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA: Final = (
    "(Tensor x, Tensor[] states, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first, Tensor? lengths) -> "
)
_LIBRARY.define("lstm" + _SCHEMA + "(Tensor, Tensor, Tensor)")  # type: ignore[no-untyped-call]
_LIBRARY.define("gru" + _SCHEMA + "(Tensor, Tensor)")  # type: ignore[no-untyped-call]


def _shapes(
    x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool, lengths: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return (x.new_empty((x.shape[0], x.shape[1], width)), *[torch.empty_like(state) for state in states])


for _name in ("lstm", "gru"):
    torch.library.register_fake(f"penstock_network::{_name}", _shapes, lib=_LIBRARY)


@contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """Let the layers call the ops of this module during the block."""
    with _CHANGED, _changed_layers():
        yield


@contextmanager
def _changed_layers() -> Iterator[None]:
    before = nn.LSTM.forward, nn.GRU.forward, _RNN["_VF"]
    nn.LSTM.forward = _lstm  # type: ignore[method-assign, assignment]
    nn.GRU.forward = _gru  # type: ignore[method-assign, assignment]
    _RNN["_VF"] = _PackedRows()
    try:
        yield
    finally:
        nn.LSTM.forward, nn.GRU.forward, _RNN["_VF"] = before  # type: ignore[method-assign]


class _PackedRows:
    """Stands for PyTorch's functions on packed sequences: the rows stay padded, and their lengths are kept.

    Rows that are unpacked have the length of those that were packed, where PyTorch cuts them to the longest one.
    """

    def __init__(self) -> None:
        self._lengths: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the batch sizes, which are kept with them

    def lengths(self, packed: rnn.PackedSequence) -> Tensor:
        """Return the lengths of the rows of a packed sequence."""
        return self._known(packed.batch_sizes)

    def _known(self, sizes: Tensor) -> Tensor:
        known = self._lengths.get(id(sizes))
        if known is None:
            raise UnsupportedError(
                "PackedSequence: expected one of pack_padded_sequence, got another", code="packed_sequence"
            )
        return known[1]

    def _pack_padded_sequence(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        rows = x.transpose(0, 1) if batch_first else x
        sizes = lengths.new_zeros(rows.shape[0])
        self._lengths[id(sizes)] = (sizes, lengths)
        return rows, sizes

    def _pad_packed_sequence(
        self, rows: Tensor, sizes: Tensor, batch_first: bool, value: float, total: Any
    ) -> tuple[Tensor, Tensor]:
        lengths = self._known(sizes)
        is_inside = torch.arange(rows.shape[0])[:, None] < lengths[None]
        rows = torch.where(is_inside.reshape(*is_inside.shape, *[1] * (rows.dim() - 2)), rows, value)
        if total is not sizes.shape[0] and total != sizes.shape[0]:
            rows = torch.cat([rows, rows.new_full((total - sizes.shape[0], *rows.shape[1:]), value)])
        return (rows.transpose(0, 1) if batch_first else rows), lengths


def _lstm(layer: nn.LSTM, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> Any:
    if layer.proj_size:
        raise UnsupportedError(f"nn.LSTM: expected no projection, got proj_size {layer.proj_size}")
    return _called(layer, "lstm", x, hx, 2)


def _gru(layer: nn.GRU, x: Tensor, hx: Tensor | None = None) -> Any:
    return _called(layer, "gru", x, None if hx is None else (hx,), 1)


def _called(layer: nn.RNNBase, name: str, x: Any, states: Sequence[Tensor] | None, num_states: int) -> Any:
    if isinstance(x, rnn.PackedSequence):
        return _called_packed(layer, name, x, states, num_states)
    single = x.dim() == 2
    if single:
        x = x.unsqueeze(0 if layer.batch_first else 1)
        states = None if states is None else [state.unsqueeze(1) for state in states]
    out, last = _outputs(layer, name, x, states, num_states, None)
    if single:
        out, last = out.squeeze(0 if layer.batch_first else 1), [state.squeeze(1) for state in last]
    return out, (tuple(last) if num_states == 2 else last[0])


def _called_packed(
    layer: nn.RNNBase, name: str, x: rnn.PackedSequence, states: Sequence[Tensor] | None, num_states: int
) -> Any:
    """Call a layer with rows of different lengths, in the order of the packed sequence."""
    rows, order, back = x.data, x.sorted_indices, x.unsorted_indices
    if states is not None and order is not None:
        states = [state.index_select(1, order) for state in states]
    lengths = _RNN["_VF"].lengths(x)
    rows = rows.transpose(0, 1) if layer.batch_first else rows
    out, last = _outputs(layer, name, rows, states, num_states, lengths)
    out = out.transpose(0, 1) if layer.batch_first else out
    last = last if back is None else [state.index_select(1, back) for state in last]
    return rnn.PackedSequence(out, x.batch_sizes, order, back), (tuple(last) if num_states == 2 else last[0])


def _outputs(
    layer: nn.RNNBase, name: str, x: Tensor, states: Sequence[Tensor] | None, num_states: int, lengths: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    if states is None:
        batch = x.shape[0 if layer.batch_first else 1]
        shape = (layer.num_layers * (2 if layer.bidirectional else 1), batch, layer.hidden_size)
        states = [x.new_zeros(shape) for _ in range(num_states)]
    params = [param for cell in layer.all_weights for param in cell]
    op = getattr(torch.ops.penstock_network, name)
    flags = layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first
    out, *last = op(x, list(states), params, *flags, lengths)
    return out, last
