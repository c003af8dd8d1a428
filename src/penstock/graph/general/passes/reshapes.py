"""Remove reshapes that change nothing, merge those in a row, and move them behind functions of each element."""

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
        calls.append(call)
    draft.outputs = [current(tensor) or tensor for tensor in draft.outputs]
    draft.calls = calls
    draft.prune()
