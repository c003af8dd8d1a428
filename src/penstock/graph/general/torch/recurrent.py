"""Keeps ``nn.LSTM`` and ``nn.GRU`` whole while a module is exported.

PyTorch's own ops fix the length and the batch of the example.  Those here infer shapes without looking at values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedError

__all__ = ["whole_recurrent_layers"]

_LIBRARY: Final = torch.library.Library("penstock_network", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA: Final = (
    "(Tensor x, Tensor[] states, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first) -> "
)
_LIBRARY.define("lstm" + _SCHEMA + "(Tensor, Tensor, Tensor)")  # type: ignore[no-untyped-call]
_LIBRARY.define("gru" + _SCHEMA + "(Tensor, Tensor)")  # type: ignore[no-untyped-call]


def _shapes(
    x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return (x.new_empty((x.shape[0], x.shape[1], width)), *[torch.empty_like(state) for state in states])


for _name in ("lstm", "gru"):
    torch.library.register_fake(f"penstock_network::{_name}", _shapes, lib=_LIBRARY)


@contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """Let the layers call the ops of this module during the block."""
    before = nn.LSTM.forward, nn.GRU.forward
    nn.LSTM.forward = _lstm  # type: ignore[method-assign, assignment]
    nn.GRU.forward = _gru  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.LSTM.forward, nn.GRU.forward = before  # type: ignore[method-assign]


def _lstm(layer: nn.LSTM, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> Any:
    if layer.proj_size:
        raise UnsupportedError(f"nn.LSTM: expected no projection, got proj_size {layer.proj_size}")
    return _called(layer, "lstm", x, hx, 2)


def _gru(layer: nn.GRU, x: Tensor, hx: Tensor | None = None) -> Any:
    return _called(layer, "gru", x, None if hx is None else (hx,), 1)


def _called(layer: nn.RNNBase, name: str, x: Tensor, states: Sequence[Tensor] | None, num_states: int) -> Any:
    if not isinstance(x, Tensor):
        raise UnsupportedError(f"{type(layer).__name__}: expected a tensor, got a packed sequence")
    single = x.dim() == 2
    if single:
        x = x.unsqueeze(0 if layer.batch_first else 1)
        states = None if states is None else [state.unsqueeze(1) for state in states]
    if states is None:
        batch = x.shape[0 if layer.batch_first else 1]
        shape = (layer.num_layers * (2 if layer.bidirectional else 1), batch, layer.hidden_size)
        states = [x.new_zeros(shape) for _ in range(num_states)]
    params = [param for cell in layer.all_weights for param in cell]
    op = getattr(torch.ops.penstock_network, name)
    flags = layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first
    out, *last = op(x, list(states), params, *flags)
    if single:
        out, last = out.squeeze(0 if layer.batch_first else 1), [state.squeeze(1) for state in last]
    return out, (tuple(last) if num_states == 2 else last[0])
