"""Ops while gradients are recorded: their references, which PyTorch differentiates.

Keys and values of a step stay tensors, because pages are written in place.  So each request begins at position 0 and is
whole, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.ops.reference.attention import attend

__all__ = ["keep_steps", "recording"]

_STEPS: Final[Any] = WeakTensorKeyDictionary()
"""Keys and values of the last step by state that ``keep_steps`` got: (k, v), both [T, kv_heads, head_dim]."""
_LINEARS: Final = ("linear", "expert_linear", "head_linear")
_ATTENTIONS: Final = ("attention", "sink_attention")


def keep_steps(state: Tensor) -> None:
    """Let kv_append keep the keys and values of a step beside ``state``, in place of writing its pages."""
    _STEPS.setdefault(state, None)


def recording(
    name: str, has_state: bool, native: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the op ``name`` for PyTorch's autograd: its reference for tensors with gradients, else ``native``.

    ``has_state``: it reads or writes pages.  UnsupportedError, which names the op, if such an op has no gradients here.
    """

    def run(*tensors: Any, **attrs: Any) -> Any:
        records = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        if name == "kv_append" and tensors[2] in _STEPS:
            return _keep(*tensors, **attrs)
        if name in _ATTENTIONS and tensors[1] in _STEPS:
            return _attend_step(*tensors, **attrs)
        if records and has_state:
            raise UnsupportedError(
                f"[{name}] gradients: this op has none; freeze the layers below it, or train the network elsewhere",
                param="gradients",
            )
        weight = tensors[1] if name in _LINEARS else None
        if records or (weight is not None and weight.ndim == 2 and weight.is_floating_point()):
            return reference(*tensors, **attrs)
        return native(*tensors, **attrs)

    return run


def _keep(
    k: Tensor, v: Tensor, state: Tensor, positions: Tensor, request_starts: Tensor, page_tables: Tensor, *, group: int
) -> None:
    """Keep the keys and values of a step, in place of writing pages."""
    for start, end in pairwise(request_starts.tolist()):
        if positions[start:end].tolist() != list(range(end - start)):
            raise InvalidArgumentError(
                f"[kv_append] positions: expected whole requests from position 0 while gradients are recorded, got "
                f"{positions[start:end].tolist()[:4]}",
                param="positions",
            )
    _STEPS[state] = (k, v)


def _attend_step(
    q: Tensor,
    state: Tensor,
    positions: Tensor,
    request_starts: Tensor,
    page_tables: Tensor,
    alibi: Tensor | None,
    sinks: Tensor | None = None,
    **attrs: Any,
) -> Tensor:
    """Return attention over the keys and values that ``_keep`` kept."""
    k, v = (tensor.double().transpose(0, 1) for tensor in _STEPS[state])
    rows = []
    for start, end in pairwise(request_starts.tolist()):
        own, places = slice(start, end), positions[start:end].long()
        rows.append(attend(q[own].double(), k[:, own], v[:, own], places, (alibi, sinks), attrs))  # type: ignore[arg-type]
    return torch.cat(rows)
