"""Recognise ops that exporters write in pieces: activations, layer norm, attention, linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.general.sizes import product

__all__ = ["recognise"]


def recognise(draft: Draft) -> None:
    """Rewrite the draft in place: each pattern becomes the op that computes it."""
    matcher = _Matcher(draft)
    calls: list[DraftCall] = []
    for call in draft.calls:
        matcher.declare(call)
        new = None
        for rule in _RULES.get(call.op, ()):
            new = rule(matcher, call)
            if new is not None:
                break
        made = [call] if new is None else new
        for item in made:
            matcher.declare(item)
        calls += made
    draft.calls = calls
    draft.prune()


class _Matcher:
    """The producers of tensors, and comparisons with constants."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.producers: dict[int, DraftCall] = {}

    def declare(self, call: DraftCall) -> None:
        for tensor in call.outputs:
            self.producers[id(tensor)] = call

    def call_of(self, tensor: Tensor | None, op: str, kind: str | None = None) -> DraftCall | None:
        """Return the call that makes ``tensor`` if it is of this op and kind."""
        call = None if tensor is None else self.producers.get(id(tensor))
        if call is None or call.op != op or (kind is not None and call.attrs["kind"] != kind):
            return None
        return call

    def operands(self, call: DraftCall) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return both orders of the operands of a commutative call."""
        a, b = call.argument(0), call.argument(1)
        return ((a, b), (b, a))

    def with_number(self, tensor: Tensor | None, kind: str, number: float) -> Tensor | None:
        """Return x of ``x <kind> number``; of add and mul in either order."""
        call = self.call_of(tensor, "binary", kind)
        if call is None:
            return None
        orders = self.operands(call) if kind in ("add", "mul") else self.operands(call)[:1]
        return next((x for x, c in orders if is_number(c, number)), None)

    def scaled(self, tensor: Tensor | None, factor: float) -> Tensor | None:
        """Return x of ``x * factor`` or ``x / (1 / factor)``."""
        return self.with_number(tensor, "mul", factor) or self.with_number(tensor, "div", 1 / factor)


def is_number(tensor: Tensor, number: float) -> bool:
    """Return True for a constant whose only element is ``number``, within float32's precision."""
    value = tensor.value
    if value is None or value.dtype == object or value.size != 1 or value.dtype.kind != "f":
        return False
    return abs(float(value.reshape(-1)[0]) - number) <= 2e-6 * max(abs(number), 1e-30)


def _unary(call: DraftCall, x: Tensor, kind: str, alpha: float = 0.0, beta: float = 0.0) -> list[DraftCall] | None:
    if x.shape != call.output.shape:
        return None
    return [DraftCall("unary", call.name, [x], call.outputs, {"kind": kind, "alpha": alpha, "beta": beta})]


def _silu(m: _Matcher, call: DraftCall) -> list[DraftCall] | None:
    """x * sigmoid(x), x * hard_sigmoid(x), x * tanh(softplus(x))."""
    if call.attrs["kind"] != "mul":
        return None
    for x, gate in m.operands(call):
        sigmoid = m.call_of(gate, "unary", "sigmoid")
        if sigmoid is not None and sigmoid.argument(0) is x:
            return _unary(call, x, "silu")
        hard = m.call_of(gate, "unary", "hard_sigmoid")
        if hard is not None and hard.argument(0) is x and _is_sixth(hard.attrs["alpha"]) and hard.attrs["beta"] == 0.5:
            return _unary(call, x, "hard_swish")
        tanh = m.call_of(gate, "unary", "tanh")
        soft = None if tanh is None else m.call_of(tanh.argument(0), "unary", "softplus")
        if soft is not None and soft.argument(0) is x:
            return _unary(call, x, "mish")
    return None


def _is_sixth(number: float) -> bool:
    return abs(number - 1 / 6) < 1e-6


def _hinge(m: _Matcher, tensor: Tensor | None) -> Tensor | None:
    """Return x of clip(x + 3, 0, 6)."""
    clip = m.call_of(tensor, "unary", "clip")
    if clip is None or clip.attrs["alpha"] != 0.0 or clip.attrs["beta"] != 6.0:
        return None
    return m.with_number(clip.argument(0), "add", 3.0)


def _hard_swish(m: _Matcher, call: DraftCall) -> list[DraftCall] | None:
    """x * clip(x + 3, 0, 6) / 6, in any order of the product and the quotient."""
    for x, gate in m.operands(call) if call.attrs["kind"] == "mul" else ():
        if _hinge(m, m.scaled(gate, 1 / 6)) is x:
            return _unary(call, x, "hard_swish")
    whole = m.scaled(call.output, 1 / 6)  # the call itself divides
    product = m.call_of(whole, "binary", "mul")
    for x, gate in () if product is None else m.operands(product):
        if _hinge(m, gate) is x:
            return _unary(call, x, "hard_swish")
    return None


