"""GGUF files of tests, written byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["ARRAY_OF", "METADATA", "gguf_bytes", "llama_file", "llama_tensors", "text_metadata"]

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 96
"""The sizes of the small llama."""
ARRAY_OF = {str: 8, float: 6, int: 5, bool: 7}
_TYPES: dict[type, tuple[int, str]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED_FORWARD,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        kind = ARRAY_OF[type(value[0])]
        items = b"".join(_text(item) if kind == 8 else struct.pack({6: "<f", 5: "<i", 7: "<?"}[kind], item)
                         for item in value)  # fmt: skip
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    kind, form = _TYPES[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]) -> bytes:
    """Return a file of version 3; ``tensors`` has the number of the element type, the shape and the bytes by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def llama_tensors(vocab_size: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a llama with a tied head, by the names of the file."""
    rng = np.random.default_rng(seed)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (kv_size, HIDDEN),
                "attn_v": (kv_size, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (FEED_FORWARD, HIDDEN),
                "ffn_up": (FEED_FORWARD, HIDDEN),
                "ffn_down": (HIDDEN, FEED_FORWARD),
            }.items()
        }
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def llama_file(metadata: Mapping[str, Any] | None = None, vocab_size: int = 300) -> bytes:
    """Return a file with a small llama."""
    tensors = {name: (0, array.shape, array.tobytes()) for name, array in llama_tensors(vocab_size).items()}
    return gguf_bytes({**METADATA, **(metadata or {})}, tensors)


def text_metadata() -> dict[str, Any]:
    """Return the metadata of a SentencePiece tokenizer of bytes, letters and three merged tokens."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581a",
             "\u2581ab"]  # fmt: skip
    types = [2, 3, 3, *[6] * 256, *[1] * 6]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -4.0, -4.5, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
