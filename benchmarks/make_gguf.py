"""Makes GGUF files with random weights, real shapes and the types that llama-quantize gives each tensor.

    python -m benchmarks.make_gguf OUT.gguf --shape 0.6b --type Q4_K_M

``gguf_shapes.py`` has the sizes: of a llama, of Qwen3-0.6B (for text and for embeddings), of Qwen3.5-0.8B and, with
fewer layers, of Qwen3-30B-A3B and gpt-oss-20b.  With MXFP4, the matrices that are not of experts are Q8_0.  The blocks
are random bytes, with scales that make values of about 0.02: speed does not depend on the values, so nothing is
quantized.  The tokenizer is that of make_checkpoint.py.  Needs the packages gguf and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.gguf_shapes import SHAPES, Shape, keys, matrices, vectors
from benchmarks.make_checkpoint import write_tokenizer

Blocks = NDArray[np.uint8]
Q4_K, Q6_K, Q8_0, MXFP4 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"))
FILE_TYPES = {"Q8_0": "MOSTLY_Q8_0", "Q4_K_M": "MOSTLY_Q4_K_M", "MXFP4": "MOSTLY_MXFP4_MOE"}
POOL_BLOCKS = 1 << 15
CORPUS_BYTES = 4_000_000


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


def _mxfp4(rng: np.random.Generator) -> Blocks:
    """Return blocks of an exponent and 16 bytes of nibbles."""
    blocks = rng.integers(0, 256, (POOL_BLOCKS, 17), np.uint8)
    blocks[:, 0] = 127 - 7
    return blocks


MAKERS: dict[gguf.GGMLQuantizationType, Callable[[np.random.Generator], Blocks]] = {
    Q8_0: _q8_0,
    Q4_K: _q4_k,
    Q6_K: _q6_k,
    MXFP4: _mxfp4,
}
BLOCK_LEN = {Q8_0: 32, Q4_K: 256, Q6_K: 256, MXFP4: 32}


def type_of(name: str, shape: Shape, kind: str) -> gguf.GGMLQuantizationType:
    """Return the type that llama-quantize gives a matrix: Q4_K_M has half of attn_v and ffn_down in Q6_K."""
    if kind == "MXFP4":
        return MXFP4 if name.endswith("_exps") else Q8_0
    if kind == "Q8_0":
        return Q8_0
    if name == "output" or (name == "token_embd" and shape.is_tied):
        return Q6_K
    if not name.endswith(("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps")):
        return Q4_K
    layer, eighth = int(name.split(".")[1]), shape.layers // 8
    more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    return Q6_K if more else Q4_K


def write_config(writer: gguf.GGUFWriter, shape: Shape) -> None:
    for key, value in keys(shape).items():
        name = f"{shape.arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


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
    for name, size in vectors(shape).items():
        writer.add_tensor(name, vector(rng, name, size))
    for name, size in matrices(shape).items():
        of = type_of(name, shape, kind)
        pool = pools[of]
        first = int(rng.integers(0, POOL_BLOCKS))
        count = math.prod(size) // BLOCK_LEN[of]
        blocks = np.take(pool, np.arange(first, first + count), axis=0, mode="wrap")
        writer.add_tensor(f"{name}.weight", blocks.reshape(*size[:-1], -1), raw_dtype=of)


def vector(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the values of a tensor that is not quantized."""
    if name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight")):
        return rng.normal(0, 0.2, size).astype(np.float32)
    if name.endswith("ssm_a"):
        return np.full(size, -0.1, np.float32)
    return np.full(size, "bias" not in name and "sinks" not in name, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="348m")
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_K_M")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    writer = gguf.GGUFWriter(args.out, shape.arch)
    writer.add_name(args.shape)
    write_config(writer, shape)
    write_words(writer, shape.vocab)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[args.type]])
    write_tensors(writer, shape, args.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