def _hard_sigmoid(m: _Matcher, call: DraftCall) -> list[DraftCall] | None:
    """clip(x + 3, 0, 6) / 6."""
    x = _hinge(m, m.scaled(call.output, 1 / 6))
    return None if x is None else _unary(call, x, "hard_sigmoid", 1 / 6, 0.5)


def _gelu(m: _Matcher, call: DraftCall) -> list[DraftCall] | None:
    """x * (1 + erf(x / sqrt 2)) / 2, in any order."""
    if call.attrs["kind"] != "mul":
        return None
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for a, b in m.operands(call):
        product = m.call_of(a, "binary", "mul") if is_number(b, 0.5) else None
        pairs += () if product is None else m.operands(product)
        pairs += [(m.scaled(a, 0.5), b), (a, m.scaled(b, 0.5))]
    for x, gate in pairs:
        if x is not None and _erf_gate(m, gate) is x:
            return _unary(call, x, "gelu")
    return None


def _erf_gate(m: _Matcher, tensor: Tensor | None) -> Tensor | None:
    """Return x of 1 + erf(x / sqrt 2)."""
    erf = m.call_of(m.with_number(tensor, "add", 1.0), "unary", "erf")
    return None if erf is None else m.scaled(erf.argument(0), 2**-0.5)


