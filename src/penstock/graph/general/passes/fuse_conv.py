"""Fold what follows a convolution or a linear layer into it: scales and shifts of channels, a residual, an activation.

A constant factor or summand of each channel, such as a batch norm, changes the weights, which are rounded to float32
once more.  A residual and an activation are computed where the result is stored, and change no bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.ir import DType

__all__ = ["FUSED_ACTIVATIONS", "fuse_convolutions"]

FUSED_ACTIVATIONS: Final = (
    *("relu", "clip", "leaky_relu", "silu", "hard_swish", "sigmoid", "hard_sigmoid"),
    *("gelu", "gelu_tanh", "tanh", "mish", "elu"),
)
"""The kinds of ``unary`` that a convolution can compute when it stores its result."""
_WEIGHTED: Final = ("conv", "conv_transpose", "linear")


def fuse_convolutions(draft: Draft) -> None:
    """Rewrite the draft in place."""
    _ConvFuser(draft).run()
    draft.prune()


class _ConvFuser:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.producers: dict[int, DraftCall] = {}
        self.num_readers: dict[int, int] = {}
        for call in draft.calls:
            for tensor in call.inputs:
                if tensor is not None:
                    self.num_readers[id(tensor)] = self.num_readers.get(id(tensor), 0) + 1
        for tensor in draft.outputs:
            self.num_readers[id(tensor)] = self.num_readers.get(id(tensor), 0) + 1

    def run(self) -> None:
        calls: list[DraftCall] = []
        for call in self.draft.calls:
            old = self._fused_into(call)
            if old is not None:
                calls.remove(old)
            calls.append(call if old is None else old)
            for tensor in calls[-1].outputs:
                self.producers[id(tensor)] = calls[-1]
        self.draft.calls = calls

    def _fused_into(self, call: DraftCall) -> DraftCall | None:
        """Return the convolution that took over ``call`` and its output; None if none can."""
        if call.op == "unary":
            conv = self._only_reader_of(call.inputs[0])
            return self._take(conv, call) if conv is not None and self._activate(conv, call) else None
        if call.op != "binary":
            return None
        for at in (0, 1):
            conv = self._only_reader_of(call.inputs[at])
            if conv is None or conv.output.shape != call.output.shape or conv.attrs.get("act", "none") != "none":
                continue
            if self._scale(conv, call, at) or self._add_residual(conv, call, at):
                return self._take(conv, call)
        return None

    def _only_reader_of(self, tensor: Tensor | None) -> DraftCall | None:
        producer = None if tensor is None else self.producers.get(id(tensor))
        if producer is None or producer.op not in _WEIGHTED or self.num_readers[id(tensor)] != 1:
            return None
        return producer

    @staticmethod
    def _take(conv: DraftCall, call: DraftCall) -> DraftCall:
        conv.outputs = call.outputs
        return conv

    @staticmethod
    def _activate(conv: DraftCall, call: DraftCall) -> bool:
        if conv.attrs.get("act") != "none" or call.attrs["kind"] not in FUSED_ACTIVATIONS:
            return False
        conv.attrs |= {"act": call.attrs["kind"], "alpha": call.attrs["alpha"], "beta": call.attrs["beta"]}
        return True

    def _scale(self, conv: DraftCall, call: DraftCall, at: int) -> bool:
        """Fold ``conv * c``, ``/ c``, ``+ c``, ``- c`` or ``c - conv`` with a constant of each channel."""
        kind, other = call.attrs["kind"], call.argument(1 - at)
        if kind not in ("add", "sub", "mul", "div") or (kind == "div" and at == 1):
            return False
        if len(conv.inputs) > 3 and conv.inputs[3] is not None:
            return False
        channels = conv.output.shape[-1]
        if not isinstance(channels, int):
            return False
        vector = _channel_vector(other, channels, call.output.rank)
        if vector is not None and not (np.all(np.isfinite(vector)) and (kind != "div" or np.all(vector))):
            return False  # weights that are not finite would spread where the source has none
        weight = conv.argument(1)
        bias = conv.inputs[2]
        if vector is None or weight.value is None or (bias is not None and bias.value is None):
            return False
        factors = np.ones(channels)
        shift = np.zeros(channels)
        if kind in ("mul", "div"):
            factors = vector if kind == "mul" else 1.0 / vector
        elif kind == "add" or at == 0:
            shift = vector if kind == "add" else -vector
        else:
            factors, shift = -factors, vector
        old_bias = np.zeros(channels) if bias is None else _doubles(bias.value)
        if kind in ("mul", "div") or at == 1:
            shaped = factors.reshape(-1, *[1] * (weight.rank - 1))
            conv.inputs[1] = self._constant(weight.name, _doubles(weight.value) * shaped)
        if bias is not None or np.any(shift):
            conv.inputs[2] = self._constant(f"{weight.name}.bias", (old_bias * factors + shift).reshape(-1))
        return True

    def _constant(self, name: str, value: NDArray[Any]) -> Tensor:
        array = value.astype(np.float32)
        return Tensor(self.draft.free_name(name), DType.F32, array.shape, array)

    @staticmethod
    def _add_residual(conv: DraftCall, call: DraftCall, at: int) -> bool:
        other = call.argument(1 - at)
        if call.attrs["kind"] != "add" or conv.op != "conv" or conv.inputs[3] is not None:
            return False
        if other.shape != conv.output.shape or other.value is not None:
            return False
        conv.inputs[3] = other
        return True


def _doubles(value: Any) -> NDArray[np.float64]:
    return np.asarray(value, np.float64)


def _channel_vector(tensor: Tensor, channels: int, rank: int) -> NDArray[np.float64] | None:
    """Return a constant as one number for each channel of the last axis; None if it is none."""
    value = tensor.value
    if value is None or value.dtype == object or value.ndim > rank:
        return None
    if value.size == 1:
        return np.full(channels, float(value.reshape(-1)[0]))
    if value.size != channels or value.shape[-1] != channels:
        return None
    return value.reshape(channels).astype(np.float64)
