"""Makes GGUF files with random weights, real shapes and the types that llama-quantize gives each tensor.

    python -m benchmarks.make_gguf OUT.gguf --shape 0.6b --type Q4_K_M

``348m`` has the architecture llama, ``0.6b`` that of Qwen3-0.6B, with tied embeddings.  The blocks are random bytes,
with scales that make values of about 0.02: speed does not depend on the values, so nothing is quantized.  The tokenizer
is that of make_checkpoint.py.  Needs the packages gguf and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.make_checkpoint import write_tokenizer

Blocks = NDArray[np.uint8]
Q4_K, Q6_K, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "Q8_0"))
POOL_BLOCKS = 1 << 15
CORPUS_BYTES = 4_000_000


class Shape(NamedTuple):
    """Sizes of a network."""

    arch: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool


SHAPES = {
    "348m": Shape("llama", 1024, 2816, 24, 16, 8, 64, 32000, False),
    "0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
}


def _f16(value: float) -> Blocks:
    return np.full(1, value, np.float16).view(np.uint8)


def _q8_0(rng: np.random.Generator) -> Blocks:
    """Return blocks of one f16 scale and 32 values."""
    blocks = rng.integers(0, 256, (POOL_BLOCKS, 34), np.uint8)
    blocks[:, 0:2] = _f16(0.02 / 74)
    return blocks


def _q4_k(rng: np.random.Generator) -> Blocks:
    """Return blocks of the f16 steps of scales and minimums, 12 bytes of both and 128 bytes of nibbles."""
    blocks = rng.integers(0, 256, (POOL_BLOCKS, 144), np.uint8)
    step = 0.02 / (32 * 4.6)
    blocks[:, 0:2], blocks[:, 2:4] = _f16(step), _f16(7.5 * step)
    return blocks


def _q6_k(rng: np.random.Generator) -> Blocks:
    """Return blocks of 192 bytes of values, 16 int8 scales and the f16 step of these."""
    blocks = rng.integers(0, 256, (POOL_BLOCKS, 210), np.uint8)
    blocks[:, 208:210] = _f16(0.02 / (74 * 18.5))
    return blocks


MAKERS: dict[gguf.GGMLQuantizationType, Callable[[np.random.Generator], Blocks]] = {
    Q8_0: _q8_0,
    Q4_K: _q4_k,
    Q6_K: _q6_k,
}
BLOCK_LEN = {Q8_0: 32, Q4_K: 256, Q6_K: 256}


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each matrix."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = {"token_embd": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        found |= {
            f"blk.{layer}.attn_q": (q, shape.hidden),
            f"blk.{layer}.attn_k": (kv, shape.hidden),
            f"blk.{layer}.attn_v": (kv, shape.hidden),
            f"blk.{layer}.attn_output": (shape.hidden, q),
            f"blk.{layer}.ffn_gate": (shape.inner, shape.hidden),
            f"blk.{layer}.ffn_up": (shape.inner, shape.hidden),
            f"blk.{layer}.ffn_down": (shape.hidden, shape.inner),
        }
    return found if shape.is_tied else found | {"output": (shape.vocab, shape.hidden)}


def norms(shape: Shape) -> dict[str, int]:
    """Return the length of each norm's weight."""
    found = {"output_norm": shape.hidden}
    for layer in range(shape.layers):
        found |= {f"blk.{layer}.attn_norm": shape.hidden, f"blk.{layer}.ffn_norm": shape.hidden}
        if shape.arch == "qwen3":
            found |= {f"blk.{layer}.attn_q_norm": shape.head_dim, f"blk.{layer}.attn_k_norm": shape.head_dim}
    return found


def type_of(name: str, shape: Shape, kind: str) -> gguf.GGMLQuantizationType:
    """Return the type that llama-quantize gives a matrix: Q4_K_M has half of attn_v and ffn_down in Q6_K."""
    if kind == "Q8_0":
        return Q8_0
    if name == "output" or (name == "token_embd" and shape.is_tied):
        return Q6_K
    if not name.endswith(("attn_v", "ffn_down")):
        return Q4_K
    layer, eighth = int(name.split(".")[1]), shape.layers // 8
    more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    return Q6_K if more else Q4_K


def write_config(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocab)
    if shape.arch == "qwen3":
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    else:
        writer.add_rope_dimension_count(shape.head_dim)


def write_words(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Write a trained tokenizer; its first two tokens begin and end a text."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        write_tokenizer(Path(temporary), vocab, CORPUS_BYTES)
        content = json.loads((Path(temporary) / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    tokens = sorted(words, key=words.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def write_tensors(writer: gguf.GGUFWriter, shape: Shape, kind: str) -> None:
    """Add all tensors; each matrix repeats a pool of random blocks from a random position."""
    rng = np.random.default_rng(0)
    pools = {of: make(rng) for of, make in MAKERS.items()}
    for name, length in norms(shape).items():
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))
    for name, (rows, cols) in matrices(shape).items():
        of = type_of(name, shape, kind)
        pool = pools[of]
        first = int(rng.integers(0, POOL_BLOCKS))
        count = rows * (cols // BLOCK_LEN[of])
        blocks = np.take(pool, np.arange(first, first + count), axis=0, mode="wrap")
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="348m")
    parser.add_argument("--type", choices=("Q8_0", "Q4_K_M"), default="Q4_K_M")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    writer = gguf.GGUFWriter(args.out, shape.arch)
    writer.add_name(args.shape)
    write_config(writer, shape)
    write_words(writer, shape.vocab)
    writer.add_file_type(gguf.LlamaFileType["MOSTLY_" + args.type])
    write_tensors(writer, shape, args.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
