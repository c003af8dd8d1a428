"""Makes a set of golden bundles: what this release writes, which every later one of the same major version reads.

    python -m tests.golden.make 1.0

A set is written once, under the version of the format, and never again: of a newer format one is added beside it.  The
network is a Llama of random weights with every kind of node that Llama has, small enough to be kept; its tokenizer is
a byte-level BPE of GPT-2's pattern.  ``expected.json`` has what the bundles answered on the day.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.graph.export import export_bundle
from tests.golden import PROMPTS, Answers, answers_of

FOLDER = Path(__file__).parent
SCHEMES = ("f32", "w8a8", "w4a8")
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 48, 2, 4, 2, 8, 320
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": True, "mlp_bias": False,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows, cols in (("q", q, HIDDEN), ("k", kv, HIDDEN), ("v", kv, HIDDEN), ("o", HIDDEN, q)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, cols)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        for name, rows, cols in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            shapes[f"{at}mlp.{name}_proj.weight"] = (rows, cols)
        for name in ("input", "post_attention"):
            shapes[f"{at}{name}_layernorm.weight"] = (HIDDEN,)
    return shapes


def make_tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Weights that make a text wander: larger than what training begins with."""
    rng = np.random.default_rng(7)
    found = {}
    for name, shape in tensor_shapes().items():
        norm = name.endswith("norm.weight")
        spread = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        found[name] = (norm + spread * rng.standard_normal(shape)).astype(np.float32)
    return found


def make_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB}")
    return tokenizer


def write_checkpoint(folder: Path) -> None:
    save_file(make_tensors(), folder / "model.safetensors")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}))


def main() -> None:
    target = FOLDER / sys.argv[1]
    target.mkdir()  # a set that is there stays as it is
    expected: dict[str, Answers] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        for scheme in SCHEMES:
            path = target / f"{scheme}.psm"
            export_bundle(Path(folder), path, scheme=scheme)
            expected[scheme] = answers_of(path)
    for scheme, found in expected.items():
        for prompt, ways in zip(PROMPTS, found["answers"], strict=True):
            print(scheme, repr(prompt), {way: one["text"] for way, one in ways.items()})
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
