"""The op table: every op that a network may be made of.

A row is a name, a version, a schema and a tolerance; the reference of op ``x`` is the function ``x`` of
``penstock.ops.reference``, its kernel is found by the same name in the native core.  Eager mode, capture,
the bundle and the op tests are driven from here.  This module knows no tensors and imports no PyTorch.

The schema language is that of ``torch.library`` with two more argument types: ``Weight`` (a parameter in a
packed layout) and ``State`` (KV pages, written in place when marked ``(a!)``).  The native core carries the
same strings; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LINEAR_SCHEMES", "OPS", "Op", "add_custom_op", "find_op", "is_custom_op", "loaded_version"]

LINEAR_SCHEMES = ("f32", "f16", "bf16", "w8a16", "w8a8", "w4a16", "w4a8")


@dataclass(frozen=True)
class Op:
    """One row: ``tolerance`` bounds the relative error of a kernel against the float64 reference."""

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
    Op("gelu", 1, "(Tensor x, *, str approximate) -> Tensor", 1e-6),
    Op("silu_mul", 1, "(Tensor gate, Tensor up) -> Tensor", 1e-6),
    Op("add", 1, "(Tensor a, Tensor b) -> Tensor", 0.0),
    Op("mul", 1, "(Tensor a, Tensor b) -> Tensor", 0.0),
    Op("gather_rows", 1, "(Tensor x, Tensor rows) -> Tensor", 0.0),
    Op("all_reduce", 1, "(Tensor x) -> Tensor", 0.0),
    Op("argmax", 1, "(Tensor logits) -> Tensor", 0.0),
    Op("topk", 1, "(Tensor logits, *, int k) -> (Tensor, Tensor)", 0.0),
)

_BY_NAME = {op.name: op for op in OPS}
_CUSTOM: dict[str, Op] = {}


def find_op(name: str) -> Op:
    """The row named ``name``, of the table, or of a user's own op that is declared or loaded; KeyError names it."""
    found = _BY_NAME.get(name) or _CUSTOM.get(name)
    if found is not None:
        return found
    loaded = loaded_version(name)
    if loaded is None:
        raise KeyError(f"[{name}] is not in the op table; it has {', '.join(sorted({**_BY_NAME, **_CUSTOM}))}")
    return Op(name, *loaded, 0.0)


def add_custom_op(op: Op) -> None:
    """A row beside the table, of an op of a user's own: "owner::op"."""
    _CUSTOM[op.name] = op


def is_custom_op(name: str) -> bool:
    """Whether a user's own op of that name is declared."""
    return name in _CUSTOM


def loaded_version(name: str) -> tuple[int, str] | None:
    """Version and schema of a user's own op in the libraries that are loaded; None where there is none."""
    if "::" not in name:
        return None
    from penstock.core.native import op_schemas  # here: the table alone needs no core

    for text in op_schemas()[len(OPS) :]:
        found, _, schema = text.partition(" ")
        known, _, version = found.rpartition(".")
        if known == name:
            return int(version), schema
    return None
