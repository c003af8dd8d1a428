"""The op table: every op that a network can use.

A row is a name, a version, a schema and a tolerance.  The reference of op ``x`` is the function ``x`` of
``penstock.ops.reference``; its kernel in the native core has the same name.  Eager mode, capture, the bundle format and
the op tests are driven from this table.  This module does not import tensors or PyTorch.

The schema language is that of ``torch.library`` with two more argument types: ``Weight`` (a parameter in a
packed layout) and ``State`` (pages, written in place when marked ``(a!)``).  The native core contains the
same strings, and a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ops.general_table import GENERAL_SCHEMAS

__all__ = [
    "BLOCK_SCHEMES",
    "EXCHANGES",
    "GENERAL_OPS",
    "LINEAR_SCHEMES",
    "OPS",
    "Op",
    "add_custom_op",
    "find_op",
    "is_custom_op",
    "loaded_version",
]

BLOCK_SCHEMES = (
    *("q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4", "uint4"),
    *("q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs", "q2_k", "q3_k"),
    *("nvfp4", "tq2_0", "tq1_0", "q2_0", "q1_0"),
)
"""The schemes of the blocks of a GGUF file, which float weights cannot have."""
LINEAR_SCHEMES = ("f32", "f16", "bf16", "w8a16", "w8a8", "w4a16", "w4a8", "w8a8_h32", "w4a8_h32")
"""The schemes that float weights can have."""


@dataclass(frozen=True)
class Op:
    """A row of the table.  ``tolerance`` bounds the relative error of a kernel against the float64 reference."""

    name: str
    version: int
    schema: str
    tolerance: float


_BATCH = "Tensor positions, Tensor request_starts, Tensor page_tables"

OPS: tuple[Op, ...] = (
    Op("embedding", 1, "(Tensor ids, Weight weight, *, int dim) -> Tensor", 0.0),
    Op("linear", 1, "(Tensor x, Weight weight, Weight? bias, *, int out_features, str scheme) -> Tensor", 1e-5),
    Op("rms_norm", 1, "(Tensor x, Weight weight, *, float eps) -> Tensor", 1e-6),
    Op("add_rms_norm", 1, "(Tensor x, Tensor residual, Weight weight, *, float eps) -> (Tensor, Tensor)", 1e-6),
    Op("layer_norm", 1, "(Tensor x, Weight weight, Weight? bias, *, float eps) -> Tensor", 1e-6),
    Op("rotary_embedding", 1, "(Tensor positions, Weight inv_freq, *, float scaling) -> Tensor", 1e-6),
    Op("rope", 1, "(Tensor x, Tensor cos_sin, *, bool interleaved) -> Tensor", 1e-6),
    Op("kv_append", 1, f"(Tensor k, Tensor v, State(a!) state, {_BATCH}, *, int group) -> ()", 0.0),
    Op(
        "attention",
        1,
        f"(Tensor q, State state, {_BATCH}, Weight? alibi, *, "
        "float scale, int group, bool causal, int window, float softcap) -> Tensor",
        1e-5,
    ),
    Op(
        "short_conv",
        1,
        f"(Tensor gate, State state, {_BATCH}, Weight weight, Weight? bias, *, int group, int window) -> Tensor",
        1e-6,
    ),
    Op("gelu", 1, "(Tensor x, *, str approximate) -> Tensor", 1e-6),
    Op("silu_mul", 1, "(Tensor gate, Tensor up) -> Tensor", 1e-6),
    Op("add", 1, "(Tensor a, Tensor b) -> Tensor", 0.0),
    Op("mul", 1, "(Tensor a, Tensor b) -> Tensor", 0.0),
    Op("scale", 1, "(Tensor x, *, float factor) -> Tensor", 0.0),
    Op("softcap", 1, "(Tensor x, *, float cap) -> Tensor", 1e-6),
    Op("relu_squared", 1, "(Tensor x) -> Tensor", 0.0),
    Op("sigmoid_mul", 1, "(Tensor gate, Tensor x) -> Tensor", 1e-6),
    Op("relu", 1, "(Tensor x) -> Tensor", 0.0),
    Op("clamp", 1, "(Tensor x, *, float limit) -> Tensor", 0.0),
    Op("elu", 1, "(Tensor x) -> Tensor", 1e-6),
    Op("gather_rows", 1, "(Tensor x, Tensor rows) -> Tensor", 0.0),
    Op("all_gather", 1, "(Tensor x, *, str starts, int rank) -> Tensor", 0.0),
    Op("sharded_embedding", 1, "(Tensor ids, Weight weight, *, int dim, str starts, int rank) -> Tensor", 0.0),
    Op("broadcast", 1, "(Tensor x, *, int root, int world, int rank) -> Tensor", 0.0),
    Op("send", 1, "(Tensor x, *, int target, int world, int rank) -> Tensor", 0.0),
    Op("recv", 1, "(Tensor rows, *, int width, int source, int world, int rank) -> Tensor", 0.0),
    Op("barrier", 1, "(Tensor x, *, int world, int rank) -> Tensor", 0.0),
    Op(
        "context_attention",
        1,
        f"(Tensor q, State state, {_BATCH}, Weight? alibi, *, "
        "float scale, int group, bool causal, int window, float softcap, int world, int rank) -> Tensor",
        1e-5,
    ),
    Op("argmax", 1, "(Tensor logits) -> Tensor", 0.0),
    Op("topk", 1, "(Tensor logits, *, int k) -> (Tensor, Tensor)", 0.0),
    Op(
        "route",
        1,
        "(Tensor logits, Weight? bias, *, int k, str score, bool renormalise, float factor, int groups, "
        "int kept_groups, str group_rule) -> (Tensor, Tensor)",
        1e-5,
    ),
    Op(
        "expert_linear",
        1,
        "(Tensor x, Weight weight, Tensor ids, Weight? bias, *, int num_experts, int out_features, str scheme) "
        "-> Tensor",
        1e-5,
    ),
    Op("combine", 1, "(Tensor x, Tensor weights) -> Tensor", 1e-6),
    Op(
        "sink_attention",
        1,
        f"(Tensor q, State state, {_BATCH}, Weight? alibi, Weight sinks, *, "
        "float scale, int group, bool causal, int window, float softcap) -> Tensor",
        1e-5,
    ),
    Op("clamped_swiglu", 1, "(Tensor x, *, float alpha, float limit) -> Tensor", 1e-6),
    Op(
        "gated_delta",
        1,
        f"(Tensor x, Tensor a, Tensor b, State(a!) state, {_BATCH}, Weight conv, Weight a_log, Weight dt_bias, *, "
        "int group, int key_heads, int head_dim) -> Tensor",
        1e-5,
    ),
    Op("latent_append", 1, f"(Tensor latent, Tensor rope, State(a!) state, {_BATCH}, *, int group) -> ()", 0.0),
    Op(
        "latent_attention",
        1,
        f"(Tensor q, State state, {_BATCH}, Tensor q_rope, *, "
        "float scale, int group, bool causal, int window, float softcap) -> Tensor",
        1e-5,
    ),
    Op(
        "head_linear",
        1,
        "(Tensor x, Weight weight, *, int num_heads, int out_features, str scheme) -> Tensor",
        1e-5,
    ),
    Op("all_gather_rounded", 1, "(Tensor x, *, str starts, int rank, int bits) -> Tensor", 0.0),
    Op(
        "ssm_scan",
        1,
        f"(Tensor x, Tensor dt, State(a!) state, {_BATCH}, Weight conv, Weight? conv_bias, Weight a_log, "
        "Weight dt_bias, Weight d, *, int group, int groups, int blocks, int state_dim, float dt_min, float dt_max) "
        "-> Tensor",
        1e-5,
    ),
    Op("scale_channels", 1, "(Tensor x, Weight weight) -> Tensor", 0.0),
    Op("match_rms", 1, "(Tensor x, Tensor target, *, float floor) -> Tensor", 1e-6),
    Op("gaussian_topk", 1, "(Tensor x, *, float deviations) -> Tensor", 1e-5),
    Op(
        "relative_attention",
        1,
        f"(Tensor q, State state, {_BATCH}, Weight? alibi, Weight? sinks, Weight? bias, Tensor? prefix, *, "
        "float scale, int group, bool causal, int window, float softcap, str keys) -> Tensor",
        1e-5,
    ),
    Op("prefix_lengths", 1, f"(Tensor ids, State(a!) state, {_BATCH}, *, int group, int token) -> Tensor", 0.0),
    Op("prefix_positions", 1, "(Tensor positions, Tensor prefix, *, bool behind) -> Tensor", 0.0),
    Op(
        "disentangled_attention",
        1,
        f"(Tensor q, State state, {_BATCH}, Tensor? c2p, Tensor? p2c, Weight buckets, *, "
        "float scale, int group, bool causal, int window, float softcap) -> Tensor",
        1e-5,
    ),
    Op(
        "gated_delta_tiled",
        1,
        f"(Tensor x, Tensor a, Tensor b, State(a!) state, {_BATCH}, Weight conv, Weight a_log, Weight dt_bias, *, "
        "int group, int key_heads, int head_dim) -> Tensor",
        1e-5,
    ),
)

EXCHANGES = (
    *("all_gather", "all_gather_rounded", "sharded_embedding", "broadcast", "send", "recv", "barrier"),
    "context_attention",
)
"""The ops of several ranks.  None may be left out of the graph of one rank, because others would wait for it."""

GENERAL_OPS: tuple[Op, ...] = tuple(Op(name, 1, schema, 1e-5) for name, schema in GENERAL_SCHEMAS.items())
"""The ops of general networks, which follow those of ``OPS`` in the core."""

_BY_NAME = {op.name: op for op in (*OPS, *GENERAL_OPS)}
_CUSTOM: dict[str, Op] = {}


def find_op(name: str) -> Op:
    """Return the row of an op of the table, or of a custom op that is declared or loaded.

    Raises KeyError, which names the op and those that exist.
    """
    op = _BY_NAME.get(name) or _CUSTOM.get(name)
    if op is not None:
        return op
    loaded = loaded_version(name)
    if loaded is None:
        names = ", ".join(sorted({**_BY_NAME, **_CUSTOM}))
        raise KeyError(f"[{name}] expected an op of the op table, which has {names}")
    return Op(name, *loaded, 0.0)


def add_custom_op(op: Op) -> None:
    """Add the row of a custom op, named "owner::op"."""
    _CUSTOM[op.name] = op


def is_custom_op(name: str) -> bool:
    """Return True if a custom op of that name is declared."""
    return name in _CUSTOM


def loaded_version(name: str) -> tuple[int, str] | None:
    """Return the version and the schema of a custom op in the loaded libraries; None when no library has it."""
    if "::" not in name:
        return None
    from penstock.core.native import op_schemas  # imported here: the table must not load the core

    for text in op_schemas()[len(OPS) :]:
        versioned, _, schema = text.partition(" ")
        op_name, _, version = versioned.rpartition(".")
        if op_name == name:
            return int(version), schema
    return None
