"""Makes checkpoints with random weights and real shapes for measurements, without PyTorch, downloads or much memory.

    python benchmarks/make_checkpoint.py OUT --shape 1.1b [--vocab 150000] [--dtype bf16]

Weights are normal(0, 0.02) from a fixed seed, written as safetensors in one stream.  The tokenizer is a byte-level BPE
trained on the sources of the standard library; unused words fill the vocabulary up to the requested size.
"""

from __future__ import annotations

import argparse
import json
import struct
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {  # hidden, intermediate, layers, heads, KV heads
    "5m": (256, 704, 6, 4, 2),
    "100m": (768, 2048, 12, 12, 6),
    "348m": (1024, 2816, 24, 16, 8),
    "1.1b": (2048, 5632, 22, 32, 4),
    "8b": (4096, 14336, 32, 32, 8),
}
DTYPES = {"f32": ("F32", "float32", 4), "f16": ("F16", "float16", 2), "bf16": ("BF16", "bfloat16", 2)}
BOS, EOS = "<|begin|>", "<|end|>"
POOL_LEN = 1 << 24
SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data"}


def make_config(shape: str, vocab: int, dtype: str, tied: bool, context_len: int) -> dict[str, object]:
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": DTYPES[dtype][1],
    }


def tensor_shapes(shape: str, vocab: int, tied: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (hidden, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert float32 to the bytes of the element type; bf16 rounds to nearest even."""
    if dtype == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == "f16" else np.float32)


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> int:
    """Write one stream: each tensor is a run of a pool of random numbers from a random position."""
    name_of, _, element = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * element
        header[name] = {"dtype": name_of, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    rng = np.random.default_rng(0)
    pool = encode(rng.standard_normal(POOL_LEN, np.float32) * np.float32(0.02), dtype)
    with path.open("wb", buffering=0) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            left = int(np.prod(shape))
            if len(shape) == 1:
                stream.write(encode(np.ones(left, np.float32), dtype).tobytes())
                continue
            while left:
                start = int(rng.integers(0, POOL_LEN // 2))
                run = pool[start : start + min(left, POOL_LEN // 2)]
                stream.write(memoryview(run).cast("B"))
                left -= len(run)
    return offset


def fill_vocabulary(model: dict[str, Any], vocab: int) -> None:
    """Fill the vocabulary with merges of pairs of learned words, which take as long to load as learned merges."""
    words, merges = model["vocab"], model["merges"]
    learned = [word for word in words if not word.startswith("<|")]
    rng = np.random.default_rng(0)
    while len(words) < vocab:
        left, right = (learned[i] for i in rng.integers(0, len(learned), 2))
        if left + right not in words:
            merges.append([left, right])
            words[left + right] = len(words)


def write_tokenizer(folder: Path, vocab: int, corpus_bytes: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = Path(sysconfig.get_paths()["stdlib"])
    texts, left = [], corpus_bytes
    for path in sorted(root.rglob("*.py")):
        if left > 0 and not SKIP & set(path.relative_to(root).parts):
            texts.append(path.read_text("utf-8", "ignore"))
            left -= len(texts[-1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=1,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    fill_vocabulary(content["model"], vocab)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": False,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a random-weight checkpoint of a real shape.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="348m")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="context length in tokens (default: 2048)"
    )
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--no-tokenizer", action="store_true")
    parser.add_argument("--corpus-bytes", type=int, default=16_000_000)
    args = parser.parse_args()
    if args.vocab < 300:
        parser.error("--vocab: expected at least 300")
    args.out.mkdir(parents=True)
    start = time.monotonic()
    config = make_config(args.shape, args.vocab, args.dtype, args.tied, args.context)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shapes = tensor_shapes(args.shape, args.vocab, args.tied)
    num_bytes = write_weights(args.out / "model.safetensors", shapes, args.dtype)
    print(f"weights: {num_bytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", flush=True)
    if not args.no_tokenizer:
        start = time.monotonic()
        write_tokenizer(args.out, args.vocab, args.corpus_bytes)
        print(f"tokenizer of {args.vocab} words in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
