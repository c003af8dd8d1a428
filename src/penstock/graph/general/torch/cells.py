"""Readers of recurrent layers and of their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.torch.writer import Writer, reader


@reader("lstm.input", "penstock_network.lstm.default")
def _lstm(
    w: Writer, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Write a call for each layer; PyTorch's gates i, f, g, o become i, o, f, g."""
    h0, c0 = states
    out, (h, c) = _layers(w, "lstm", x, [h0, c0], params, has_biases, num_layers, bidirectional, batch_first, lengths)
    return out, h, c


@reader("penstock_network.gru.default")
def _gru(
    w: Writer, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write a call for each layer; PyTorch's gates r, z, n become z, r, n."""
    out, (h,) = _layers(w, "gru", x, list(states), params, has_biases, num_layers, bidirectional, batch_first, lengths)
    return out, h


_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


def _layers(
    w: Writer, op: str, x: Tensor, states: list[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    bidirectional: bool, batch_first: bool, lengths: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    if per_cell != (4 if has_biases else 2):
        raise UnsupportedError(f"{op}: expected no projections (proj_size)")
    x = w.permute(x, (1, 0, 2)) if batch_first else x
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        cells = [params[(layer * directions + d) * per_cell :][:per_cell] for d in range(directions)]
        own = [w.sliced(s, 0, layer * directions, (layer + 1) * directions) for s in states]
        outputs = _layer(w, op, x, own, cells, lengths)
        x = w.reshape(w.permute(outputs[0], (0, 2, 1, 3)), (*x.shape[:2], -1))
        for kept, state in zip(last, outputs[1:], strict=True):
            kept.append(state)
    x = w.permute(x, (1, 0, 2)) if batch_first else x
    return x, [w.concat(kept, 0) for kept in last]


def _layer(
    w: Writer, op: str, x: Tensor, states: list[Tensor], cells: list[Sequence[Tensor]], lengths: Tensor | None = None
) -> tuple[Tensor, ...]:
    order = _GATES[op]
    hidden = int(cells[0][1].shape[1])  # type: ignore[arg-type]

    def gates(tensor: Tensor) -> Any:
        if tensor.value is None:
            raise UnsupportedError(f"{op}: expected constant weights, got computed ones")
        array = np.asarray(tensor.value, np.float32)
        return np.concatenate([array[g * hidden : (g + 1) * hidden] for g in order])

    weights = [w.constant(np.stack([gates(cell[i]) for cell in cells])) for i in (0, 1)]
    bias = None
    if len(cells[0]) == 4:
        bias = w.constant(np.stack([np.concatenate([gates(cell[2]), gates(cell[3])]) for cell in cells]))
    attrs: dict[str, Any] = {"hidden": hidden, "direction": "bidirectional" if len(cells) == 2 else "forward"}
    if op == "gru":
        return w.add_many("gru", x, *weights, bias, *states, lengths, linear_before_reset=True, **attrs)
    return w.add_many("lstm", x, *weights, bias, *states, lengths, **attrs)


@reader("lstm_cell.default", "lstm_cell.input")
def _lstm_cell(w: Writer, x: Tensor, states: Sequence[Tensor], *params: Tensor | None) -> tuple[Tensor, Tensor]:
    cell = [param for param in params if param is not None]
    _, h, c = _layer(w, "lstm", w.unsqueeze(x, 0), [w.unsqueeze(state, 0) for state in states], [cell])
    return w.reshape(h, h.shape[1:]), w.reshape(c, c.shape[1:])


@reader("gru_cell.default", "gru_cell.input")
def _gru_cell(w: Writer, x: Tensor, state: Tensor, *params: Tensor | None) -> Tensor:
    cell = [param for param in params if param is not None]
    _, h = _layer(w, "gru", w.unsqueeze(x, 0), [w.unsqueeze(state, 0)], [cell])
    return w.reshape(h, h.shape[1:])


@reader("rnn_tanh_cell.default")
def _rnn_tanh_cell(w: Writer, x: Tensor, state: Tensor, *params: Tensor | None) -> Tensor:
    return w.unary("tanh", _rnn_sum(w, x, state, *params))


@reader("rnn_relu_cell.default")
def _rnn_relu_cell(w: Writer, x: Tensor, state: Tensor, *params: Tensor | None) -> Tensor:
    return w.unary("relu", _rnn_sum(w, x, state, *params))


def _rnn_sum(
    w: Writer, x: Tensor, state: Tensor, wi: Any, wh: Any, bias_i: Tensor | None = None, bias_h: Tensor | None = None
) -> Tensor:
    return w.binary("add", w.linear(x, wi, bias_i), w.linear(state, wh, bias_h))
