"""Remove reshapes that change nothing, merge those in a row, and move them behind functions of each element.

Those are unary ones, and ones of an element and a constant of its channel.
"""

from __future__ import annotations

from penstock.graph.general.draft import Draft, DraftCall, Tensor

__all__ = ["merge_reshapes"]


def merge_reshapes(draft: Draft) -> None:
    """Rewrite the draft in place."""
    sources: dict[int, Tensor] = {}
    new: dict[int, Tensor] = {}
    calls: list[DraftCall] = []

    def current(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else new.get(id(tensor), tensor)

    for call in draft.calls:
        call.inputs = [current(tensor) for tensor in call.inputs]
        if call.op == "reshape":
            x, out = call.argument(0), call.output
            x = sources.get(id(x), x)
            if x.shape == out.shape:
                new[id(out)] = x
                continue
            call.inputs = [x]
            sources[id(out)] = x
        elif call.op in ("unary", "cast") and id(call.inputs[0]) in sources:
            x, out = sources[id(call.inputs[0])], call.output
            inner = Tensor(draft.free_name(out.name), out.dtype, x.shape)
            calls.append(DraftCall(call.op, call.name, [x], [inner], call.attrs))
            call = DraftCall("reshape", call.name, [inner], [out], {"sizes": out.shape})
            sources[id(out)] = inner
        elif (at := _channelwise_operand(call, sources)) is not None:
            x, out, other = sources[id(call.inputs[at])], call.output, call.argument(1 - at)
            inner = Tensor(draft.free_name(out.name), out.dtype, x.shape)
            vector = _flat(draft, other)
            calls.append(DraftCall("binary", call.name, [x, vector] if at == 0 else [vector, x], [inner], call.attrs))
            call = DraftCall("reshape", call.name, [inner], [out], {"sizes": out.shape})
            sources[id(out)] = inner
        calls.append(call)
    draft.outputs = [current(tensor) or tensor for tensor in draft.outputs]
    draft.calls = calls
    draft.prune()


def _channelwise_operand(call: DraftCall, sources: dict[int, Tensor]) -> int | None:
    """Return the reshaped argument of ``x <kind> constant`` with a number of each channel of the last axis.

    The reshape keeps that axis, so that a bias behind the reshape of a linear layer's rows reaches the layer.
    """
    if call.op != "binary":
        return None
    for at in (0, 1):
        x, other = call.argument(at), call.argument(1 - at)
        source = sources.get(id(x))
        if source is None or other.value is None or other.value.dtype == object or x.shape != call.output.shape:
            continue
        if not source.shape or not x.shape or source.shape[-1] != x.shape[-1]:
            continue
        if other.value.size == 1 or (other.value.size == x.shape[-1] and other.value.shape[-1] == x.shape[-1]):
            return at
    return None


def _flat(draft: Draft, tensor: Tensor) -> Tensor:
    """Return a constant with a number of each channel as a vector."""
    if tensor.rank < 2 or tensor.value is None:
        return tensor
    vector = tensor.value.reshape(-1)
    return Tensor(draft.free_name(tensor.name), tensor.dtype, vector.shape, vector)