def _layer_norm(m: _Matcher, call: DraftCall) -> list[DraftCall] | None:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over the last axis."""
    if call.attrs["kind"] != "add":
        return None
    for scaled, bias in m.operands(call):
        product = m.call_of(scaled, "binary", "mul")
        for normal, weight in () if product is None else m.operands(product):
            if not (_is_vector(weight) and _is_vector(bias)):
                continue
            parts = _normalised(m, normal)
            if parts is not None:
                return _norm_calls(m.draft, call, parts[0], weight, bias, parts[1])
    return None


def _is_vector(tensor: Tensor) -> bool:
    value = tensor.value
    return value is not None and value.dtype == np.float32 and value.ndim >= 1 and value.size == value.shape[-1]


def _normalised(m: _Matcher, tensor: Tensor) -> tuple[Tensor, float] | None:
    """Return x and eps of (x - mean) / sqrt(variance + eps)."""
    quotient = m.call_of(tensor, "binary", "div")
    if quotient is None:
        return None
    centred, deviation = quotient.argument(0), m.call_of(quotient.argument(1), "unary", "sqrt")
    shifted = None if deviation is None else m.call_of(deviation.argument(0), "binary", "add")
    difference = m.call_of(centred, "binary", "sub")
    if shifted is None or difference is None:
        return None
    x = difference.argument(0)
    if _mean(m, difference.argument(1)) is not x:
        return None
    for variance, eps in m.operands(shifted):
        mean = _mean(m, variance)
        square = None if mean is None else m.producers.get(id(mean))
        if eps.value is not None and eps.value.size == 1 and square is not None and _is_square_of(square, centred):
            return x, float(eps.value.reshape(-1)[0])
    return None


def _mean(m: _Matcher, tensor: Tensor) -> Tensor | None:
    """Return x of its mean over the last axis, which is kept."""
    call = m.call_of(tensor, "reduce", "mean")
    if call is None or not call.attrs["keep"] or call.attrs["axes"] != (call.argument(0).rank - 1,):
        return None
    return call.argument(0)


def _is_square_of(call: DraftCall, x: Tensor) -> bool:
    if call.op == "unary":
        return call.attrs["kind"] == "square" and call.argument(0) is x
    if call.op != "binary" or call.argument(0) is not x:
        return False
    kind, other = call.attrs["kind"], call.argument(1)
    return (kind == "pow" and is_number(other, 2.0)) or (kind == "mul" and other is x)


def _norm_calls(
    draft: Draft, call: DraftCall, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> list[DraftCall] | None:
    out, width = call.output, x.shape[-1]
    if not 0 <= eps <= 1:  # which layer_norm requires
        return None
    if x.shape != out.shape or not isinstance(width, int) or weight.shape[-1] != width or bias.shape[-1] != width:
        return None
    rows = (product(x.shape[:-1]), width)
    vectors = []
    for vector in (weight, bias):
        value = np.ascontiguousarray(np.asarray(vector.value).reshape(-1))
        vectors.append(Tensor(draft.free_name(vector.name), vector.dtype, value.shape, value))
    flat = Tensor(draft.free_name(f"{out.name}.rows"), x.dtype, rows)
    normal = Tensor(draft.free_name(f"{out.name}.norm"), x.dtype, rows)
    return [
        DraftCall("reshape", call.name, [x], [flat], {"sizes": rows}),
        DraftCall("layer_norm", call.name, [flat, *vectors], [normal], {"eps": eps}),
        DraftCall("reshape", call.name, [normal], [out], {"sizes": out.shape}),
    ]


def _attention(m: _Matcher, call: DraftCall) -> list[DraftCall] | None:
    """softmax(q k^T * scale + mask) v of rank 4."""
    weights = call.argument(0)
    softmax = m.call_of(_behind_nan_guard(m, weights), "softmax")
    if (
        softmax is None
        or weights.rank != 4
        or call.output.rank != 4
        or softmax.attrs["log"]
        or softmax.attrs["axis"] != 3
        or call.argument(1).rank != 4
    ):
        return None
    if call.attrs["transpose_a"] or call.attrs["transpose_b"] or call.attrs["scale"] != 1.0:
        return None
    scores, mask = softmax.argument(0), None
    added = m.call_of(scores, "binary", "add")
    if added is not None:
        for a, b in m.operands(added):
            if _scaled_product(m, a) is not None and a.shape == scores.shape:
                scores, mask = a, b
                break
    product = _scaled_product(m, scores)
    if product is None:
        return None
    q, k, is_transposed, scale = product
    v = call.argument(1)
    turns: list[DraftCall] = []
    if q.rank != 4 or k.rank != 4:
        return None
    if not is_transposed:
        k, turns = _transposed(m, k, call.name)
    if v.rank != 4 or q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        return None
    attrs = {"scale": scale, "causal": False, "softcap": 0.0}
    return [*turns, DraftCall("sdpa", call.name, [q, k, v, mask], call.outputs, attrs)]


def _behind_nan_guard(m: _Matcher, tensor: Tensor) -> Tensor:
    """Return p of where(is_nan(p), 0, p), which exporters write for rows that are masked altogether."""
    guard = m.call_of(tensor, "where")
    if guard is None or not is_number(guard.argument(1), 0.0):
        return tensor
    test = m.call_of(guard.argument(0), "unary", "is_nan")
    return guard.argument(2) if test is not None and test.argument(0) is guard.argument(2) else tensor


def _scaled_product(m: _Matcher, tensor: Tensor | None) -> tuple[Tensor, Tensor, bool, float] | None:
    """Return a, b, whether b is transposed, and the scale of a product whose factors stand before or behind it."""
    scale = 1.0
    call = None if tensor is None else m.producers.get(id(tensor))
    if call is not None and call.op == "binary":
        tensor, scale = _split_factor(m, tensor)
        call = None if tensor is None else m.producers.get(id(tensor))
    if call is None or call.op != "matmul" or call.attrs["transpose_a"]:
        return None
    q, first = _split_factor(m, call.argument(0))
    k, second = _split_factor(m, call.argument(1))
    scale *= first * second * call.attrs["scale"]
    if q is None or k is None:
        return None
    return q, k, call.attrs["transpose_b"], scale


def _transposed(m: _Matcher, k: Tensor, name: str) -> tuple[Tensor, list[DraftCall]]:
    """Return k with its last two axes exchanged, and the call that does it unless another has done it."""
    turned = m.call_of(k, "permute")
    order = (0, 1, 3, 2)
    if turned is not None:
        order = tuple(turned.attrs["order"][axis] for axis in order)
        k = turned.argument(0)
    if order == (0, 1, 2, 3):
        return k, []
    out = Tensor(m.draft.free_name(f"{k.name}.keys"), k.dtype, tuple(k.shape[axis] for axis in order))
    return out, [DraftCall("permute", name, [k], [out], {"order": order})]


def _split_factor(m: _Matcher, tensor: Tensor | None) -> tuple[Tensor | None, float]:
    """Return x and c of ``x * c`` or ``x / c``; the tensor itself and 1 if it is neither."""
    call = None if tensor is None else m.producers.get(id(tensor))
    if call is None or call.op != "binary" or call.attrs["kind"] not in ("mul", "div"):
        return tensor, 1.0
    for x, c in m.operands(call) if call.attrs["kind"] == "mul" else m.operands(call)[:1]:
        if c.value is not None and c.value.dtype == np.float32 and c.value.size == 1 and x.value is None:
            number = float(c.value.reshape(-1)[0])
            if number != 0.0:
                return x, number if call.attrs["kind"] == "mul" else 1.0 / number
    return tensor, 1.0


_Rule = Callable[[_Matcher, DraftCall], "list[DraftCall] | None"]
_RULES: Final[dict[str, tuple[_Rule, ...]]] = {
    "binary": (_silu, _hard_swish, _hard_sigmoid, _gelu, _layer_norm),
    "matmul": (_attention,),
}
