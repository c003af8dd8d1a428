"""LSTM and GRU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.graph.general.draft import Tensor
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__: list[str] = []


def _checked(site: Site, gates: int, activations: Sequence[str]) -> tuple[int, str]:
    """Refuse what the ops do not compute; return the hidden size and the direction."""
    direction = site.str_attr("direction", "forward")
    site.expect(direction in ("forward", "reverse", "bidirectional"), "a direction")
    count = 2 if direction == "bidirectional" else 1
    given = [str(name).lower() for name in site.attr("activations", [])]
    site.require(not given or given == [*activations] * count, f"activations {given} are not supported")
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
