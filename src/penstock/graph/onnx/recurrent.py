"""LSTM, GRU and RNN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from penstock.graph.general.draft import Tensor
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__: list[str] = []

_MAX_STEPS: Final = 512


def _checked(site: Site, gates: int, activations: Sequence[str]) -> tuple[int, str]:
    """Refuse what the ops do not compute; return the hidden size and the direction."""
    direction = site.str_attr("direction", "forward")
    site.expect(direction in ("forward", "reverse", "bidirectional"), "a direction")
    count = 2 if direction == "bidirectional" else 1
    names = [str(name).lower() for name in site.attr("activations", [])]
    site.require(not names or names == [*activations] * count, f"activations {names} are not supported")
    clip = site.float_attr("clip", math.inf)
    site.require(not math.isfinite(clip) or clip >= 3e38, "clip is not supported")
    weight = site.x(2)
    hidden = site.fixed(weight.shape[2], "the hidden size")
    site.expect(site.int_attr("hidden_size", hidden) == hidden, f"a hidden_size of {hidden}, as the weights have it")
    site.expect(site.x(1).shape[:2] == (count, gates * hidden), f"weights of {count} directions")
    constant = site.is_plain(site.x(1), weight, site.optional(3))
    site.require(constant, "its weights must be constant")
    return hidden, direction


def _rows(site: Site, at: int) -> Tensor | None:
    """Return an initial state as [directions, B, hidden]."""
    state = site.optional(at)
    if state is None or not site.int_attr("layout"):
        return state
    return site.permute(state, (1, 0, 2))


def _finished(site: Site, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return [S, directions, B, hidden] and the states in the layout of the node."""
    y, *states = made
    if not site.int_attr("layout"):
        return (site.permute(y, (0, 1, 2, 3)), *states)
    return (site.permute(y, (2, 0, 1, 3)), *(site.permute(state, (1, 0, 2)) for state in states))


def _input(site: Site) -> Tensor:
    x = site.x(0)
    return site.permute(x, (1, 0, 2)) if site.int_attr("layout") else x


@reads("LSTM")
def _lstm(site: Site) -> tuple[Tensor, ...]:
    hidden, direction = _checked(site, 4, ("sigmoid", "tanh", "tanh"))
    site.require(not site.flag("input_forget"), "input_forget is not supported")
    peepholes = site.optional(7)
    site.require(
        peepholes is None or (site.is_plain(peepholes) and not site.raw(7).any()), "peepholes are not supported"
    )
    made = site.add(
        "lstm", _input(site), site.x(1), site.x(2), site.optional(3), _rows(site, 5), _rows(site, 6), site.optional(4),
        hidden=hidden, direction=direction,
    )  # fmt: skip
    return _finished(site, made)


@reads("GRU")
def _gru(site: Site) -> tuple[Tensor, ...]:
    hidden, direction = _checked(site, 3, ("sigmoid", "tanh"))
    made = site.add(
        "gru", _input(site), site.x(1), site.x(2), site.optional(3), _rows(site, 5), site.optional(4), hidden=hidden,
        direction=direction, linear_before_reset=site.flag("linear_before_reset"),
    )  # fmt: skip
    return _finished(site, made)


@reads("RNN")
def _rnn(site: Site) -> tuple[Tensor, ...]:
    """Write the steps one by one, as no op of the table has them; so their number is constant."""
    names = [str(name).lower() for name in site.attr("activations", [])]
    kind = names[0] if names else "tanh"
    site.require(kind in ("tanh", "relu"), f"activations {names} are not supported")
    hidden, direction = _checked(site, 1, (kind,))
    site.require(site.optional(4) is None, "sequence_lens is not supported")
    x, w, r, bias, states = _input(site), site.x(1), site.x(2), site.optional(3), _rows(site, 5)
    steps = site.fixed(x.shape[0], "the number of steps")
    site.require(0 < steps <= _MAX_STEPS, f"{steps} steps are not supported; 1 to {_MAX_STEPS} are")
    directions = ("forward", "reverse") if direction == "bidirectional" else (direction,)
    shape = (x.shape[1], hidden)
    outputs, last = [], []
    for at, way in enumerate(directions):
        own = site.add("matmul", x, site.reshape(site.cut(w, 0, at, at + 1), w.shape[1:]), transpose_b=True)
        for part in range(2 if bias is not None else 0):
            row = site.cut(site.cut(bias, 0, at, at + 1), 1, part * hidden, (part + 1) * hidden)  # type: ignore[arg-type]
            own = site.binary("add", own, row)
        back = site.reshape(site.cut(r, 0, at, at + 1), r.shape[1:])
        state = None if states is None else site.reshape(site.cut(states, 0, at, at + 1), shape)
        rows = []
        for step in range(steps) if way == "forward" else range(steps - 1, -1, -1):
            total = site.reshape(site.cut(own, 0, step, step + 1), shape)
            if state is not None:
                total = site.binary("add", total, site.add("matmul", state, back, transpose_b=True))
            state = site.unary(kind, total)
            rows.append(site.reshape(state, (1, 1, *shape)))
        outputs.append(site.concat(rows if way == "forward" else rows[::-1], 0))
        last.append(site.reshape(rows[-1], (1, *shape)))
    return _finished(site, (site.concat(outputs, 1), site.concat(last, 0)))
