"""The shape rule of every op: from the shapes of its inputs to those of its outputs, or to an error.

One rule serves meta tensors in eager mode, capture and the tests; the native core infers the shapes again.  Sizes are
ints or symbolic ints.  A rule checks the sizes that a network fixes.  It checks the sizes that a step decides (tokens,
requests, rows) only where two arguments must agree.  This module works on shapes and does not import tensors.

A weight's shape is checked when it is logical, that is [rows, cols] or [n]; the core checks packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

from penstock.errors import InvalidArgumentError

__all__ = ["OUTPUT_DTYPES", "infer_shapes"]

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | None]
Attrs = Mapping[str, Any]

_SMALLEST: Final = 2.0**-126  # the smallest normal float32, and the largest
_LARGEST: Final = (2 - 2.0**-23) * 2.0**127
ROUTE_SCORES: Final = ("softmax", "softmax_of_chosen", "sigmoid")
ATTENTION_KEYS: Final = ("all", "prefix", "rest", "span")
ROUTE_GROUP_RULES: Final = ("max", "best_two")

# Outputs are float32 except these.
OUTPUT_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "argmax": ("int32",),
    "topk": ("float32", "int32"),
    "route": ("float32", "int32"),
    "prefix_lengths": ("int32",),
    "prefix_positions": ("int32",),
}


def infer_shapes(op: str, shapes: Mapping[str, Sequence[int] | None], attrs: Attrs) -> list[Shape]:
    """Return the shapes of the outputs of ``op``, given the shapes of its tensor arguments by name and its attributes.

    Raises InvalidArgumentError ("[op] argument: expected ..., got ...").
    """
    tensor_shapes = {name: None if shape is None else tuple(shape) for name, shape in shapes.items()}
    return _RULES[op](tensor_shapes, attrs) if op in _RULES else _elementwise(op, tensor_shapes)


def _fail(op: str, argument: str, expected: str, actual: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"[{op}] {argument}: expected {expected}, got {actual}", param=argument)


def _tensor(op: str, shapes: Shapes, name: str, *ranks: int) -> Shape:
    shape = shapes[name]
    if shape is None or len(shape) not in ranks:
        expected = " or ".join(str(rank) for rank in ranks)
        raise _fail(op, name, f"{expected} dimensions", "none" if shape is None else list(shape))
    return shape


def _vector(op: str, shapes: Shapes, name: str, length: int) -> None:
    shape = shapes[name]
    if shape is not None and shape != (length,):
        raise _fail(op, name, f"shape [{length}]", list(shape))


def _same(op: str, shapes: Shapes, first: str, second: str, *ranks: int) -> Shape:
    shape = _tensor(op, shapes, first, *ranks)
    other = _tensor(op, shapes, second, *ranks)
    if len(shape) != len(other) or any(a != b for a, b in zip(shape, other, strict=True)):
        raise _fail(op, second, f"the shape of {first}, {list(shape)}", list(other))
    return shape


def _step(op: str, shapes: Shapes, num_tokens: int, attrs: Attrs) -> None:
    positions = _tensor(op, shapes, "positions", 1)
    if positions[0] != num_tokens:
        raise _fail(op, "positions", f"shape [{num_tokens}], one position per token", list(positions))
    _tensor(op, shapes, "request_starts", 1)
    groups = _tensor(op, shapes, "page_tables", 3)[0]
    if not 0 <= attrs["group"] < groups:
        raise _fail(op, "group", f"a page group below {groups}", attrs["group"])


def _embedding(shapes: Shapes, attrs: Attrs, op: str = "embedding") -> list[Shape]:
    ids = _tensor(op, shapes, "ids", 1)
    weight = _tensor(op, shapes, "weight", 2, 3, 4)
    if attrs["dim"] < 1:
        raise _fail(op, "dim", "at least 1", attrs["dim"])
    if len(weight) == 2 and weight[1] < attrs["dim"]:
        raise _fail(op, "weight", f"rows of {attrs['dim']}", list(weight))
    return [(ids[0], attrs["dim"])]


def _starts(op: str, attrs: Attrs) -> list[int]:
    """Return where the part of each rank starts, and the whole size at the end."""
    text = attrs["starts"]
    starts = [int(number) if number.isascii() and number.isdecimal() else -1 for number in text.split("|")]
    if len(starts) < 2 or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise _fail(op, "starts", "ascending numbers from 0, as 0|64|128", repr(text))
    if not 0 <= attrs["rank"] < len(starts) - 1:
        raise _fail(op, "rank", f"0 to {len(starts) - 2}", attrs["rank"])
    return starts


def _all_gather(shapes: Shapes, attrs: Attrs, op: str = "all_gather") -> list[Shape]:
    x, starts = _tensor(op, shapes, "x", 2, 3), _starts(op, attrs)
    num_columns = starts[attrs["rank"] + 1] - starts[attrs["rank"]]
    if x[-1] != num_columns:
        raise _fail(op, "x", f"rows of {num_columns}, the columns of its rank", list(x))
    return [(*x[:-1], starts[-1])]


def _all_gather_rounded(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    if attrs["bits"] not in (8, 16):
        raise _fail("all_gather_rounded", "bits", "8 or 16", attrs["bits"])
    return _all_gather(shapes, attrs, "all_gather_rounded")


def _group(op: str, attrs: Attrs, peer: str | None = None) -> None:
    world = attrs["world"]
    if not 1 <= world <= 64:
        raise _fail(op, "world", "1 to 64", world)
    for name in ("rank", peer):
        if name is not None and not 0 <= attrs[name] < world:
            raise _fail(op, name, f"0 to {world - 1}", attrs[name])


def _broadcast(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _group("broadcast", attrs, "root")
    return [_tensor("broadcast", shapes, "x", 2)]


def _send(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _group("send", attrs, "target")
    return [_tensor("send", shapes, "x", 2)]


def _recv(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _group("recv", attrs, "source")
    rows, width = _tensor("recv", shapes, "rows", 1, 2), attrs["width"]
    if width < 1:
        raise _fail("recv", "width", "at least 1", width)
    if attrs["source"] == attrs["rank"] and rows[1:] != (width,):
        raise _fail("recv", "rows", f"rows of {width} from the rank itself", list(rows))
    return [(rows[0], width)]


def _barrier(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _group("barrier", attrs)
    return [_tensor("barrier", shapes, "x", 2)]


def _sharded_embedding(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _starts("sharded_embedding", attrs)
    return _embedding(shapes, attrs, "sharded_embedding")


def _linear(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x = _tensor("linear", shapes, "x", 2)
    weight = _tensor("linear", shapes, "weight", 2, 3, 4)
    rows = attrs["out_features"]
    if rows < 1:
        raise _fail("linear", "out_features", "at least 1", rows)
    logical = len(weight) == 2 and attrs["scheme"] in ("f32", "f16", "bf16")
    if logical and weight != (rows, x[1]):
        raise _fail("linear", "weight", f"shape [{rows}, {x[1]}]", list(weight))
    _vector("linear", shapes, "bias", rows)
    return [(x[0], rows)]


def _norm(op: str, shapes: Shapes, attrs: Attrs) -> Shape:
    x = _tensor(op, shapes, "x", 2, 3)
    _vector(op, shapes, "weight", x[-1])
    if not attrs["eps"] >= 0.0:
        raise _fail(op, "eps", "at least 0", attrs["eps"])
    return x


def _rms_norm(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x, weight = _tensor("rms_norm", shapes, "x", 2, 3), _tensor("rms_norm", shapes, "weight", 1)
    by_group = len(x) == 3 and weight == (x[1] * x[2],)
    return [x if by_group and attrs["eps"] >= 0.0 else _norm("rms_norm", shapes, attrs)]


def _add_rms_norm(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _same("add_rms_norm", shapes, "x", "residual", 2)
    x = _norm("add_rms_norm", shapes, attrs)
    return [x, x]


def _layer_norm(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x = _norm("layer_norm", shapes, attrs)
    _vector("layer_norm", shapes, "bias", x[-1])
    return [x]


def _rotary_embedding(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    positions = _tensor("rotary_embedding", shapes, "positions", 1)
    inv_freq = _tensor("rotary_embedding", shapes, "inv_freq", 1)
    return [(positions[0], 2 * inv_freq[0])]


def _rope(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x = _tensor("rope", shapes, "x", 3)
    cos_sin = _tensor("rope", shapes, "cos_sin", 2)
    if cos_sin[0] != x[0] or cos_sin[1] % 2 or not 0 < cos_sin[1] <= x[2]:
        raise _fail("rope", "cos_sin", f"shape [{x[0]}, an even number up to {x[2]}]", list(cos_sin))
    return [x]


def _kv_append(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    k = _same("kv_append", shapes, "k", "v", 3)
    _tensor("kv_append", shapes, "state", 2)
    _step("kv_append", shapes, k[0], attrs)
    return []


def _latent_append(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    latent, rope = _tensor("latent_append", shapes, "latent", 2), _tensor("latent_append", shapes, "rope", 2)
    if rope[0] != latent[0]:
        raise _fail("latent_append", "rope", f"a row for each row of latent, {list(latent)}", list(rope))
    _tensor("latent_append", shapes, "state", 2)
    _step("latent_append", shapes, latent[0], attrs)
    return []


def _latent_attention(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    q, rope = _tensor("latent_attention", shapes, "q", 3), _tensor("latent_attention", shapes, "q_rope", 3)
    if rope[:2] != q[:2]:
        raise _fail("latent_attention", "q_rope", f"the rows and heads of q, {list(q)}", list(rope))
    return _attend("latent_attention", shapes, q, attrs)


def _attention(shapes: Shapes, attrs: Attrs, op: str = "attention") -> list[Shape]:
    q = _tensor(op, shapes, "q", 3)
    _vector(op, shapes, "alibi", q[1])
    return _attend(op, shapes, q, attrs)


def _attend(op: str, shapes: Shapes, q: Shape, attrs: Attrs) -> list[Shape]:
    _tensor(op, shapes, "state", 2)
    _step(op, shapes, q[0], attrs)
    if attrs["window"] < 0:
        raise _fail(op, "window", "at least 0", attrs["window"])
    if not attrs["softcap"] >= 0.0:
        raise _fail(op, "softcap", "at least 0", attrs["softcap"])
    return [q]


def _sink_attention(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    q = _attention(shapes, attrs, "sink_attention")[0]
    _vector("sink_attention", shapes, "sinks", q[1])
    return [q]


def _relative_attention(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    op, keys, bias, prefix = "relative_attention", attrs["keys"], shapes["bias"], shapes["prefix"]
    q = _attention(shapes, attrs, op)[0]
    _vector(op, shapes, "sinks", q[1])
    if bias is not None and (len(bias) != 2 or bias[0] != q[1] or bias[1] % 2 == 0):
        raise _fail(op, "bias", f"shape [{q[1]}, an odd number]", list(bias))
    if prefix is not None and prefix != (q[0],):
        raise _fail(op, "prefix", f"shape [{q[0]}]", list(prefix))
    expected = ATTENTION_KEYS[:1] if prefix is None else ATTENTION_KEYS[1:]
    if keys not in expected:
        raise _fail(op, "keys", " or ".join(expected) + (" without a prefix" if prefix is None else ""), keys)
    if prefix is not None and attrs["window"]:
        raise _fail(op, "window", "0 with a prefix", attrs["window"])
    return [q]


def _disentangled_attention(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    op, buckets = "disentangled_attention", shapes["buckets"]
    q = _tensor(op, shapes, "q", 3)
    tables = {name: shape for name in ("c2p", "p2c") if (shape := shapes[name]) is not None}
    if not tables:
        raise _fail(op, "c2p", "this tensor, or p2c, or both", "none")
    columns = next(iter(tables.values()))[-1]
    for name, shape in tables.items():
        if shape != (*q[:2], columns):
            raise _fail(op, name, f"shape [{q[0]}, {q[1]}, {columns}]", list(shape))
    if buckets is None or len(buckets) != 1 or buckets[0] % 2 == 0:
        raise _fail(op, "buckets", "shape [an odd number]", list(buckets or ()))
    for name in ("causal", "softcap"):
        if attrs[name]:
            raise _fail(op, name, "false" if name == "causal" else "0", attrs[name])
    return _attend(op, shapes, q, attrs)


def _prefix_lengths(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    ids = _tensor("prefix_lengths", shapes, "ids", 1)
    _tensor("prefix_lengths", shapes, "state", 2)
    _step("prefix_lengths", shapes, ids[0], attrs)
    if attrs["token"] < 0:
        raise _fail("prefix_lengths", "token", "at least 0", attrs["token"])
    return [ids]


def _prefix_positions(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    positions = _tensor("prefix_positions", shapes, "positions", 1)
    if shapes["prefix"] != positions:
        raise _fail("prefix_positions", "prefix", f"shape {list(positions)}", list(shapes["prefix"] or ()))
    return [positions]


def _context_attention(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _group("context_attention", attrs)
    return _attention(shapes, attrs, "context_attention")


def _short_conv(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    gate = _tensor("short_conv", shapes, "gate", 3)
    _tensor("short_conv", shapes, "state", 2)
    _step("short_conv", shapes, gate[0], attrs)
    if attrs["window"] < 1:
        raise _fail("short_conv", "window", "at least 1", attrs["window"])
    weight, channels = _tensor("short_conv", shapes, "weight", 2), gate[1] * gate[2]
    if weight != (channels, attrs["window"]):
        raise _fail("short_conv", "weight", f"shape [{channels}, {attrs['window']}]", list(weight))
    _vector("short_conv", shapes, "bias", channels)
    return [gate]


def _gated_delta(shapes: Shapes, attrs: Attrs, op: str = "gated_delta") -> list[Shape]:
    x, a = _tensor(op, shapes, "x", 2), _same(op, shapes, "a", "b", 2)
    _tensor(op, shapes, "state", 2)
    _step(op, shapes, x[0], attrs)
    for name in ("key_heads", "head_dim"):
        if attrs[name] < 1:
            raise _fail(op, name, "at least 1", attrs[name])
    if a[0] != x[0] or a[1] % attrs["key_heads"]:
        raise _fail(op, "a", f"shape [{x[0]}, a multiple of {attrs['key_heads']} key heads]", list(a))
    keys = 2 * attrs["key_heads"] * attrs["head_dim"]
    if x[1] <= keys or (x[1] - keys) % a[1]:
        raise _fail(op, "x", f"{keys} query and key channels, then those of {a[1]} value heads", list(x))
    conv = _tensor(op, shapes, "conv", 2)
    if conv[0] != x[1] or conv[1] < 1:
        raise _fail(op, "conv", f"shape [{x[1]}, at least 1]", list(conv))
    _vector(op, shapes, "a_log", a[1])
    _vector(op, shapes, "dt_bias", a[1])
    return [(x[0], a[1], (x[1] - keys) // a[1])]


def _ssm_scan(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    op = "ssm_scan"
    x, dt = _tensor(op, shapes, "x", 2), _tensor(op, shapes, "dt", 2)
    _tensor(op, shapes, "state", 2)
    _step(op, shapes, x[0], attrs)
    for name in ("groups", "blocks", "state_dim"):
        if attrs[name] < 1:
            raise _fail(op, name, "at least 1", attrs[name])
    if attrs["blocks"] % attrs["groups"]:
        raise _fail(op, "blocks", f"a multiple of {attrs['groups']} groups", attrs["blocks"])
    if dt[0] != x[0] or dt[1] % attrs["blocks"]:
        raise _fail(op, "dt", f"shape [{x[0]}, a multiple of {attrs['blocks']} blocks]", list(dt))
    others = 2 * attrs["groups"] * attrs["state_dim"]
    if x[1] <= others or (x[1] - others) % dt[1]:
        raise _fail(op, "x", f"the channels of {dt[1]} heads, then {others} of the groups", list(x))
    conv = _tensor(op, shapes, "conv", 2)
    if conv[0] != x[1] or conv[1] < 1:
        raise _fail(op, "conv", f"shape [{x[1]}, at least 1]", list(conv))
    _vector(op, shapes, "conv_bias", x[1])
    for name in ("a_log", "dt_bias", "d"):
        _vector(op, shapes, name, dt[1])
    for name, most in (("dt_max", _LARGEST), ("dt_min", attrs["dt_max"])):
        if not 0.0 <= attrs[name] <= most:
            raise _fail(op, name, f"0 to {most:g}", attrs[name])
    return [(x[0], dt[1], (x[1] - others) // dt[1])]


def _gelu(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    if attrs["approximate"] not in ("none", "tanh"):
        raise _fail("gelu", "approximate", "none or tanh", repr(attrs["approximate"]))
    return [_tensor("gelu", shapes, "x", 2)]


def _scale(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    if not abs(attrs["factor"]) <= _LARGEST:
        raise _fail("scale", "factor", "a finite float32", attrs["factor"])
    return [_tensor("scale", shapes, "x", 2, 3)]


def _softcap(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    if not _SMALLEST <= attrs["cap"] <= _LARGEST:
        raise _fail("softcap", "cap", "a normal float32 above 0", attrs["cap"])
    return [_tensor("softcap", shapes, "x", 2, 3)]


def _clamp(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    if not _SMALLEST <= attrs["limit"] <= _LARGEST:
        raise _fail("clamp", "limit", "a normal float32 above 0", attrs["limit"])
    return [_tensor("clamp", shapes, "x", 2, 3)]


def _elementwise(op: str, shapes: Shapes) -> list[Shape]:
    """The rule of an op without a special rule: all arguments have one shape, and so has the output."""
    first, *others = shapes
    shape = _tensor(op, shapes, first, 2)
    for other in others:
        _same(op, shapes, first, other, 2)
    return [shape]


def _gather_rows(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x = _tensor("gather_rows", shapes, "x", 2)
    return [(_tensor("gather_rows", shapes, "rows", 1)[0], x[1])]


def _argmax(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    return [(_tensor("argmax", shapes, "logits", 2)[0],)]


def _topk(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    logits = _tensor("topk", shapes, "logits", 2)
    if not 1 <= attrs["k"] <= logits[1]:
        raise _fail("topk", "k", f"1 to {logits[1]}", attrs["k"])
    return [(logits[0], attrs["k"]), (logits[0], attrs["k"])]


def _clamped_swiglu(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x = _tensor("clamped_swiglu", shapes, "x", 2)
    if x[1] % 2:
        raise _fail("clamped_swiglu", "x", "an even number of columns", list(x))
    if not attrs["limit"] > 0.0:
        raise _fail("clamped_swiglu", "limit", "a number above 0", attrs["limit"])
    return [(x[0], x[1] // 2)]


def _scale_channels(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x = _tensor("scale_channels", shapes, "x", 2)
    _vector("scale_channels", shapes, "weight", 1 if shapes["weight"] == (1,) else x[1])
    return [x]


def _match_rms(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    _same("match_rms", shapes, "x", "target", 2)
    if not _SMALLEST <= attrs["floor"] <= _LARGEST:
        raise _fail("match_rms", "floor", "a normal float32 above 0", attrs["floor"])
    return [_tensor("match_rms", shapes, "x", 2)]


def _gaussian_topk(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    if not abs(attrs["deviations"]) <= _LARGEST:
        raise _fail("gaussian_topk", "deviations", "a finite float32", attrs["deviations"])
    return [_tensor("gaussian_topk", shapes, "x", 2)]


def _route(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    logits = _tensor("route", shapes, "logits", 2)
    k, groups, kept = attrs["k"], attrs["groups"], attrs["kept_groups"]
    for name, choices in (("score", ROUTE_SCORES), ("group_rule", ROUTE_GROUP_RULES)):
        if attrs[name] not in choices:
            raise _fail("route", name, f"one of {', '.join(choices)}", repr(attrs[name]))
    if groups < 1 or logits[1] % groups:
        raise _fail("route", "groups", f"a divisor of the {logits[1]} experts", groups)
    if not 1 <= kept <= groups:
        raise _fail("route", "kept_groups", f"1 to {groups}", kept)
    if not 1 <= k <= logits[1] // groups * kept:
        raise _fail("route", "k", f"1 to {logits[1] // groups * kept}", k)
    _vector("route", shapes, "bias", logits[1])
    return [(logits[0], k), (logits[0], k)]


def _expert_linear(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    op = "expert_linear"
    x, ids = _tensor(op, shapes, "x", 2, 3), _tensor(op, shapes, "ids", 2)
    weight = _tensor(op, shapes, "weight", 2, 3, 4)
    experts, rows = attrs["num_experts"], attrs["out_features"]
    for name in ("num_experts", "out_features"):
        if attrs[name] < 1:
            raise _fail(op, name, "at least 1", attrs[name])
    if ids[0] != x[0] or (len(x) == 3 and ids[1] != x[1]):
        raise _fail(op, "ids", f"a row for each row of x, {list(x)}", list(ids))
    logical = len(weight) == 2 and attrs["scheme"] in ("f32", "f16", "bf16")
    if logical and weight != (experts * rows, x[-1]):
        raise _fail(op, "weight", f"shape [{experts * rows}, {x[-1]}]", list(weight))
    bias = shapes["bias"]
    if bias is not None and bias != (experts, rows):
        raise _fail(op, "bias", f"shape [{experts}, {rows}]", list(bias))
    return [(x[0], ids[1], rows)]


def _head_linear(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    op = "head_linear"
    x, weight = _tensor(op, shapes, "x", 3), _tensor(op, shapes, "weight", 2, 3, 4)
    heads, rows = attrs["num_heads"], attrs["out_features"]
    if heads != x[1]:
        raise _fail(op, "num_heads", f"{x[1]}, the heads of x", heads)
    if rows < 1:
        raise _fail(op, "out_features", "at least 1", rows)
    logical = len(weight) == 2 and attrs["scheme"] in ("f32", "f16", "bf16")
    if logical and weight != (heads * rows, x[2]):
        raise _fail(op, "weight", f"shape [{heads * rows}, {x[2]}]", list(weight))
    return [(x[0], heads, rows)]


def _combine(shapes: Shapes, attrs: Attrs) -> list[Shape]:
    x, weights = _tensor("combine", shapes, "x", 3), _tensor("combine", shapes, "weights", 2)
    if weights[0] != x[0] or weights[1] != x[1]:
        raise _fail("combine", "weights", f"shape [{x[0]}, {x[1]}]", list(weights))
    return [(x[0], x[2])]


_RULES: Final[dict[str, Callable[[Shapes, Attrs], list[Shape]]]] = {
    "embedding": _embedding,
    "all_gather": _all_gather,
    "all_gather_rounded": _all_gather_rounded,
    "sharded_embedding": _sharded_embedding,
    "broadcast": _broadcast,
    "send": _send,
    "recv": _recv,
    "barrier": _barrier,
    "linear": _linear,
    "route": _route,
    "expert_linear": _expert_linear,
    "combine": _combine,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "rotary_embedding": _rotary_embedding,
    "rope": _rope,
    "kv_append": _kv_append,
    "attention": _attention,
    "context_attention": _context_attention,
    "sink_attention": _sink_attention,
    "clamped_swiglu": _clamped_swiglu,
    "scale_channels": _scale_channels,
    "match_rms": _match_rms,
    "gaussian_topk": _gaussian_topk,
    "short_conv": _short_conv,
    "gated_delta": _gated_delta,
    "gated_delta_tiled": partial(_gated_delta, op="gated_delta_tiled"),
    "ssm_scan": _ssm_scan,
    "latent_append": _latent_append,
    "latent_attention": _latent_attention,
    "head_linear": _head_linear,
    "relative_attention": _relative_attention,
    "disentangled_attention": _disentangled_attention,
    "prefix_lengths": _prefix_lengths,
    "prefix_positions": _prefix_positions,
    "gelu": _gelu,
    "scale": _scale,
    "softcap": _softcap,
    "clamp": _clamp,
    "gather_rows": _gather_rows,
    "argmax": _argmax,
    "topk": _topk,
}
