"""Join functions of each element that follow one another into chains, which pass over their tensor once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.ir import DType

__all__ = ["join_chains"]

_MAX_STEPS: Final = 8
_MAX_OPERANDS: Final = 5
_MAX_TEXT: Final = 255
_TESTS: Final = ("not", "is_nan", "is_inf")
_BINARY: Final = ("add", "sub", "mul", "div", "pow", "max", "min", "fmod", "mod", "prelu")
_PARAMETERS: Final = {
    "leaky_relu": 1, "elu": 1, "celu": 1, "thresholded_relu": 1, "selu": 2, "hard_sigmoid": 2, "clip": 2,
}  # fmt: skip
"""The number of alpha and beta that a kind of ``unary`` takes."""


def join_chains(draft: Draft) -> None:
    """Rewrite the draft in place.  A chain has the same bits as its steps one by one."""
    num_readers: dict[int, int] = {}
    for call in draft.calls:
        for tensor in call.inputs:
            if tensor is not None:
                num_readers[id(tensor)] = num_readers.get(id(tensor), 0) + 1
    for tensor in draft.outputs:
        num_readers[id(tensor)] = num_readers.get(id(tensor), 0) + 1
    chains: dict[int, _Chain] = {}  # by the id of the tensor that ends them
    calls: list[DraftCall | _Chain] = []
    for call in draft.calls:
        chain = None
        for at in _chained_operands(call):
            before = chains.get(id(call.inputs[at]))
            if before is not None and num_readers[id(call.inputs[at])] == 1 and before.extend(call, at):
                chain = before
                calls.remove(before)
                break
        if chain is None:
            chain = _begin(call)
        calls.append(call if chain is None else chain)
        if chain is not None:
            chains[id(call.output)] = chain
    draft.calls = [item.as_call() if isinstance(item, _Chain) else item for item in calls]


@dataclass(eq=False)
class _Chain:
    x: Tensor
    calls: list[DraftCall] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)

    def extend(self, call: DraftCall, at: int) -> bool:
        """Add a call whose argument ``at`` is the end of the chain; return False if it has no room."""
        if len(self.steps) == _MAX_STEPS or call.output.shape != self.x.shape:
            return False
        step = _unary_step(call) if call.op == "unary" else self._binary_step(call, at)
        if step is None or len(";".join((*self.steps, step))) > _MAX_TEXT:
            return False
        self.steps.append(step)
        self.calls.append(call)
        return True

    def _binary_step(self, call: DraftCall, at: int) -> str | None:
        other = call.argument(1 - at)
        name = call.attrs["kind"] if at == 0 else f"r{call.attrs['kind']}"
        number = _number(other)
        if number is not None:
            return f"{name} {number}"
        known = [i for i, tensor in enumerate(self.operands) if tensor is other]
        if not known:
            if len(self.operands) == _MAX_OPERANDS:
                return None
            known = [len(self.operands)]
            self.operands.append(other)
        return f"{name} {'abcde'[known[0]]}"

    def as_call(self) -> DraftCall:
        """Return the call of ``chain``, or the only call as it is."""
        if len(self.calls) == 1:
            return self.calls[0]
        inputs = [self.x, *self.operands, *[None] * (_MAX_OPERANDS - len(self.operands))]
        return DraftCall("chain", self.calls[-1].name, inputs, self.calls[-1].outputs, {"steps": ";".join(self.steps)})


def _chained_operands(call: DraftCall) -> tuple[int, ...]:
    """Return the arguments that may be the end of a chain."""
    if len(call.outputs) != 1 or call.output.dtype != DType.F32:
        return ()
    if call.op == "unary":
        return () if call.attrs["kind"] in _TESTS or call.argument(0).dtype != DType.F32 else (0,)
    if call.op != "binary" or call.attrs["kind"] not in _BINARY:
        return ()
    return tuple(
        at for at in (0, 1) if call.argument(at).shape == call.output.shape and call.argument(at).value is None
    )


def _begin(call: DraftCall) -> _Chain | None:
    for at in _chained_operands(call):
        chain = _Chain(call.argument(at))
        if chain.extend(call, at):
            return chain
    return None


def _unary_step(call: DraftCall) -> str | None:
    numbers = [_text(call.attrs[name]) for name in ("alpha", "beta")[: _PARAMETERS.get(call.attrs["kind"], 0)]]
    return None if None in numbers else " ".join((call.attrs["kind"], *(n for n in numbers if n is not None)))


def _number(tensor: Tensor) -> str | None:
    value = tensor.value
    if (
        value is None
        or value.dtype != np.float32
        or value.size != 1
        or (value.ndim > 0 and value.shape != (1,) * value.ndim)
    ):
        return None
    return _text(float(value.reshape(-1)[0]))


def _text(number: float) -> str | None:
    """Return the shortest decimal that is the number in float32 too; None if the core would read another."""
    single = float(np.float32(number))
    if not np.isfinite(single) or (single != 0 and not 1e-12 < abs(single) < 1e12):
        return None
    return f"{single:.9g}"
