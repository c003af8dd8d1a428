"""Llamas of a few layers with the element type that llama-quantize gives each tensor.

The rules are those of llama.cpp's ``llama_tensor_get_type``, without an importance matrix.  A type with blocks of 256
columns falls back to another one where the columns are no multiple of 256, and to F16 where they are none of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.gguf_blocks import TYPES, quantized

__all__ = ["FILE_TYPES", "HIDDEN_SIZES", "types_of", "write_mix"]

HIDDEN_SIZES = (640, 896, 1152, 1536, 2560)
FILE_TYPES = {"Q4_K_M": "q4_k", "Q5_K_M": "q5_k", "Q3_K_M": "q3_k", "Q2_K": "q2_k", "IQ4_XS": "iq4_xs"}
"""The types of files, and the type that most tensors of each have."""
VOCAB, LAYERS, HEAD_DIM, HEADS, KV_HEADS, INNER = 96, 2, 64, 5, 1, 352
"""The columns of ``attn_output`` (320) and ``ffn_down`` (352) are no multiple of 256."""
_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q3_k": "iq4_nl", "q2_k": "iq4_nl", "iq4_xs": "iq4_nl"}
_OLDER_FALLBACKS = {**_FALLBACKS, "q3_k": "q4_0", "q2_k": "q4_0"}
_POOL_ROWS = 48


def _is_tied(hidden: int) -> bool:
    return hidden < 1000  # as the published models of these sizes


def _shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each matrix."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd": (VOCAB, hidden)} | ({} if _is_tied(hidden) else {"output": (VOCAB, hidden)})
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
                "ffn_gate": (INNER, hidden), "ffn_up": (INNER, hidden), "ffn_down": (hidden, INNER),
            }.items()
        }  # fmt: skip
    return shapes


def _chosen_type(name: str, file_type: str, is_tied: bool) -> str:
    """Return the type of a matrix whose columns are a multiple of 256."""
    own, part, is_last = FILE_TYPES[file_type], name.rsplit(".", 1)[-1], name.startswith(f"blk.{LAYERS - 1}.")
    if part == "output" or (part == "token_embd" and is_tied):
        return "q6_k"
    more = {
        "Q4_K_M": {"attn_v": "q6_k" if is_last else own, "ffn_down": "q6_k" if is_last else own},
        "Q5_K_M": {"attn_v": "q6_k" if is_last else own, "ffn_down": "q6_k" if is_last else own},
        "Q3_K_M": {"attn_v": "q5_k", "attn_output": "q4_k", "ffn_down": "q4_k" if is_last else own},
        "Q2_K": {"attn_v": "q4_k", "attn_output": "q3_k", "ffn_down": "q3_k"},
        "IQ4_XS": {"attn_v": "q5_k"},
    }
    return more[file_type].get(part, own)


def types_of(hidden: int, file_type: str, *, is_older: bool = False) -> dict[str, str]:
    """Return the type of each matrix; ``is_older``: by versions that had no IQ4_NL to fall back to."""
    fallbacks, types = _OLDER_FALLBACKS if is_older else _FALLBACKS, {}
    for name, (_, columns) in _shapes(hidden).items():
        kind = _chosen_type(name, file_type, _is_tied(hidden))
        types[name] = fallbacks[kind] if columns % 256 else kind
    return types


@cache
def _pool(kind: str, columns: int) -> NDArray[np.generic]:
    """Return the blocks of some random rows, which matrices repeat: to quantize whole ones would take long."""
    rng = np.random.default_rng(columns)
    return quantized(rng.normal(0, columns**-0.5, (_POOL_ROWS, columns)).astype(np.float32), kind)


def write_mix(
    path: Path, hidden: int, file_type: str, *, is_older: bool = False, changes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a file and return the types of its matrices; ``changes``: other types, as the user may give tensors."""
    rng = np.random.default_rng(hidden)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    types = types_of(hidden, file_type, is_older=is_older) | dict(changes or {})
    for name, shape in _shapes(hidden).items():
        blocks = _pool(types[name], shape[1])[rng.integers(0, _POOL_ROWS, shape[0])]
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType(TYPES[types[name]]))
    norms = ["output_norm", *(f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return types
